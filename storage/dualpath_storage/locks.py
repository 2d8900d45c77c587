"""File locks with a deadline, which the kernel releases when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[bool]:
    """Exclusive advisory lock on a file, released by the kernel when its holder dies.

    Yields:
        False when it was not to be had within ``timeout_s`` seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield acquire(fd, timeout_s)
    finally:
        os.close(fd)


def acquire(fd: int, timeout_s: float) -> bool:
    """Take the exclusive lock of an open file within ``timeout_s`` seconds."""
    end = time.monotonic() + timeout_s
    pause = 0.0002
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() + pause > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
