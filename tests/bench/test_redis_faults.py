"""The bench of Redis' faults: no wrong answer, no failed request, and the rows are valid."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.redis_bed import CHAIN, CHAINS, DEADLINE_S, Crashes
from bench.redis_faults import FAULTS, Row, measure
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from tests.support.blocks import chain

ROOT = Path(__file__).parents[2]
TRIED = ["none", "refused", "flushed"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.redis_faults", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    chosen = ["--faults", ",".join(TRIED), "--seconds", "0.3"]
    done = command(*chosen, "--json", str(out), "--dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deadline 5 ms" in done.stdout
    rows = json.loads(out.read_text())
    assert [row["fault"] for row in rows] == TRIED
    for row in rows:
        assert set(row) == {field.name for field in fields(Row)}
        assert row["wrong"] == row["failed"] == 0
        assert row["hits"] > 0
        assert row["calls"] == row["hits"] + row["misses"]
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["blocks_checked"] >= CHAIN * CHAINS
    assert rows[1]["misses"] > 0, "the fault was one"
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"


def test_a_wrong_answer_and_a_failed_request_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(cache: KVCache, pool: object, keys: list[bytes]) -> list[bool]:
        if keys[0] == chain(0, 1)[0] and len(keys) > CHAIN:
            raise RuntimeError("a failure of the test")
        return [True] * len(keys)  # the last one was never stored

    monkeypatch.setattr(KVCache, "lookup", lie)
    row = measure("none", 0.1, tmp_path / "store", Crashes())
    assert row.failed > 0
    assert row.wrong > 0
    assert row.calls == row.failed + row.wrong


def test_a_fault_that_is_none_is_refused_with_those_there_are() -> None:
    done = command("--faults", "none,earthquake")
    assert done.returncode != 0
    assert "earthquake" in done.stderr
    assert all(fault in done.stderr for fault in FAULTS)


def test_the_deadline_is_the_one_that_users_get() -> None:
    assert DualPathConfig.load({}).index_timeout_s == DEADLINE_S
