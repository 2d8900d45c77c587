"""What the machine itself can do in the same round: the disk, and copying memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.measure import BenchError, Timing, drop_cached_pages
from bench.pages import PagePool


class Disk:
    """O_DIRECT into a fresh, preallocated file, ``depth`` threads with one I/O each.

    Blocks are as large as a page of the case and go straight from and to the pool's memory, each
    thread taking the next one; a write ends with ``fdatasync``. Without O_DIRECT on the mount,
    the same through the page cache.
    """

    def __init__(self, directory: Path, pool: PagePool, depth: int) -> None:
        self.depth = depth
        self._path = directory / "limit"
        self._pool = pool
        size = pool.case.page_bytes
        memory = pool.memory.data
        self._blocks = [memory[i : i + size] for i in range(0, len(memory), size)]

    def write(self) -> Timing:
        """Write every block of the pool and make it durable."""
        with self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.posix_fallocate(fd, 0, len(self._pool.memory))
            timing = Timing()
            with timing.call():
                self._all(lambda i, block: os.pwritev(fd, [block], i * len(block)))
                os.fdatasync(fd)
        return timing

    def read(self) -> Timing:
        """Read every block back."""
        drop_cached_pages(self._path.parent)
        with self._open(os.O_RDONLY) as fd:
            timing = Timing()
            with timing.call():
                self._all(lambda i, block: os.preadv(fd, [block], i * len(block)))
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
        numbers = iter(range(len(self._blocks)))
        moved: list[int] = []

        def work() -> None:
            # next() of a range iterator is atomic under the GIL
            moved.append(sum(transfer(i, self._blocks[i]) for i in numbers))

        threads = [threading.Thread(target=work) for _ in range(self.depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sum(moved) != len(self._pool.memory):
            raise BenchError(f"the disk moved {sum(moved)} bytes of {len(self._pool.memory)}")


def copy_memory(pool: PagePool) -> Timing:
    """memcpy of the same total in blocks of a page, one thread."""
    size, total = pool.case.page_bytes, len(pool.memory)
    source, target = pool.base.ctypes.data, pool.memory.ctypes.data
    timing = Timing()
    with timing.call():
        for offset in range(0, total, size):
            ctypes.memmove(target + offset, source + offset, size)
    return timing
