"""The router's bench: it runs, and its rows are valid."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.router import WAYS, WHATS, Held, Row

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = "-m bench.router --rate 20 --seconds 1 --rounds 1 --sessions 60 --open-streams 20"
    done = subprocess.run(
        [sys.executable, *command.split(), "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    times, held = rows[:-2], rows[-2:]
    assert [(r["what"], r["way"]) for r in times] == [(a, b) for a in WHATS for b in WAYS]
    for row in times:
        assert set(row) == {field.name for field in fields(Row)}
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["way"] == "router" or row["added_p99_ms"] == 0
    for row in held:
        assert set(row) == {field.name for field in fields(Held)}
        assert row["rss_mib"] > 0
    assert [row["count"] for row in held] == [20, 60]
