"""Layers of many blocks read into one piece of staging memory."""

from __future__ import annotations

import errno
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_storage import Geometry, Placement, ReadStatus
from dualpath_storage import header as headers
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned
from dualpath_storage.ranges import RangeItem, RangeReader, RangeShape


def geometry(layers: int, layer_bytes: int) -> Geometry:
    return Geometry("m", "w", "kv", "bf16", 16, layers, layer_bytes, "test")


class Segment:
    """Slots in memory, and every read of them."""

    def __init__(self, g: Geometry, slots: int, *, pages_only: bool = False) -> None:
        self.geometry = g
        self.bytes = bytearray(random.Random(7).randbytes(g.slot_bytes * slots))
        self.reads: list[tuple[int, int]] = []
        self.pages_only = pages_only
        for slot in range(slots):
            page = memoryview(self.bytes)[slot * g.slot_bytes :][:4096]
            sums = headers.layer_checksums(
                [memoryview(self.layer(slot, i)) for i in range(g.layers)], g.layers
            )
            headers.encode_into(page, g, self.key(slot), bytes(32), 1 + slot, sums)

    def key(self, slot: int) -> bytes:
        return bytes([slot]) * 32

    def layer(self, slot: int, layer: int) -> bytes:
        begin = slot * self.geometry.slot_bytes + 4096 + layer * self.geometry.layer_bytes
        return bytes(self.bytes[begin : begin + self.geometry.layer_bytes])

    def items(self, slots: Sequence[int]) -> list[RangeItem]:
        return [RangeItem(self.key(n), Placement(0, n, 1 + n)) for n in slots]

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        size = sum(len(b) for b in buffers)
        assert offset % 4096 == 0 and all(len(b) % 4096 == 0 for b in buffers)
        if self.pages_only and len(buffers) > 1:
            raise OSError(errno.EINVAL, "no vectors here")
        self.reads.append((offset, size))
        data = self.bytes[offset : offset + size]
        begin = 0
        for buffer in buffers:
            part = data[begin : begin + len(buffer)]
            buffer[: len(part)] = part
            begin += len(buffer)
        return len(data)

    def file(self, number: int) -> Any:
        if number:
            raise FileNotFoundError(errno.ENOENT, "no such segment")
        return self

    def reader(self, max_io_bytes: int = 1 << 20) -> RangeReader:
        return RangeReader(
            self.geometry,
            self.file,
            lambda e: ReadStatus.MISSING if e.errno == errno.ENOENT else ReadStatus.IO_ERROR,
            max_io_bytes,
        )


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9000)).flatmap(
    lambda g: st.tuples(st.just(g), st.integers(0, g[0] - 1), st.booleans()).flatmap(
        lambda t: st.tuples(st.just(t), st.integers(t[1] + 1, t[0][0]))
    )
)


@settings(deadline=None)
@given(shapes, st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
def test_every_layer_lies_where_the_shape_says(shape_of: tuple, slots: list[int]) -> None:
    ((layers, layer_bytes), first, with_header), end = shape_of
    segment = Segment(geometry(layers, layer_bytes), 6)
    whole = RangeShape(segment.geometry, 0, layers, header=True)
    area = aligned(len(slots) * whole.stride)
    known = segment.reader().read(segment.items(slots), whole, area)
    assert all(read.status is ReadStatus.OK for read in known)

    shape = RangeShape(segment.geometry, first, end, header=with_header)
    items = [
        RangeItem(item.key, item.placement, None if with_header else read.checksums)
        for item, read in zip(segment.items(slots), known, strict=True)
    ]
    area = aligned(len(slots) * shape.stride)
    reads = segment.reader().read(items, shape, area)
    assert all(read.status is ReadStatus.OK for read in reads)
    assert shape.stride % 4096 == 0
    for i, slot in enumerate(slots):
        for layer in range(first, end):
            assert shape.layer(area, i, layer) == segment.layer(slot, layer)


def first_and_rest(g: Geometry) -> Iterator[RangeShape]:
    yield RangeShape(g, 0, 1, header=True)
    yield RangeShape(g, 1, g.layers, header=False)


def test_the_header_costs_no_io_of_its_own_and_is_read_once() -> None:
    segment = Segment(geometry(4, 8192), 3)
    known: Sequence[array[int] | None] = [None] * 3
    for shape in first_and_rest(segment.geometry):
        items = [
            RangeItem(i.key, i.placement, sums)
            for i, sums in zip(segment.items([0, 1, 2]), known, strict=True)
        ]
        reads = segment.reader().read(items, shape, aligned(3 * shape.stride))
        known = [read.checksums for read in reads]
    slot = segment.geometry.slot_bytes
    assert [(o, s) for o, s in segment.reads[:3]] == [(n * slot, 4096 + 8192) for n in range(3)]
    # The rest of neighbours leaves gaps too large to be read along, so it is an I/O each.
    assert all(offset % slot == 4096 + 8192 for offset, _ in segment.reads[3:])


def test_whole_neighbours_are_one_io_up_to_the_limit() -> None:
    segment = Segment(geometry(2, 4096), 6)
    shape = RangeShape(segment.geometry, 0, 2, header=True)
    reader = segment.reader(max_io_bytes=3 * shape.stride)
    reads = reader.read(segment.items([0, 1, 2, 3, 5]), shape, aligned(5 * shape.stride))
    assert all(read.status is ReadStatus.OK for read in reads)
    assert segment.reads == [(0, 3 * 12288), (3 * 12288, 12288), (5 * 12288, 12288)]


def test_a_small_gap_is_read_along_and_a_large_one_is_not() -> None:
    segment = Segment(geometry(12, 4096), 4)
    whole = RangeShape(segment.geometry, 0, 12, header=True)
    known = segment.reader().read(segment.items(range(4)), whole, aligned(4 * whole.stride))
    items = [
        RangeItem(i.key, i.placement, read.checksums)
        for i, read in zip(segment.items(range(4)), known, strict=True)
    ]
    for first, ios in ((0, 1), (1, 1), (4, 4)):
        segment.reads.clear()
        shape = RangeShape(segment.geometry, first, 12, header=False)
        area = aligned(4 * shape.stride)
        reads = segment.reader().read(items, shape, area)
        assert all(read.status is ReadStatus.OK for read in reads)
        assert len(segment.reads) == ios
        assert all(
            shape.layer(area, n, i) == segment.layer(n, i)
            for n in range(4)
            for i in range(first, 12)
        )


def damaged(what: str) -> tuple[Segment, list[RangeItem]]:
    segment = Segment(geometry(3, 5000), 3)
    items = segment.items([0, 1, 2])
    slot = segment.geometry.slot_bytes
    match what:
        case "layer":
            segment.bytes[slot + 4096 + 5000 + 17] ^= 1
        case "header":
            segment.bytes[slot + 100] ^= 1
        case "key":
            items[1] = RangeItem(b"x" * 32, items[1].placement)
        case "generation":
            items[1] = RangeItem(items[1].key, Placement(0, 1, 99))
        case "missing":
            items[1] = RangeItem(items[1].key, Placement(7, 1, 2))
        case "short":
            items = items[:1] + items[2:]
            del segment.bytes[2 * slot + 4096 + 7000 :]
    return segment, items


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("layer", ReadStatus.CHECKSUM),
        ("header", ReadStatus.HEADER),
        ("key", ReadStatus.GENERATION),
        ("generation", ReadStatus.GENERATION),
        ("missing", ReadStatus.MISSING),
        ("short", ReadStatus.SHORT),
    ],
)
def test_a_bad_block_is_told_apart_and_its_neighbours_are_good(
    what: str, status: ReadStatus
) -> None:
    segment, items = damaged(what)
    shape = RangeShape(segment.geometry, 0, 3, header=True)
    reads = segment.reader().read(items, shape, aligned(3 * shape.stride))
    assert [read.status for read in reads if read.status is not ReadStatus.OK] == [status]
    assert reads[1].status is status


