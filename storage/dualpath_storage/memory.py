"""Page-aligned scratch memory for I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from dualpath_storage.geometry import align_up

_HUGE_BYTES = 2 << 20
_NEARLY = 0.9
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Arena:
    """Aligned memory of one worker, reused from one I/O to the next and grown when needed.

    A view is valid until the next call of the same method.
    """

    def __init__(self) -> None:
        self._headers = memoryview(b"")
        self._payload = memoryview(b"")

    def headers(self, size: int) -> memoryview:
        """At least ``size`` aligned bytes for header pages and padding."""
        if len(self._headers) < size:
            self._headers = aligned(size)
        return self._headers

    def payload(self, size: int) -> memoryview:
        """At least ``size`` aligned bytes, in huge pages where there are any, for whole slots."""
        if len(self._payload) < size:
            self._payload = in_huge_pages(size)
        return self._payload


def aligned(size: int) -> memoryview:
    """New zeroed memory, aligned to a page."""
    return memoryview(mmap.mmap(-1, align_up(max(size, 1)), flags=_PRIVATE))


def in_huge_pages(size: int) -> memoryview:
    """New zeroed memory, aligned to 2 MiB and in pages as large where the system has them.

    Memory in one piece is one segment to a device, and one page for the kernel to pin.
    """
    size = align_up(max(size, 1))
    area = mmap.mmap(-1, size + _HUGE_BYTES, flags=_PRIVATE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_BYTES
    with contextlib.suppress(OSError):
        # Not the rest beyond the last whole one: it would cost 2 MiB for a header page.
        area.madvise(mmap.MADV_HUGEPAGE, start, max(1, size // _HUGE_BYTES) * _HUGE_BYTES)
    return memoryview(area)[start : start + size]


def lies_in_huge_pages(address: int, size: int) -> bool:
    """Whether memory of this process is in pages of 2 MiB or more now, all of it or nearly so.

    Reserved ones (hugetlbfs) stay so; transparent ones do while nothing splits them.
    """
    if size <= 0:
        return False
    seen = 0
    for begin, end, huge in _mappings():
        if begin < address + size and address < end:
            if not huge:
                return False
            seen += min(end, address + size) - max(begin, address)
    return seen == size


def _mappings() -> Iterator[tuple[int, int, bool]]:
    """Begin, end, and whether its pages are huge, of each mapping of this process."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    begin, end, page_kib, mapped_kib, huge_kib = 0, 0, 0, 0, 0
    for line in [*lines, "0-0 "]:
        if bounds := _MAPPING.match(line):
            if end:
                huge = page_kib << 10 >= _HUGE_BYTES or huge_kib > _NEARLY * mapped_kib
                yield begin, end, huge
            begin, end = int(bounds[1], 16), int(bounds[2], 16)
            page_kib, mapped_kib, huge_kib = 0, 0, 0
            continue
        name, _, value = line.partition(":")
        if name == "KernelPageSize":
            page_kib = int(value.split()[0])
        elif name == "Rss":
            mapped_kib = int(value.split()[0])
        elif name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"):
            huge_kib += int(value.split()[0])
