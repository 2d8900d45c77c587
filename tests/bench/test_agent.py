"""The agent's bench: it runs, checks what it moves, and its rows are valid."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from bench.agent import WHATS, Checked, Row
from dualpath_sglang.transport.base import Span, StridedDestination

ROOT = Path(__file__).parents[2]


def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = f"-m bench.agent --size-mib 4 --layer-kib 16 --rounds 1 --json {out} --dir {tmp_path}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["what"] for row in rows] == list(WHATS)
    for row in rows:
        assert set(row) == {field.name for field in fields(Row)}
        assert row["gb_s"] > 0
    by_what = {row["what"]: row for row in rows}
    assert by_what["bare"]["of_bare"] == by_what["bare"]["cpu_of_bare"] == 1.0
    assert by_what["memcpy"]["of_memcpy"] == 1.0
    for what in ("memory", "storage", "local", "local storage"):
        assert 0 < by_what[what]["first_ms"] <= by_what[what]["ms"]
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"


def test_a_wrong_byte_is_counted() -> None:
    told = Checked(StridedDestination.of_layers(memoryview(bytearray(16)), 4, 4))
    told.views(Span(0, 1, 1, 1), 0.0)
    told.landed(Span(0, 1, 1, 1), [123])
    assert told.bad == 1
