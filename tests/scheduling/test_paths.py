"""Which side reads what."""

from __future__ import annotations

import ast
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dualpath_sglang import scheduling
from dualpath_sglang.scheduling.paths import Share, Side, shorter_queue, split

MIB = 1 << 20
GB = 10**9


def counts(sides: list[Side], shares: list[Share]) -> list[int]:
    """Blocks of every side, also of those that get none."""
    got = {share.side: share.count for share in shares}
    return [got.get(side.name, 0) for side in sides]


def makespan(sides: list[Side], amounts: tuple[int, ...] | list[int], block_bytes: int) -> float:
    """When the last side that reads anything is done."""
    return max(side.finish_s(n * block_bytes) for side, n in zip(sides, amounts, strict=True) if n)


def assignments(blocks: int, sides: int) -> list[tuple[int, ...]]:
    """All ways to deal so many blocks out."""
    return [c for c in itertools.product(range(blocks + 1), repeat=sides) if sum(c) == blocks]


def some_sides(
    least: int = 1,
    most: int = 5,
    rates: st.SearchStrategy[float | None] | None = None,
) -> st.SearchStrategy[list[Side]]:
    """Sides of unlike queues, rates and delays; often alike enough for ties."""
    if rates is None:
        rates = st.integers(1, 8).map(lambda n: n * 1e9) | st.floats(1e6, 1e11)
    delays = st.sampled_from([0.0, 0.0, 0.001, 0.5]) | st.floats(0.0, 10.0)
    queues = st.integers(0, 8).map(lambda n: n * GB) | st.integers(0, 1 << 40)
    side = st.tuples(queues, rates, delays)
    return st.lists(side, min_size=least, max_size=most).map(
        lambda drawn: [Side(f"s{i}", *values) for i, values in enumerate(drawn)]
    )


any_rates: st.SearchStrategy[float | None] = st.sampled_from(
    [None, 0.0, -1.0, math.nan, math.inf, 1e9]
) | st.floats(1e6, 1e11)
block_sizes = st.sampled_from([1, 4096, 3 * MIB, GB])


# The paper's rule.


def test_the_whole_request_goes_to_the_shorter_read_queue() -> None:
    pe = Side("pe", 3 * GB, 50e9)
    de = Side("de", 2 * GB, 1e9, delay_s=1.0)
    assert shorter_queue([pe, de]) is de, "rates and delays are none of the paper's business"
    assert shorter_queue([pe, replace(de, queue_bytes=4 * GB)]) is pe


def test_of_equal_queues_the_pe_reads() -> None:
    pe, de = Side("pe", GB, 1e9), Side("de", GB, 2e9)
    assert shorter_queue([pe, de]) is pe


def test_the_shorter_queue_of_a_side_that_cannot_be_used_does_not_count() -> None:
    pe, de = Side("pe", GB, None), Side("de", 0, 0.0)
    assert shorter_queue([pe, de]) is pe


@given(some_sides(rates=any_rates))
def test_no_side_that_can_be_used_has_a_shorter_queue(sides: list[Side]) -> None:
    usable = [side for side in sides if side.usable]
    assume(usable)
    chosen = shorter_queue(sides)
    least = min(side.queue_bytes for side in usable)
    assert chosen is next(side for side in usable if side.queue_bytes == least)


# Splitting: figures by hand.


def test_two_idle_sides_share_by_their_rates() -> None:
    sides = [Side("pe", 0, 30e9), Side("de", 0, 10e9)]
    assert split(sides, 1000, 3 * MIB) == [Share("pe", 0, 750), Share("de", 750, 250)]


