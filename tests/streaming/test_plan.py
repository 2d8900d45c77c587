"""The order of reading, as arithmetic."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.streaming.plan import Chunk, Job, Turns, chunks, layer_ranges

sizes = st.integers(1, 1 << 22)


@given(st.integers(1, 495), sizes, sizes, sizes, sizes)
def test_ranges_cover_every_layer_once_and_in_order(
    layers: int, layer_bytes: int, first: int, full: int, most: int
) -> None:
    ranges = layer_ranges(layers, layer_bytes, first, full, most)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(layers))


@given(st.integers(1, 495), sizes, sizes, sizes, sizes)
def test_ranges_grow_and_then_shrink_within_their_bounds(
    layers: int, layer_bytes: int, first: int, full: int, most: int
) -> None:
    ranges = layer_ranges(layers, layer_bytes, first, full, most)
    widths = [b - a for a, b in ranges]
    assert all(width == 1 or width * layer_bytes <= most for width in widths)
    assert all(b <= 2 * a for a, b in itertools.pairwise(widths)), "never more than doubled"
    peak = widths.index(max(widths))
    assert widths[:peak] == sorted(widths[:peak])
    assert widths[peak:] == sorted(widths[peak:], reverse=True)


@given(st.integers(8, 495), st.integers(1, 1 << 20))
def test_layer_zero_is_read_before_most_of_the_rest(layers: int, layer_bytes: int) -> None:
    ranges = layer_ranges(layers, layer_bytes, layer_bytes, 1 << 30, 1 << 40)
    assert ranges[0] == (0, 1)
    assert max(b - a for a, b in ranges) <= -(-layers // 4)


def test_ranges_reach_the_size_of_full_bandwidth() -> None:
    ranges = layer_ranges(32, 128, 128, 512, 1 << 20)
    assert [b - a for a, b in ranges] == [1, 2, 4, 4, 4, 4, 4, 4, 2, 2, 1]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    layers = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, layers), max_size=4)) | {layers})
    ranges = list(zip([0, *cuts[:-1]], cuts, strict=True))
    gates = draw(st.lists(st.integers(0, 20), min_size=layers, max_size=layers))
    step = draw(st.lists(st.integers(1, 5), min_size=len(ranges), max_size=len(ranges)))
    return Job(draw(st.integers(0, 12)), ranges, gates, step)


def cells(found: list[Chunk]) -> list[tuple[int, int, int]]:
    return [
        (c.job, block, layer)
        for c in found
        for block in range(c.begin, c.end)
        for layer in range(c.first_layer, c.end_layer)
    ]


@given(st.lists(jobs(), max_size=4))
def test_every_layer_of_every_block_is_read_once(batch: list[Job]) -> None:
    wanted = [
        (number, block, layer)
        for number, job in enumerate(batch)
        for block in range(job.blocks)
        for layer in range(len(job.gates))
    ]
    assert sorted(cells(list(chunks(batch)))) == wanted


@given(st.lists(jobs(), max_size=4))
def test_what_the_model_needs_first_is_read_first(batch: list[Job]) -> None:
    first = [min(batch[c.job].gates[c.first_layer : c.end_layer]) for c in chunks(batch)]
    assert first == sorted(first)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_requests_take_turns_within_a_range(blocks: list[int]) -> None:
    batch = [Job(n, [(0, 2)], [0, 1], [1]) for n in blocks]
    done = [0] * len(batch)
    for chunk in chunks(batch):
        done[chunk.job] += 1
        waiting = [d for d, n in zip(done, blocks, strict=True) if d < n]
        assert not waiting or max(done) - min(waiting) <= 1


@given(st.integers(2, 6))
def test_the_oldest_batch_gets_most_and_no_other_starves(batches: int) -> None:
    turns = Turns()
    got = [turns.next(batches) for _ in range(40 * (batches - 1))]
    assert got.count(0) == 30 * (batches - 1)
    assert all(got.count(i) == 10 for i in range(1, batches))
