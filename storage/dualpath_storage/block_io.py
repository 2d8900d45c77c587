"""One I/O: neighbouring blocks, to or from the memory where their bytes belong."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from dataclasses import replace

from dualpath_storage import header as headers
from dualpath_storage.backends import SegmentFile
from dualpath_storage.blocks import (
    CopyingPieces,
    Pieces,
    ReadItem,
    ReadStatus,
    WriteItem,
    gather,
    pieces_of,
    scatter,
)
from dualpath_storage.geometry import Geometry
from dualpath_storage.header import HEADER_BYTES
from dualpath_storage.memory import Arena
from dualpath_storage.ranges import RangeItem, RangeReader, RangeShape, check_header

_MAX_BUFFERS = 1000  # the kernel takes 1024 a call


class BlockIo:
    """Reads and writes blocks of one geometry on the calling thread. Thread-safe.

    Args:
        ranges: reads some layers only.
        direct: whether files are open for direct I/O.
    """

    def __init__(self, geometry: Geometry, ranges: RangeReader, *, direct: bool) -> None:
        self._geometry = geometry
        self._ranges = ranges
        self._direct = direct
        self._refused = False
        self._pad_bytes = geometry.slot_bytes - HEADER_BYTES - geometry.block_bytes

    def read(self, arena: Arena, file: SegmentFile, items: Sequence[ReadItem]) -> list[ReadStatus]:
        """Read neighbouring blocks into their pieces.

        Raises:
            OSError: the system refuses.
        """
        size = self._geometry.slot_bytes
        offset = items[0].placement.slot * size
        if self.in_place(items[0].pieces):
            pages, blocks, buffers = self._buffers(arena, items)
            try:
                got = file.read(buffers, offset)
            except OSError as error:
                if not self._refuses(error):
                    raise
            else:
                return [
                    self._check(pages[i], item, blocks[i], got - i * size)
                    for i, item in enumerate(items)
                ]
        area = arena.payload(len(items) * size)[: len(items) * size]
        got = file.read([area], offset)
        results = []
        for i, item in enumerate(items):
            slot = area[i * size : (i + 1) * size]
            layers = pieces_of(slot[HEADER_BYTES:], self._geometry)
            results.append(self._check(slot[:HEADER_BYTES], item, layers, got - i * size))
        _scatter_good(items, results, area[HEADER_BYTES:], size)
        return results

    def read_window(
        self, arena: Arena, items: Sequence[ReadItem], window: tuple[int, int]
    ) -> list[ReadStatus]:
        """The layers of the window, which rarely lie on page borders: by way of the arena."""
        shape = RangeShape(self._geometry, *window, header=True)
        area = arena.payload(len(items) * shape.stride)
        reads = self._ranges.read([RangeItem(i.key, i.placement) for i in items], shape, area)
        results = [read.status for read in reads]
        begin, end = (layer * len(items[0].pieces) // self._geometry.layers for layer in window)
        if end - begin < len(items[0].pieces):
            items = [replace(item, pieces=item.pieces[begin:end]) for item in items]
        _scatter_good(items, results, area[shape.lead :], shape.stride)
        return results

    def write(self, arena: Arena, file: SegmentFile, items: Sequence[WriteItem]) -> bool:
        """Write neighbouring blocks; whether all of their bytes were.

        Raises:
            OSError: the system refuses.
        """
        size = self._geometry.slot_bytes
        offset = items[0].placement.slot * size
        if self.in_place(items[0].pieces):
            pages, blocks, buffers = self._buffers(arena, items)
            if self._pad_bytes:
                buffers[-1][:] = bytes(self._pad_bytes)  # the same memory pads every block
            for page, block, item in zip(pages, blocks, items, strict=True):
                self._encode(page, block, item)
            try:
                return file.write(buffers, offset) == len(items) * size
            except OSError as error:
                if not self._refuses(error):
                    raise
        area = arena.payload(len(items) * size)[: len(items) * size]
        gather([item.pieces for item in items], area[HEADER_BYTES:], size)
        for i, item in enumerate(items):
            slot = area[i * size : (i + 1) * size]
            payload = slot[HEADER_BYTES:]
            if self._pad_bytes:
                payload[self._geometry.block_bytes :] = bytes(self._pad_bytes)
            self._encode(slot[:HEADER_BYTES], pieces_of(payload, self._geometry), item)
        return file.write([area], offset) == len(items) * size

    def _check(self, page: memoryview, item: ReadItem, block: Pieces, got: int) -> ReadStatus:
        if got < HEADER_BYTES + self._geometry.block_bytes:
            return ReadStatus.SHORT
        found = check_header(page, self._geometry, item.key, item.placement)
        if isinstance(found, ReadStatus):
            return found
        sums = headers.layer_checksums(block, self._geometry.layers)
        return ReadStatus.OK if tuple(sums) == found.checksums else ReadStatus.CHECKSUM

    def _encode(self, page: memoryview, block: Pieces, item: WriteItem) -> None:
        sums = headers.layer_checksums(block, self._geometry.layers)
        headers.encode_into(
            page, self._geometry, item.key, item.parent, item.placement.generation, sums
        )

    def _buffers(
        self, arena: Arena, items: Sequence[ReadItem] | Sequence[WriteItem]
    ) -> tuple[list[memoryview], list[list[memoryview]], list[memoryview]]:
        """Header pages, pieces, and the whole vector: header, pieces, padding, block by block."""
        area = arena.headers((len(items) + 1) * HEADER_BYTES)
        pages = [area[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(items))]
        pad = area[len(items) * HEADER_BYTES :][: self._pad_bytes]
        blocks = [list(item.pieces) for item in items]
        buffers: list[memoryview] = []
        for page, block in zip(pages, blocks, strict=True):
            buffers.append(page)
            buffers += block
            if self._pad_bytes:
                buffers.append(pad)
        return pages, blocks, buffers

    def most(self, pieces: Pieces) -> int:
        """Most blocks with as many pieces that one I/O takes."""
        if not self.in_place(pieces):
            return sys.maxsize
        return max(1, _MAX_BUFFERS // (len(pieces) + 2))

    def in_place(self, pieces: Pieces) -> bool:
        """Whether the kernel is given the caller's memory itself.

        Through the page cache, because it copies anyway, and where memory is as good as our own.
        Otherwise direct I/O uses the workers' memory in huge pages, and a copy: ordinary memory
        lies in scattered 4 KiB pages, each a segment of its own to the device, which costs more
        than copying from memory that is in the cache.
        """
        if len(pieces) + 2 > _MAX_BUFFERS:
            return False
        return not self._direct or (
            isinstance(pieces, CopyingPieces) and pieces.suit_direct_io and not self._refused
        )

    def _refuses(self, error: OSError) -> bool:
        """Whether the system does not take the caller's memory for direct I/O; then never again."""
        if not self._direct or error.errno not in (errno.EINVAL, errno.EFAULT):
            return False
        self._refused = True
        return True


def _scatter_good(
    items: Sequence[ReadItem], results: Sequence[ReadStatus], area: memoryview, stride: int
) -> None:
    """Copy runs of good blocks to where they belong."""
    begin = 0
    for i in range(len(items) + 1):
        if i < len(items) and results[i] is ReadStatus.OK:
            continue
        if begin < i:
            scatter([item.pieces for item in items[begin:i]], area[begin * stride :], stride)
        begin = i + 1
