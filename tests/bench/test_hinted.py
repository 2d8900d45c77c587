"""The bench of hinted reads runs, and its rows are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.agent import blocks_of
from bench.hinted import measure


@pytest.mark.slow
def test_every_way_brings_the_hit(tmp_path: Path) -> None:
    rows = {row.what: row for row in measure(blocks_of(1, 256), tmp_path, 1, "off")}
    assert set(rows) == {"direct", "own agent", "again", "half in runs", "half by key"}
    assert all(row.gb_s > 0 for row in rows.values())
    assert rows["direct"].of_direct == rows["half in runs"].of_runs == 1
    assert rows["half in runs"].mean_io_kib > rows["half by key"].mean_io_kib > 0
