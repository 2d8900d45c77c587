"""Reading some layers of many blocks into one piece of staging memory.

The layers ``[first, end)`` of a block are one run of bytes in its slot. Read with whole pages on
both sides, every block of a piece takes the same number of bytes, its *stride*, and its layers
begin at the same offset in it, its *lead*::

    |<----------- stride ----------->|<----------- stride ----------->|
    | header | pad | layers  | pad   | header | pad | layers  | pad   |
    |<--- lead --->|                 |<--- lead --->|

The header page is there only when it is asked for. Before layer 0 it is part of the same I/O;
before a later layer it costs an I/O of its own. A reader asks for it once, keeps the checksums,
and reads the later layers of the block without it: bytes that somebody else wrote there meanwhile
do not match the checksums.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dualpath_storage import header as headers
from dualpath_storage.backends import SegmentFile
from dualpath_storage.blocks import Placement, ReadStatus
from dualpath_storage.geometry import PAGE_BYTES, Geometry, align_up
from dualpath_storage.header import HEADER_BYTES, Header
from dualpath_storage.memory import aligned

MAX_BUFFERS = 1000  # the kernel takes 1024 a call
_MOST_WASTE = 0.25


@dataclass(frozen=True, slots=True)
class RangeShape:
    """Where the layers ``[first, end)`` of the blocks of a piece lie, see the module's drawing."""

    geometry: Geometry
    first: int
    end: int
    header: bool
    stride: int = field(init=False)
    lead: int = field(init=False)

    def __post_init__(self) -> None:
        assert 0 <= self.first < self.end <= self.geometry.layers
        before = HEADER_BYTES if self.header else 0
        begin = self.first * self.geometry.layer_bytes
        page = begin // PAGE_BYTES * PAGE_BYTES
        span = align_up(self.end * self.geometry.layer_bytes) - page
        object.__setattr__(self, "stride", before + span)
        object.__setattr__(self, "lead", before + begin - page)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the layers of one block."""
        return (self.end - self.first) * self.geometry.layer_bytes

    @property
    def slot_offset(self) -> int:
        """Where the I/O of the layers begins in a slot, or the I/O of header and layers."""
        if self.header and self.first == 0:
            return 0
        begin = HEADER_BYTES + self.first * self.geometry.layer_bytes
        return begin // PAGE_BYTES * PAGE_BYTES

    def layer(self, area: memoryview, block: int, layer: int) -> memoryview:
        """Layer ``layer`` of the ``block``-th block of a piece."""
        size = self.geometry.layer_bytes
        begin = block * self.stride + self.lead + (layer - self.first) * size
        return area[begin : begin + size]


@dataclass(frozen=True, slots=True)
class RangeItem:
    """One block of a piece.

    Args:
        checksums: of all its layers, as they came with its header; None reads them.
    """

    key: bytes
    placement: Placement
    checksums: array[int] | None = None


@dataclass(frozen=True, slots=True)
class RangeRead:
    """Outcome of one block. ``checksums`` are there when the header was right."""

    status: ReadStatus
    checksums: array[int] | None = None


class RangeReader:
    """Reads pieces of one geometry. Blocks the calling thread; safe from many at once.

    Args:
        file: the open segment of a number; raises OSError when there is none.
        status_of: what an error of the system means for a block.
        max_io_bytes: most bytes of one merged I/O.
    """

    def __init__(
        self,
        geometry: Geometry,
        file: Callable[[int], SegmentFile],
        status_of: Callable[[OSError], ReadStatus],
        max_io_bytes: int,
    ) -> None:
        self._geometry = geometry
        self._file = file
        self._status_of = status_of
        self._max_io_bytes = max_io_bytes

    def read(
        self, items: Sequence[RangeItem], shape: RangeShape, area: memoryview
    ) -> list[RangeRead]:
        """Read a piece and check every layer in it.

        Args:
            items: those without checksums need a ``shape`` with headers.
            area: page-aligned, at least ``len(items) * shape.stride`` bytes. What belongs to an
                item that is not OK is garbage.
        """
        results: list[RangeRead] = []
        for first, count in self._runs(items, shape):
            run = items[first : first + count]
            part = area[first * shape.stride : (first + count) * shape.stride]
            try:
                got = self._fill(self._file(run[0].placement.segment), run, shape, part)
            except OSError as error:
                results += [RangeRead(self._status_of(error))] * count
                continue
            results += [self._check(item, shape, part, i, got) for i, item in enumerate(run)]
        return results

    def _runs(self, items: Sequence[RangeItem], shape: RangeShape) -> Iterator[tuple[int, int]]:
        """Runs of items worth one I/O: neighbours of which little else would be read."""
        gap = self._geometry.slot_bytes - shape.stride
        merge = gap <= _MOST_WASTE * shape.stride and not (shape.header and shape.first)
        most = max(1, min(self._max_io_bytes // shape.stride, MAX_BUFFERS // 2)) if merge else 1
        return neighbours([item.placement for item in items], most)

    def _fill(
        self, file: SegmentFile, run: Sequence[RangeItem], shape: RangeShape, area: memoryview
    ) -> int:
        """Bytes of the layers' I/O that arrived, gaps between blocks not counted."""
        base = run[0].placement.slot * self._geometry.slot_bytes
        if shape.header and shape.first:
            if read_vector(file, [area[:HEADER_BYTES]], base) < HEADER_BYTES:
                return 0
            got = read_vector(file, [area[HEADER_BYTES:]], base + shape.slot_offset)
            return HEADER_BYTES + got
        offset = base + shape.slot_offset
        gap = self._geometry.slot_bytes - shape.stride
        if gap == 0 or len(run) == 1:
            return read_vector(file, [area], offset)
        between = aligned(gap)
        buffers: list[memoryview] = []
        for i in range(len(run)):
            buffers += [area[i * shape.stride : (i + 1) * shape.stride], between]
        got = read_vector(file, buffers[:-1], offset)
        blocks, rest = divmod(got, self._geometry.slot_bytes)
        return blocks * shape.stride + min(rest, shape.stride)

    def _check(
        self, item: RangeItem, shape: RangeShape, area: memoryview, block: int, got: int
    ) -> RangeRead:
        if got < block * shape.stride + shape.lead + shape.payload_bytes:
            return RangeRead(ReadStatus.SHORT)
        checksums = item.checksums
        if shape.header:
            page = area[block * shape.stride :][:HEADER_BYTES]
            found = check_header(page, self._geometry, item.key, item.placement)
            if isinstance(found, ReadStatus):
                return RangeRead(found)
            checksums = array("Q", found.checksums)
        assert checksums is not None
        layers = range(shape.first, shape.end)
        sums = headers.layer_checksums([shape.layer(area, block, i) for i in layers], len(layers))
        if array("Q", sums) != checksums[shape.first : shape.end]:
            return RangeRead(ReadStatus.CHECKSUM, checksums)
        return RangeRead(ReadStatus.OK, checksums)


