"""Blocks read into images of their slots, all at once or layers by layers."""

from __future__ import annotations

import errno
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_storage import Geometry, Placement, ReadStatus
from dualpath_storage.images import ImageItem, ImageReader
from dualpath_storage.memory import aligned
from tests.storage.test_ranges import Segment


def geometry(layers: int, layer_bytes: int) -> Geometry:
    return Geometry("m", "w", "kv", "bf16", 16, layers, layer_bytes, "test")


def reader(segment: Segment, max_io_bytes: int = 1 << 20) -> ImageReader:
    return ImageReader(
        segment.geometry,
        segment.file,
        lambda e: ReadStatus.MISSING if e.errno == errno.ENOENT else ReadStatus.IO_ERROR,
        max_io_bytes,
    )


def items(segment: Segment, slots: list[int]) -> list[ImageItem]:
    size = segment.geometry.slot_bytes
    return [ImageItem(segment.key(n), Placement(0, n, 1 + n), aligned(size)[:size]) for n in slots]


def known(item: ImageItem, checksums: array[int] | None) -> ImageItem:
    return ImageItem(item.key, item.placement, item.image, checksums)


def right(segment: Segment, slot: int, image: memoryview, end: int) -> bool:
    size = segment.geometry.layer_bytes
    return all(
        image[4096 + i * size : 4096 + (i + 1) * size] == segment.layer(slot, i) for i in range(end)
    )


cut = st.tuples(st.integers(1, 9), st.integers(1, 9000)).flatmap(
    lambda of: st.tuples(st.just(of), st.sets(st.integers(1, of[0])))
)


@settings(deadline=None, max_examples=60)
@given(cut, st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
def test_any_ranges_one_after_the_other_give_whole_blocks(
    shape: tuple[tuple[int, int], set[int]], slots: list[int]
) -> None:
    of = geometry(*shape[0])
    segment = Segment(of, 6)
    wanted = items(segment, slots)
    first = 0
    for end in sorted(shape[1] | {of.layers}):
        before = [bytes(i.image[: 4096 + first * of.layer_bytes]) for i in wanted]
        reads = reader(segment).read(wanted, first, end)
        assert all(read.status is ReadStatus.OK for read in reads)
        wanted = [known(i, r.checksums) for i, r in zip(wanted, reads, strict=True)]
        for slot, item, was in zip(slots, wanted, before, strict=True):
            assert right(segment, slot, item.image, end)
            assert first == 0 or item.image[: len(was)] == was
        first = end
    assert sum(size for _, size in segment.reads) == len(slots) * of.slot_bytes, "no page twice"


def test_no_page_is_written_twice() -> None:
    """What somebody uses already must not change, whatever stands in the slot by now."""
    segment = Segment(geometry(4, 1000), 1)
    (item,) = items(segment, [0])
    (read,) = reader(segment).read([item], 0, 1)
    before = bytes(item.image[:5096])
    segment.bytes[:] = b"\xff" * len(segment.bytes)
    (later,) = reader(segment).read([known(item, read.checksums)], 1, 4)
    assert later.status is ReadStatus.OK, "all of it was on the first page"
    segment = Segment(geometry(4, 5000), 1)
    (item,) = items(segment, [0])
    (read,) = reader(segment).read([item], 0, 1)
    before = bytes(item.image[: 4096 + 5000])
    segment.bytes[:] = b"\xff" * len(segment.bytes)
    (later,) = reader(segment).read([known(item, read.checksums)], 1, 4)
    assert later.status is ReadStatus.CHECKSUM
    assert bytes(item.image[: 4096 + 5000]) == before


def test_neighbours_are_one_io_as_far_as_it_may_be_large() -> None:
    of = geometry(4, 4096)
    segment = Segment(of, 6)
    reader(segment).read(items(segment, [0, 1, 2, 4, 5]), 0, 4)
    assert [size // of.slot_bytes for _, size in segment.reads] == [3, 2]
    segment.reads.clear()
    reader(segment, 2 * of.slot_bytes).read(items(segment, [0, 1, 2]), 0, 4)
    assert [size // of.slot_bytes for _, size in segment.reads] == [2, 1]


@pytest.mark.parametrize(("at", "status"), [(10, "header"), (4096 + 100, "checksum")])
def test_a_damaged_block_is_told_and_its_neighbours_are_not_harmed(at: int, status: str) -> None:
    segment = Segment(geometry(3, 4096), 3)
    segment.bytes[segment.geometry.slot_bytes + at] ^= 1
    reads = reader(segment).read(items(segment, [0, 1, 2]), 0, 3)
    assert [read.status.value for read in reads] == ["ok", status, "ok"]


def test_another_generation_or_key_is_told() -> None:
    segment = Segment(geometry(3, 4096), 2)
    one, two = items(segment, [0, 1])
    other = ImageItem(one.key, Placement(0, 0, 99), one.image)
    swapped = ImageItem(one.key, two.placement, two.image)
    reads = reader(segment).read([other, swapped], 0, 3)
    assert {read.status for read in reads} == {ReadStatus.GENERATION}


def test_a_file_that_ends_early_gives_what_it_has() -> None:
    of = geometry(3, 5000)
    segment = Segment(of, 3)
    del segment.bytes[2 * of.slot_bytes + 4096 + 15000 :]  # only the padding is gone
    reads = reader(segment).read(items(segment, [1, 2]), 0, 3)
    assert [read.status for read in reads] == [ReadStatus.OK, ReadStatus.OK]
    del segment.bytes[-1:]
    reads = reader(segment).read(items(segment, [1, 2]), 0, 3)
    assert [read.status for read in reads] == [ReadStatus.OK, ReadStatus.SHORT]
    reads = reader(segment).read(items(segment, [1, 2]), 0, 2)
    assert [read.status for read in reads] == [ReadStatus.OK, ReadStatus.OK]


def test_a_segment_that_is_gone_is_missing_and_one_without_vectors_is_read_all_the_same() -> None:
    segment = Segment(geometry(3, 4096), 3, pages_only=True)
    wanted = items(segment, [0, 1, 2])
    assert all(r.status is ReadStatus.OK for r in reader(segment).read(wanted, 0, 3))
    assert all(right(segment, i, wanted[i].image, 3) for i in range(3))
    gone = ImageItem(wanted[0].key, Placement(7, 0, 1), wanted[0].image)
    assert reader(segment).read([gone], 0, 3)[0].status is ReadStatus.MISSING
