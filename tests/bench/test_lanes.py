"""The bench of lanes: it runs, its rows are valid, nothing is left behind. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.lanes import WHATS, Row, bound_s, main, missed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = f"-m bench.lanes --seconds 0.5 --rate 50mbit --json {out}"
    with subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, complaints = process.communicate(timeout=280)
    assert process.returncode == 0, complaints
    rows = {row["what"]: row for row in json.loads(out.read_text())}
    assert list(rows) == list(WHATS)
    assert all(set(row) == {field.name for field in fields(Row)} for row in rows.values())
    for what in ("idle", "beside KV", "beside KV, IPv6", "no lanes"):
        assert rows[what]["requests"] > 0
        assert 0 < rows[what]["p50_ms"] <= rows[what]["p99_ms"]
    assert rows["KV alone"]["model_share"] == 0.0 < rows["KV alone"]["kv_share"]
    assert rows["model alone"]["kv_share"] == 0.0 < rows["model alone"]["model_share"]
    assert rows["both flood"]["kv_share"] < rows["KV alone"]["kv_share"]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"dplanes-{process.pid}-" not in listed.stdout


def test_what_is_missed_is_told() -> None:
    rows = [
        Row("idle", 1.0, 1.0),
        Row("beside KV", 2.0, 9.0, bound_ms=2.2),
        Row("beside KV, IPv6", 2.3, 9.0, bound_ms=2.2),
        Row("KV alone", kv_share=0.94),
    ]
    assert missed(rows) == [
        "beside KV, IPv6: p50 is 2.3 ms, over 2.2 ms",
        "KV alone takes 0.94 of the link, under 0.95",
    ]
    # Twelve packets, each behind one of 1514 bytes.
    assert bound_s(0.001, 100 * 10**6) == pytest.approx(0.0015 + 12 * 121.12e-6)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"^bench\.lanes: Network namespaces need root\.$"):
        main(None, 1.0, "200mbit", "99:1")
    with pytest.raises(SystemExit, match="A rate is a number and a unit"):
        main(None, 1.0, "fast", "99:1")