def test_the_longer_queue_is_made_up_for() -> None:
    # 4 GB wait at 2 GB/s and 1 GB at 1 GB/s: with 10 GB more both are done after 5 s.
    sides = [Side("pe", 4 * GB, 2e9), Side("de", GB, 1e9)]
    shares = split(sides, 100, GB // 10)
    assert shares == [Share("pe", 0, 60), Share("de", 60, 40)]
    assert makespan(sides, [60, 40], GB // 10) == 5.0


def test_a_delay_costs_what_could_be_read_meanwhile() -> None:
    # Both at 1 GB/s, one begins 2 s later: of 10 GB it gets 4, and both are done after 6 s.
    sides = [Side("pe", 0, 1e9), Side("de", 0, 1e9, delay_s=2.0)]
    assert split(sides, 10, GB) == [Share("pe", 0, 6), Share("de", 6, 4)]


def test_a_side_that_is_free_too_late_gets_nothing() -> None:
    sides = [Side("pe", 0, 1e9), Side("far", 9 * GB, 1e9), Side("de", GB, 1e9)]
    assert split(sides, 5, GB) == [Share("pe", 0, 3), Share("de", 3, 2)]
    sides = [Side("pe", 0, 1e9), Side("de", 0, 1e9, delay_s=5.0)]
    assert split(sides, 5, GB) == [Share("pe", 0, 5)]


def test_a_block_is_never_cut() -> None:
    # 1.5 each would be ideal; the tie about the third goes to the first.
    sides = [Side("pe", 0, 1e9), Side("de", 0, 1e9)]
    assert split(sides, 3, GB) == [Share("pe", 0, 2), Share("de", 2, 1)]
    assert split(sides, 1, GB) == [Share("pe", 0, 1)]


def test_many_decode_nodes_take_part() -> None:
    sides = [Side("pe", 40 * GB, 40e9), *(Side(f"de{i}", 0, 10e9) for i in range(3))]
    # 20 GB over 3 x 10 GB/s are done after 0.67 s, before the PE is free.
    assert counts(sides, split(sides, 2000, GB // 100)) == [0, 667, 667, 666]
    # 65 GB: t = 1.5 s, (1.5 - 1) x 40 = 20 and 1.5 x 10 = 15 each.
    assert counts(sides, split(sides, 6500, GB // 100)) == [2000, 1500, 1500, 1500]


@pytest.mark.timeout(10)
def test_many_blocks_are_dealt_out_as_fast_as_few() -> None:
    # 1 PB takes the DE 0.1 s, and the PE is free after 1 s.
    sides = [Side("pe", 30 * 10**15, 30e15), Side("de", 0, 10e15)]
    assert split(sides, 10**12, 1000) == [Share("de", 0, 10**12)]
    # 30 PB: 30 x (t - 1) + 10 x t = 30, t = 1.5 s.
    assert counts(sides, split(sides, 30 * 10**12, 1000)) == [15 * 10**12, 15 * 10**12]


def test_a_request_under_the_floor_is_not_split() -> None:
    sides = [Side("pe", GB, 1e9), Side("de", 0, 1e9, delay_s=0.5)]
    assert split(sides, 4, GB, floor_bytes=4 * GB + 1) == [Share("de", 0, 4)]
    assert split(sides, 4, GB, floor_bytes=4 * GB) == [Share("pe", 0, 2), Share("de", 2, 2)]


def test_under_the_floor_size_decides_between_a_quick_start_and_a_high_rate() -> None:
    sides = [Side("pe", 0, 1e9), Side("de", 0, 4e9, delay_s=3.0)]
    assert split(sides, 3, GB, floor_bytes=100 * GB) == [Share("pe", 0, 3)]
    assert split(sides, 4, GB, floor_bytes=100 * GB) == [Share("pe", 0, 4)], "a tie, 4 s"
    assert split(sides, 5, GB, floor_bytes=100 * GB) == [Share("de", 0, 5)]


def test_an_unknown_rate_is_the_mean_of_the_known_ones() -> None:
    sides = [Side("pe", 0, 1e9), Side("de0", 0, None), Side("de1", 0, 3e9), Side("de2", 0, 0.0)]
    assert counts(sides, split(sides, 600, MIB)) == [100, 200, 300, 0]


def test_without_any_rate_queues_are_levelled() -> None:
    sides = [Side("pe", 30, None), Side("de", 0, None, delay_s=60.0)]
    assert split(sides, 50, 1) == [Share("pe", 0, 10), Share("de", 10, 40)]
    assert split(sides, 20, 1) == [Share("de", 0, 20)]


def test_one_side_reads_everything() -> None:
    for rate in (None, 1e9):
        side = Side("pe", GB, rate, delay_s=3.0)
        assert split([side], 7, GB) == [Share("pe", 0, 7)]
        assert shorter_queue([side]) is side


@pytest.mark.parametrize("rate", [0.0, -1e9, math.nan, math.inf])
def test_a_side_without_a_positive_rate_reads_nothing(rate: float) -> None:
    dead = Side("pe", 0, rate)
    assert dead.finish_s(0) == math.inf
    assert split([dead, Side("de", 9 * GB, 1.0)], 7, MIB) == [Share("de", 0, 7)]


@pytest.mark.parametrize("delay_s", [math.inf, math.nan])
def test_a_side_that_never_begins_reads_nothing(delay_s: float) -> None:
    never = Side("de", 0, None, delay_s=delay_s)
    assert not never.usable
    assert split([never, Side("pe", 9 * GB, 1.0)], 7, MIB) == [Share("pe", 0, 7)]


@pytest.mark.parametrize("sides", [[], [Side("pe", 0, 0.0), Side("de", 0, -1.0)]])
def test_nobody_can_read(sides: list[Side]) -> None:
    with pytest.raises(ValueError, match=f"none of {len(sides)} sides can read"):
        shorter_queue(sides)
    with pytest.raises(ValueError, match="can read"):
        split(sides, 1, MIB)
    assert split(sides, 0, MIB) == [], "nothing to read needs nobody"


@pytest.mark.parametrize(("blocks", "block_bytes"), [(-1, MIB), (1, 0), (1, -MIB)])
def test_sizes_that_make_no_sense_are_refused(blocks: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split([Side("pe", 0, 1e9)], blocks, block_bytes)


def test_a_side_tells_when_it_would_be_done() -> None:
    assert Side("de", 3 * GB, 2e9, delay_s=0.5).finish_s(GB) == 2.5
    assert Side("de", 3 * GB, None, delay_s=0.5).finish_s(GB) == 0.5


# Splitting: whatever the figures.


@given(some_sides(rates=any_rates), st.integers(0, 20_000), block_sizes, st.integers(0, 1 << 40))
def test_every_block_is_read_once_and_in_order(
    sides: list[Side], blocks: int, block_bytes: int, floor_bytes: int
) -> None:
    assume(any(side.usable for side in sides))
    shares = split(sides, blocks, block_bytes, floor_bytes)
    read = [i for share in shares for i in range(share.first, share.first + share.count)]
    assert read == list(range(blocks))
    assert all(share.count > 0 for share in shares)
    names = [side.name for side in sides if side.usable]
    assert [name for name in names if name in {s.side for s in shares}] == [s.side for s in shares]


@given(some_sides(least=2, most=3), st.integers(1, 12), st.sampled_from([MIB, GB, 5 * GB]))
@example([Side("s0", 0, 1e9), Side("s1", 0, 7e9, 0.3), Side("s2", GB, 3e9)], 12, GB)
def test_no_other_assignment_is_done_earlier(
    sides: list[Side], blocks: int, block_bytes: int
) -> None:
    got = counts(sides, split(sides, blocks, block_bytes))
    best = min(makespan(sides, c, block_bytes) for c in assignments(blocks, len(sides)))
    assert makespan(sides, got, block_bytes) == best


@given(some_sides(), st.integers(1, 3000), block_sizes)
def test_every_block_goes_where_it_is_read_first(
    sides: list[Side], blocks: int, block_bytes: int
) -> None:
    one_by_one = [0] * len(sides)
    for _ in range(blocks):
        ends = [s.finish_s((n + 1) * block_bytes) for s, n in zip(sides, one_by_one, strict=True)]
        one_by_one[ends.index(min(ends))] += 1
    assert counts(sides, split(sides, blocks, block_bytes)) == one_by_one


@given(some_sides(least=2), st.integers(1, 100_000), block_sizes)
def test_all_sides_finish_within_a_block(sides: list[Side], blocks: int, block_bytes: int) -> None:
    got = counts(sides, split(sides, blocks, block_bytes))
    end = makespan(sides, got, block_bytes)
    for side, count in zip(sides, got, strict=True):
        # One that reads less, or nothing, would not have been done earlier with one block more.
        assert side.finish_s((count + 1) * block_bytes) >= end


@given(some_sides(least=2), st.integers(1, 100_000), block_sizes)
def test_a_side_that_is_free_only_after_the_end_gets_nothing(
    sides: list[Side], blocks: int, block_bytes: int
) -> None:
    got = counts(sides, split(sides, blocks, block_bytes))
    end = makespan(sides, got, block_bytes)
    assert not any(n for s, n in zip(sides, got, strict=True) if s.finish_s(0) > end)


@given(
    some_sides(rates=st.none() | st.floats(1e6, 1e11)),
    st.integers(0, 10_000),
    block_sizes,
    st.integers(0, 1 << 36),
    st.integers(0, 4),
    st.integers(0, 1 << 40) | st.integers(0, 8).map(lambda n: n * GB),
)
def test_a_longer_queue_never_gets_more(
    sides: list[Side], blocks: int, block_bytes: int, floor_bytes: int, which: int, more: int
) -> None:
    which %= len(sides)
    before = counts(sides, split(sides, blocks, block_bytes, floor_bytes))[which]
    sides[which] = replace(sides[which], queue_bytes=sides[which].queue_bytes + more)
    assert counts(sides, split(sides, blocks, block_bytes, floor_bytes))[which] <= before


@given(some_sides(least=2), st.integers(1, 10_000), block_sizes)
def test_under_the_floor_one_side_reads_all_and_none_would_be_done_earlier(
    sides: list[Side], blocks: int, block_bytes: int
) -> None:
    size = blocks * block_bytes
    (share,) = split(sides, blocks, block_bytes, floor_bytes=size + 1)
    ends = [side.finish_s(size) for side in sides]
    assert share == Share(sides[ends.index(min(ends))].name, 0, blocks)
    assert split(sides, blocks, block_bytes, size) == split(sides, blocks, block_bytes)


@given(
    some_sides(rates=any_rates),
    st.integers(0, 10_000),
    st.integers(0, 1 << 36),
    st.sampled_from([2, 1024, 1 << 20]),
    st.sampled_from([0.25, 8.0, 1024.0]),
)
def test_units_of_bytes_and_seconds_do_not_matter(
    sides: list[Side], blocks: int, floor_bytes: int, size: int, duration: float
) -> None:
    assume(any(side.usable for side in sides))
    scaled = [
        Side(
            side.name,
            side.queue_bytes * size,
            None if side.rate is None else side.rate * size / duration,
            side.delay_s * duration,
        )
        for side in sides
    ]
    before = split(sides, blocks, MIB, floor_bytes)
    assert split(scaled, blocks, MIB * size, floor_bytes * size) == before


@given(some_sides(least=2, rates=any_rates), st.integers(0, 5000), st.integers(0, 5))
def test_a_side_that_cannot_be_used_changes_nothing(
    sides: list[Side], blocks: int, where: int
) -> None:
    assume(any(side.usable for side in sides))
    before = split(sides, blocks, MIB)
    sides.insert(where, Side("dead", 0, 0.0))
    assert split(sides, blocks, MIB) == before


def test_it_imports_nothing_of_the_project() -> None:
    for file in Path(scheduling.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                own = name.startswith("dualpath_sglang.scheduling")
                assert own or not name.startswith((".", "dualpath")), f"{file.name}: {name}"
