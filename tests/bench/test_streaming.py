"""The streaming benches run, and say what they should; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_streaming, streaming


def test_the_rows_are_those_of_the_three_modes(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    streaming.main(
        json=out,
        rounds=1,
        layers=4,
        times=2,
        pages=16,
        layer_kib=4,
        seconds=0.1,
        hit_share=0.5,
        directory=tmp_path,
    )
    rows = json.loads(out.read_text())
    assert [(row["mode"], row["layers"]) for row in rows] == [
        (mode, layers) for layers in (4, 8) for mode in ("streaming", "whole_page", "recompute")
    ]
    assert all(row["ttft_s"] >= row["compute_s"] > 0 for row in rows)
    assert not list(tmp_path.glob(".bench-*")), "it cleans up"


def test_a_wrong_byte_ends_the_bench(tmp_path: Path) -> None:
    case = streaming.Case(layers=2, pages=16, layer_bytes=4096, seconds=0.1, hit_share=0.5)
    bed = streaming.Bench(case, tmp_path / "store")
    try:
        bed.run("streaming")
        bed._stored[5000] ^= 1
        for mode in ("streaming", "whole_page"):
            with pytest.raises(streaming.BenchError, match="wrong bytes"):
                bed.run(mode)
    finally:
        bed.close()


def test_without_a_device_the_bytes_are_checked_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    gpu_streaming.main(json=out, pages=4, layers=3, rounds=1, cpu=True, directory=tmp_path)
    text = capsys.readouterr().out
    assert "Nothing is measured" in text
    assert "mha" in text and "mla" in text and text.count("are right") == 2
    assert json.loads(out.read_text()) == []
