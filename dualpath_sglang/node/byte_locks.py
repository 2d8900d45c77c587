"""Locks on single bytes of a file, which the kernel releases when their holder dies.

Open-file-description locks: they hold across containers and process ids, conflict within a process
too, and, unlike all others, can be looked at without being taken. Who forks shares them with the
child, which must close the file, see :func:`close_in_children`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any

_FLOCK = struct.Struct("hhqqi4x")
"""Kind, from where, first byte, count, process: as 64-bit Linux has it."""


def take(fd: int, at: int) -> bool:
    """Lock a byte for this open file alone; whether nobody else has it.

    Raises:
        OSError: the file system has no such locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
    except (BlockingIOError, PermissionError):  # either, says POSIX
        return False
    return True


def give_back(fd: int, at: int) -> None:
    """Release a byte."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))


def taken(fd: int, at: int) -> bool:
    """Whether another open file has a byte locked; takes nothing.

    Raises:
        OSError: the file system has no such locks.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    (kind, *_) = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)


def close_in_children(holder: Any, close: Callable[[Any], None]) -> None:
    """Have forked children let go, lest a lock outlives its holder in one of them.

    Args:
        holder: of the file; not kept alive by this.
        close: called with it in each child.
    """
    known = weakref.ref(holder)

    def in_child() -> None:
        alive = known()
        if alive is not None:
            with contextlib.suppress(OSError):
                close(alive)

    os.register_at_fork(after_in_child=in_child)