def test_a_damaged_layer_spoils_no_range_without_it() -> None:
    segment, items = damaged("layer")
    for first, end, good in ((0, 1, True), (1, 2, False), (2, 3, True), (0, 2, False)):
        shape = RangeShape(segment.geometry, first, end, header=True)
        reads = segment.reader().read(items, shape, aligned(3 * shape.stride))
        assert [read.status is ReadStatus.OK for read in reads] == [True, good, True]


def test_a_block_that_was_replaced_after_its_header_was_read_does_not_pass() -> None:
    segment = Segment(geometry(4, 4096), 1)
    first, rest = first_and_rest(segment.geometry)
    known = segment.reader().read(segment.items([0]), first, aligned(first.stride))[0]
    begin = 4096 + 4096
    segment.bytes[begin : begin + 3 * 4096] = bytes(3 * 4096)
    item = RangeItem(segment.key(0), Placement(0, 0, 1), known.checksums)
    read = segment.reader().read([item], rest, aligned(rest.stride))[0]
    assert read.status is ReadStatus.CHECKSUM


def test_memory_that_direct_io_refuses_is_filled_by_way_of_other_memory() -> None:
    segment = Segment(geometry(12, 4096), 3, pages_only=True)
    whole = RangeShape(segment.geometry, 0, 12, header=True)
    known = segment.reader().read(segment.items([0, 1]), whole, aligned(2 * whole.stride))
    shape = RangeShape(segment.geometry, 1, 12, header=False)
    items = [
        RangeItem(i.key, i.placement, read.checksums)
        for i, read in zip(segment.items([0, 1]), known, strict=True)
    ]
    area = aligned(2 * shape.stride)
    reads = segment.reader().read(items, shape, area)
    assert [read.status for read in reads] == [ReadStatus.OK] * 2
    assert shape.layer(area, 1, 7) == segment.layer(1, 7)


def test_an_error_of_the_system_stays_with_the_blocks_it_hit() -> None:
    segment = Segment(geometry(2, 4096), 3)
    read = segment.read

    def broken(buffers: Sequence[memoryview], offset: int) -> int:
        if offset // segment.geometry.slot_bytes == 1:
            raise OSError(errno.EIO, "bad sector")
        return read(buffers, offset)

    segment.read = broken  # type: ignore[method-assign]
    shape = RangeShape(segment.geometry, 0, 1, header=True)
    reads = segment.reader().read(segment.items([0, 1, 2]), shape, aligned(3 * shape.stride))
    ok, bad = ReadStatus.OK, ReadStatus.IO_ERROR
    assert [r.status for r in reads] == [ok, bad, ok]


def test_a_range_ends_on_the_padding_of_its_slot() -> None:
    g = geometry(3, 5000)
    shape = RangeShape(g, 2, 3, header=False)
    assert shape.slot_offset + shape.stride == g.slot_bytes == 4096 + align_up(15000)
