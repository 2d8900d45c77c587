"""What the machine itself can do in the same round: the disk, and copying memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import BenchError, Timing, drop_cached_pages
from bench.pages import PagePool
from dualpath_storage.memory import in_huge_pages


@dataclass(frozen=True, slots=True)
class Way:
    """One way to drive the disk.

    Args:
        depth: threads, with one I/O each.
        in_pool: from and to the pool's memory, where the bytes belong; otherwise each thread
            uses one buffer in huge pages, over and over, and the bytes go nowhere.
    """

    depth: int
    in_pool: bool

    def __str__(self) -> str:
        return f"disk, {self.depth} threads, {'pool' if self.in_pool else 'buffers'}"


WAYS = (Way(4, False), Way(8, False), Way(16, False), Way(8, True))
"""Those that are tried; the limit is the one with the best median over all rounds."""


class Disk:
    """O_DIRECT into a fresh, preallocated file.

    Blocks are as large as a page of the case, each thread takes the next one, a write ends with
    ``fdatasync``. Without O_DIRECT on the mount, the same through the page cache.
    """

    def __init__(self, directory: Path, pool: PagePool, way: Way) -> None:
        self._path = directory / "limit"
        self._total = pool.case.total_bytes
        self._size = pool.case.page_bytes
        self._depth = way.depth
        self._memory = pool.memory.data if way.in_pool else None
        self._buffers = [in_huge_pages(self._size) for _ in range(0 if way.in_pool else way.depth)]
        for buffer in self._buffers:
            buffer[:] = pool.memory.data[: self._size]

    def write(self) -> Timing:
        """Write every block and make it durable."""
        with self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.posix_fallocate(fd, 0, self._total)
            timing = Timing()
            with timing.call():
                self._all(lambda offset, block: os.pwritev(fd, [block], offset))
                os.fdatasync(fd)
        return timing

    def read(self) -> Timing:
        """Read every block back."""
        drop_cached_pages(self._path.parent)
        with self._open(os.O_RDONLY) as fd:
            timing = Timing()
            with timing.call():
                self._all(lambda offset, block: os.preadv(fd, [block], offset))
        return timing

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        try:
            fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._path.unlink(missing_ok=True)
            fd = os.open(self._path, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def _all(self, transfer: Callable[[int, memoryview], int]) -> None:
        offsets = iter(range(0, self._total, self._size))
        moved: list[int] = []

        def work(number: int) -> None:
            done = 0
            for offset in offsets:  # each next() is atomic under the GIL
                if self._memory is None:
                    block = self._buffers[number]
                else:
                    block = self._memory[offset : offset + self._size]
                done += transfer(offset, block)
            moved.append(done)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(self._depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sum(moved) != self._total:
            raise BenchError(f"the disk moved {sum(moved)} bytes of {self._total}")


def copy_memory(pool: PagePool) -> Timing:
    """memcpy of the same total in blocks of a page, one thread."""
    size, total = pool.case.page_bytes, len(pool.memory)
    source, target = pool.base.ctypes.data, pool.memory.ctypes.data
    timing = Timing()
    with timing.call():
        for offset in range(0, total, size):
            ctypes.memmove(target + offset, source + offset, size)
    return timing
