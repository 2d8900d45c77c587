"""Which node of a pair reads, and the weights that say so."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.scheduling.paths import Side, proportions, split
from dualpath_sglang.scheduling.reading import read_seconds, read_shares, tokens_of
from dualpath_sglang.scheduling.rules import ReadPath

PATHS: list[ReadPath] = ["shorter_queue", "split", "pe", "de", "alternate"]
rates = st.sampled_from([None, 0.0, 1e4, 1e5]) | st.floats(1e3, 1e6)
queues = st.integers(0, 3).map(lambda n: n * 1000) | st.integers(0, 1 << 30)


def sides(
    pe_queue: int = 0,
    de_queue: int = 0,
    pe_rate: float | None = None,
    de_rate: float | None = None,
) -> tuple[Side, Side]:
    return Side("pe", pe_queue, pe_rate), Side("de", de_queue, de_rate)


def test_the_shorter_queue_reads_and_the_pe_in_a_tie() -> None:
    assert read_shares(*sides(10, 9), 100, "shorter_queue") == (("de", 1.0),)
    assert read_shares(*sides(9, 10), 100, "shorter_queue") == (("pe", 1.0),)
    assert read_shares(*sides(9, 9), 100, "shorter_queue") == (("pe", 1.0),)


def test_forced_paths() -> None:
    pair = sides(1000, 0)
    assert read_shares(*pair, 100, "pe") == (("pe", 1.0),)
    assert read_shares(*pair, 100, "de") == (("de", 1.0),)
    assert read_shares(*pair, 100, "alternate", 0) == (("pe", 1.0),)
    assert read_shares(*pair, 100, "alternate", 1) == (("de", 1.0),)


def test_a_split_lets_both_finish_together() -> None:
    # 3000 at 1000/s and 1000 at 2000/s wait; with 5000 more both are done after 3 s.
    pair = sides(3000, 1000, 1000.0, 2000.0)
    shares = read_shares(*pair, 5000, "split")
    assert shares == (("de", 1.0),), "the PE is free only then"
    # 8000 more: (8000 + 3000 + 1000) / 3000 = 4 s.
    shares = read_shares(*pair, 8000, "split")
    assert shares == (("pe", 0.125), ("de", 0.875))
    assert tokens_of(shares, 8000) == [("pe", 1000), ("de", 7000)]
    assert read_seconds(pair, shares, 8000, 1.0) == 4.0


def test_a_split_without_rates_levels_the_queues() -> None:
    assert read_shares(*sides(), 100, "split") == (("pe", 0.5), ("de", 0.5))
    assert read_shares(*sides(60, 0), 100, "split") == (("pe", 0.2), ("de", 0.8))


def test_one_machine_reads_everything_itself() -> None:
    for path in PATHS:
        assert read_shares(Side("a", 5, 1.0), Side("a", 5, 1.0), 10, path, 1) == (("a", 1.0),)


def test_a_node_that_cannot_read_is_given_nothing() -> None:
    for path in ("shorter_queue", "split"):
        assert read_shares(*sides(0, 99, 0.0, 1.0), 100, path) == (("de", 1.0),)
        assert read_shares(*sides(99, 0, 1.0, 0.0), 100, path) == (("pe", 1.0),)
        assert read_shares(*sides(9, 0, 0.0, 0.0), 100, path) == (("pe", 1.0),), "the PE finds out"


def test_nothing_to_read_takes_no_time_but_has_a_reader() -> None:
    pair = sides(0, 1000)
    assert read_shares(*pair, 0, "split") == (("pe", 1.0),)
    assert read_seconds(pair, (("de", 1.0),), 0, 1.0) == 0.0
    assert tokens_of((("de", 1.0),), 0) == [("de", 0)]


@given(
    queues, queues, rates, rates, st.integers(0, 1 << 20), st.sampled_from(PATHS), st.integers(0, 1)
)
def test_weights_are_a_partition_of_the_pair(
    pe_queue: int,
    de_queue: int,
    pe_rate: float | None,
    de_rate: float | None,
    tokens: int,
    path: ReadPath,
    turn: int,
) -> None:
    pair = sides(pe_queue, de_queue, pe_rate, de_rate)
    shares = read_shares(*pair, tokens, path, turn)
    assert sum(weight for _, weight in shares) == pytest.approx(1.0, abs=1e-12)
    assert all(0 < weight <= 1 for _, weight in shares)
    assert [n for n in ("pe", "de") if n in dict(shares)] == [n for n, _ in shares]
    parts = tokens_of(shares, tokens)
    assert sum(part for _, part in parts) == tokens
    assert all(part >= 0 for _, part in parts)
    if path == "shorter_queue" and all(side.usable for side in pair):
        assert pair[0].queue_bytes <= pair[1].queue_bytes or shares == (("de", 1.0),)
        assert pair[0].queue_bytes > pair[1].queue_bytes or shares == (("pe", 1.0),)


@given(queues, queues, st.floats(1e3, 1e6), st.floats(1e3, 1e6), st.integers(2, 1 << 20))
def test_no_other_split_is_done_earlier(
    pe_queue: int, de_queue: int, pe_rate: float, de_rate: float, tokens: int
) -> None:
    pair = sides(pe_queue, de_queue, pe_rate, de_rate)
    got = read_seconds(pair, read_shares(*pair, tokens, "split"), tokens, 1.0)
    one_token = 2 / min(pe_rate, de_rate)
    for i in range(1, 20):
        other = read_seconds(pair, (("pe", i / 20), ("de", 1 - i / 20)), tokens, 1.0)
        assert got <= other + one_token
    for alone in ("pe", "de"):
        assert got <= read_seconds(pair, ((alone, 1.0),), tokens, 1.0) + one_token


# Proportions, which the split over blocks approaches.


@given(
    st.lists(st.tuples(queues, rates), min_size=1, max_size=5),
    st.integers(1, 100_000),
)
def test_proportions_are_the_split_of_very_small_blocks(
    drawn: list[tuple[int, float | None]], blocks: int
) -> None:
    several = [Side(f"s{i}", queue, rate) for i, (queue, rate) in enumerate(drawn)]
    if not any(side.usable for side in several):
        with pytest.raises(ValueError, match="can read"):
            proportions(several, blocks)
        return
    parts = proportions(several, blocks * 100)
    assert sum(parts) == pytest.approx(1.0)
    counts = {share.side: share.count for share in split(several, blocks, 100)}
    for side, part in zip(several, parts, strict=True):
        assert counts.get(side.name, 0) == pytest.approx(part * blocks, abs=len(several) + 1e-3)


def test_a_size_that_is_lost_in_rounding_goes_to_one() -> None:
    assert proportions([Side("pe", 10**30, 1.0), Side("de", 10**31, 1.0)], 1) == [1.0, 0.0]


@pytest.mark.parametrize("size", [0, -1])
def test_proportions_of_nothing_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        proportions([Side("pe", 0, math.pi)], size)
