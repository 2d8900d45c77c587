"""Reading blocks into images of their slots: memory that is laid out as a slot is.

An image begins with the header page, and the payload follows, so neighbouring slots come with one
I/O and without a copy, also with direct I/O. Layers may come range by range: the I/O of a range
begins where that of the range before it ended, on a page border, so that no page is written twice.
What somebody has begun to use never changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dualpath_storage import header as headers
from dualpath_storage.backends import SegmentFile
from dualpath_storage.blocks import Placement, ReadStatus
from dualpath_storage.geometry import Geometry, align_up
from dualpath_storage.header import HEADER_BYTES
from dualpath_storage.ranges import MAX_BUFFERS, RangeRead, check_header, neighbours, read_vector


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One block to read.

    Args:
        image: writable, page-aligned, ``slot_bytes`` long.
        checksums: of all its layers, as they came with its header; None before the first range.
    """

    key: bytes
    placement: Placement
    image: memoryview
    checksums: array[int] | None = None


class ImageReader:
    """Reads images of one geometry. Blocks the calling thread; safe from many at once.

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

    def read(self, items: Sequence[ImageItem], first: int, end: int) -> list[RangeRead]:
        """Read the layers ``[first, end)`` into the images, and check each.

        Args:
            items: all layers before ``first`` must have been read before, and the checksums be
                known then. Before layer 0 comes the header.
        """
        begin, stop = self._bounds(first, end)
        results: list[RangeRead] = []
        for run in self._runs(items, whole=begin == 0 and stop == self._geometry.slot_bytes):
            try:
                got = self._fill(run, begin, stop)
            except OSError as error:
                results += [RangeRead(self._status_of(error))] * len(run)
                continue
            need = HEADER_BYTES + end * self._geometry.layer_bytes - begin  # padding may lack
            for i, item in enumerate(run):
                short = got < i * (stop - begin) + need
                results.append(
                    RangeRead(ReadStatus.SHORT) if short else self._check(item, first, end)
                )
        return results

    def _bounds(self, first: int, end: int) -> tuple[int, int]:
        """Bytes of the slot that are read for these layers."""
        size, layers = self._geometry.layer_bytes, self._geometry.layers
        begin = align_up(HEADER_BYTES + first * size) if first else 0
        if end == layers:
            return begin, self._geometry.slot_bytes
        return begin, max(begin, align_up(HEADER_BYTES + end * size))

    def _runs(self, items: Sequence[ImageItem], *, whole: bool) -> Iterator[Sequence[ImageItem]]:
        """Neighbours, where nothing lies between what is read of them."""
        most = max(1, min(self._max_io_bytes // self._geometry.slot_bytes, MAX_BUFFERS))
        most = most if whole else 1
        for first, count in neighbours([item.placement for item in items], most):
            yield items[first : first + count]

    def _fill(self, run: Sequence[ImageItem], begin: int, stop: int) -> int:
        if begin == stop:
            return 0
        place = run[0].placement
        offset = place.slot * self._geometry.slot_bytes + begin
        buffers = [item.image[begin:stop] for item in run]
        return read_vector(self._file(place.segment), buffers, offset)

    def _check(self, item: ImageItem, first: int, end: int) -> RangeRead:
        checksums = item.checksums
        if first == 0:
            found = check_header(
                item.image[:HEADER_BYTES], self._geometry, item.key, item.placement
            )
            if isinstance(found, ReadStatus):
                return RangeRead(found)
            checksums = array("Q", found.checksums)
        assert checksums is not None
        size = self._geometry.layer_bytes
        at = range(HEADER_BYTES + first * size, HEADER_BYTES + end * size, size)
        sums = headers.layer_checksums([item.image[i : i + size] for i in at], end - first)
        if array("Q", sums) != checksums[first:end]:
            return RangeRead(ReadStatus.CHECKSUM, checksums)
        return RangeRead(ReadStatus.OK, checksums)
