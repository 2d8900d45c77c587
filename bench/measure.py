"""What the benches share: clocks, percentiles, verified-cold files, rows in JSON."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)


class BenchError(Exception):
    """A system under test did not do what it was asked to; its figures mean nothing."""


@dataclass(slots=True)
class Timing:
    """One operation of one round.

    Args:
        wall_s: from the first call to the last.
        cpu_s: user and system seconds of this process, all threads.
        calls_s: duration of each call.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    calls_s: list[float] = field(default_factory=list)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Time one call; the operation is the sum of its calls."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        took = time.perf_counter() - wall
        self.wall_s += took
        self.cpu_s += time.process_time() - cpu
        self.calls_s.append(took)

    @contextmanager
    def settle(self) -> Iterator[None]:
        """Time what belongs to the last call, such as making its data durable."""
        last = self.calls_s.pop() if self.calls_s else 0.0
        with self.call():
            yield
        self.calls_s[-1] += last


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclass rows as a JSON list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def sync_file_system(directory: Path) -> None:
    """Make everything on the file system of ``directory`` durable (``syncfs``).

    Raises:
        OSError: the system refuses.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        if _LIBC.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


def files_under(directory: Path) -> list[Path]:
    """Every regular file below a directory."""
    return [path for path in directory.rglob("*") if path.is_file()]


def drop_cached_pages(directory: Path) -> None:
    """Put the files below a directory out of the page cache, and see that they are.

    Raises:
        BenchError: more than a hundredth of their bytes stayed.
    """
    sync_file_system(directory)
    size = resident = 0
    for path in files_under(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(fd).st_size
            resident += _resident_bytes(fd)
        finally:
            os.close(fd)
    if resident > max(size // 100, 1 << 20):
        raise BenchError(f"{resident} of {size} bytes in {directory} stayed in the page cache")


def _resident_bytes(fd: int) -> int:
    """Bytes of an open file in the page cache (``mincore``)."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    # A private map takes ctypes' writable view; nothing is written through it.
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        failed = _LIBC.mincore(ctypes.byref(start), ctypes.c_size_t(size), states)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(state & 1 for state in states) * mmap.PAGESIZE
