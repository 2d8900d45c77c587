"""The index bench: every candidate answers rightly, and the rows are valid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.index import chains
from bench.index_candidates import CANDIDATES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_is_an_index(tmp_path: Path, name: str) -> None:
    known = chains(512, "known")
    strangers = [record.key for record in chains(256, "strangers")[0]]
    index = CANDIDATES[name](tmp_path / "index")
    for chain in known:
        index.publish(chain)
    keys = [record.key for record in known[0]]
    assert index.prefix(keys) == len(keys)
    assert index.prefix([*keys[:7], strangers[0], *keys[7:]]) == 7
    assert index.lookup(keys) == [record.placement for record in known[0]]
    assert index.lookup(strangers[:3]) == [None] * 3
    if name != "lmdb":
        index.touch(keys)
        assert index.evict(100) == 100
        assert index.prefix(keys) == len(keys), "the other chain was the older one"
        other = [record.key for record in known[1]]
        assert index.prefix(other) == len(other) - 100, "children go before their parents"
    index.close()


def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = f"-m bench.index --blocks 2048 --calls 2 --json {out} --dir {tmp_path}"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {row["index"] for row in rows} == set(CANDIDATES)
    assert "left out" not in done.stderr
    ops = {"publish", "exists", "lookup", "touch", "evict", "scan"}
    assert {row["op"] for row in rows} == ops
    for row in rows:
        assert set(row) == {"index", "op", "n", "p50_ms", "p99_ms", "per_s", "bytes_per_block"}
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"