def neighbours(places: Sequence[Placement], most: int) -> Iterator[tuple[int, int]]:
    """Runs of at most ``most`` slots that follow each other in the store: first, and how many."""
    first = 0
    for i in range(1, len(places) + 1):
        if i < len(places) and i - first < most:
            place, before = places[i], places[i - 1]
            if (place.segment, place.slot) == (before.segment, before.slot + 1):
                continue
        yield first, i - first
        first = i


def check_header(
    page: memoryview, geometry: Geometry, key: bytes, placement: Placement
) -> Header | ReadStatus:
    """The header in a page if it is the block's, else what is wrong with it."""
    found = headers.decode(page)
    if (
        found is None
        or found.geometry_id != geometry.id_bytes
        or found.payload_bytes != geometry.block_bytes
        or len(found.checksums) != geometry.layers
    ):
        return ReadStatus.HEADER
    if found.key != key or found.generation != placement.generation:
        return ReadStatus.GENERATION
    return found


def read_vector(file: SegmentFile, buffers: Sequence[memoryview], offset: int) -> int:
    """Read, through memory of our own where the system refuses the caller's for direct I/O."""
    try:
        return file.read(buffers, offset)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT):
            raise
    area = aligned(sum(len(buffer) for buffer in buffers))
    got = file.read([area], offset)
    begin = 0
    for buffer in buffers:
        buffer[:] = area[begin : begin + len(buffer)]
        begin += len(buffer)
    return got
