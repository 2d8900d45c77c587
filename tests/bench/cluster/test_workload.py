"""Trajectories: the generator has the means of the paper's Table 2, windows are parts of them."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.cluster.workload import KINDS, Trajectory, Turn, generate, load_trace, means_of, windows
from bench.measure import BenchError


@pytest.mark.parametrize("kind", KINDS)
def test_many_trajectories_have_the_means_of_table_2(kind: str) -> None:
    trace = [row for seed in range(4) for row in generate(KINDS[kind], 500, seed)]
    found, wanted = asdict(means_of(trace)), asdict(KINDS[kind].means)
    for name, mean in wanted.items():
        assert found[name] == pytest.approx(mean, rel=0.08), name
    assert max(row.total for row in trace) <= 1.02 * KINDS[kind].most


def test_a_seed_says_it_all() -> None:
    kind = KINDS["32k"]
    assert generate(kind, 5, 1) == generate(kind, 5, 1) != generate(kind, 5, 2)


def test_a_context_is_all_that_came_before() -> None:
    row = Trajectory("a", 100, [Turn(10, 1), Turn(20, 2), Turn(30, 3)])
    assert row.contexts == [100, 111, 133]
    assert row.total == 166
    part = row.window(1, 2)
    assert (part.start, part.turns, part.total) == (111, row.turns[1:], row.total)


def test_windows_stand_for_the_whole_trace() -> None:
    trace = generate(KINDS["32k"], 500, 3)
    chosen = windows(trace, 600, 5, 1, most_tokens=40_000)
    assert chosen == windows(trace, 600, 5, 1, most_tokens=40_000)
    assert len({row.name for row in chosen}) == 600
    assert all(len(row.turns) == 5 for row in chosen)
    assert means_of(chosen).context == pytest.approx(means_of(trace).context, rel=0.05)
    short = windows(trace, 50, 5, 1, most_tokens=9_000)
    assert max(row.total for row in short) <= 9_000
    assert min(row.start for row in chosen) == 0
    assert min(r.start for r in windows(trace, 600, 5, 1, most_tokens=40_000, first=1)) > 0
    with pytest.raises(BenchError, match="too few windows"):
        windows(trace, 5, 5, 1, most_tokens=10)
    with pytest.raises(BenchError, match="no trajectory of 1000000 turns"):
        windows(trace, 5, 1_000_000, 1, most_tokens=40_000)


def test_a_trace_is_read_from_its_file(tmp_path: Path) -> None:
    rows = [{"id": "x", "turns": [[5, 6], [7, 0]]}, {"id": "y", "turns": [[1, 1]]}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    wanted = [Trajectory("x", 0, [Turn(5, 6), Turn(7, 0)]), Trajectory("y", 0, [Turn(1, 1)])]
    assert load_trace(plain) == load_trace(packed) == wanted


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"id": 1}', b'{"id": 1, "turns": [[0, 1]]}', b'{"id": 1, "turns": [5]}']
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(BenchError, match=r"The trace .*t\.jsonl"):
        load_trace(path)
    path.write_bytes(text)
    with pytest.raises(BenchError, match=r"The trace .*t\.jsonl"):
        load_trace(path)
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"id": 1, "turns": [[1, 1]]}')[:-9])
    with pytest.raises(BenchError, match=r"The trace .*t\.jsonl"):
        load_trace(broken)
