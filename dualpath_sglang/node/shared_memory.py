"""The memory of a node's agent: a file without a name, that readers on this machine may map.

Taken in runs of whole pages. A page costs memory once it was written to, and never more than the
file's size are there. The file can neither shrink nor grow: who maps it cannot be hurt by that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os

from dualpath_storage.geometry import PAGE_BYTES

logger = logging.getLogger(__name__)

_HUGE_BYTES = 2 << 20
_FREE, _USED = b"\0", b"\1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LEAST_BYTES = 1 << 20
_NOEXEC_SEAL = 0x0008
"""Since Linux 6.3, and there an administrator may insist on it."""


class SharedMemory:
    """Hands out runs of pages, first fit. Not thread-safe, but for reading and writing the bytes.

    Args:
        capacity_bytes: of the file; what does not fill a page (2 MiB, when there are many) is
            left out.

    Raises:
        MemoryError: the system does not give so much of its address space.
    """

    def __init__(self, capacity_bytes: int) -> None:
        unit = _HUGE_BYTES if capacity_bytes >= 8 * _HUGE_BYTES else PAGE_BYTES
        self.size_bytes = max(1, capacity_bytes // unit) * unit
        self.fd = _sealed_file(self.size_bytes)
        """The file; None where the system has no files in memory, and then nobody can map it."""
        try:
            if self.fd is None:
                self._map = mmap.mmap(-1, self.size_bytes)
            else:
                self._map = mmap.mmap(self.fd, self.size_bytes)
        except (OSError, ValueError) as error:
            self.close()
            raise MemoryError(f"{self.size_bytes} bytes cannot be had: {error}") from error
        with contextlib.suppress(OSError):  # a setting of the system, not needed
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = memoryview(self._map)
        self._state = bytearray(self.size_bytes // PAGE_BYTES)
        self._hint = 0
        self.used_bytes = 0
        """Of runs that were taken and not given back."""

    def take(self, size: int) -> int | None:
        """Offset of a run of at least ``size`` bytes; None when there is none."""
        pages = -(-size // PAGE_BYTES)
        if self.used_bytes + pages * PAGE_BYTES > self.size_bytes:
            return None
        wanted = _FREE * pages
        first = self._state.find(wanted, self._hint)
        if first < 0:
            first = self._state.find(wanted)
        if first < 0:
            return None
        self._state[first : first + pages] = _USED * pages
        self._hint = first + pages
        self.used_bytes += pages * PAGE_BYTES
        return first * PAGE_BYTES

    def give(self, offset: int, size: int) -> None:
        """Take a run back: nobody writes to it any more."""
        first, pages = offset // PAGE_BYTES, -(-size // PAGE_BYTES)
        assert self._state[first : first + pages] == _USED * pages
        self._state[first : first + pages] = _FREE * pages
        self._hint = min(self._hint, first)
        self.used_bytes -= pages * PAGE_BYTES

    def release(self) -> None:
        """Give the memory of large free runs back to the system."""
        begin = self._state.find(_FREE)
        while begin >= 0:
            end = self._state.find(_USED, begin)
            end = len(self._state) if end < 0 else end
            if (end - begin) * PAGE_BYTES >= min(_LEAST_BYTES, self.size_bytes):
                with contextlib.suppress(OSError):
                    self._map.madvise(
                        mmap.MADV_REMOVE, begin * PAGE_BYTES, (end - begin) * PAGE_BYTES
                    )
            begin = self._state.find(_FREE, end)

    def close(self) -> None:
        """Let go of the file. Its memory is free once nobody maps it any more."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _sealed_file(size: int) -> int | None:
    try:
        fd = _memory_file()
    except (AttributeError, OSError) as error:
        logger.warning("No files in memory here, so readers must use the network: %s", error)
        return None
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"a file of {size} bytes cannot be had: {error}") from error
    return fd


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("dualpath-blocks", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("dualpath-blocks", flags)
