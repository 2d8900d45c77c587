"""Page-aligned scratch memory for direct I/O."""

from __future__ import annotations

import mmap

from dualpath_storage.geometry import align_up


class Arena:
    """Aligned memory of one worker, reused from one I/O to the next and grown when needed.

    A view is valid until the next call of the same method.
    """

    def __init__(self) -> None:
        self._headers = memoryview(b"")
        self._bounce = memoryview(b"")

    def headers(self, size: int) -> memoryview:
        """At least ``size`` aligned bytes for header pages and padding."""
        if len(self._headers) < size:
            self._headers = aligned(size)
        return self._headers

    def bounce(self, size: int) -> memoryview:
        """At least ``size`` aligned bytes for payload that cannot be read or written in place."""
        if len(self._bounce) < size:
            self._bounce = aligned(size)
        return self._bounce


def aligned(size: int) -> memoryview:
    """New zeroed memory, aligned to a page."""
    return memoryview(mmap.mmap(-1, align_up(max(size, 1))))
