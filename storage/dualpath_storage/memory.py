"""Page-aligned scratch memory for I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from dualpath_storage.geometry import align_up

_HUGE_BYTES = 2 << 20
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
