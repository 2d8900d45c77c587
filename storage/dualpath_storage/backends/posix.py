"""Segment files on any POSIX file system, with direct I/O where the mount allows it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dualpath_storage.errors import StoreError
from dualpath_storage.geometry import PAGE_BYTES
from dualpath_storage.memory import aligned

logger = logging.getLogger(__name__)

DIRECT_ALIGNMENT = 512
_REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY)


_ABANDONED_S = 60.0
"""A file that is empty for so long will never be a segment. Whoever makes it all the same finds
that it is gone, as with any segment that somebody removed."""


class PosixFile:
    """A segment behind a file descriptor; see :class:`~dualpath_storage.backends.SegmentFile`."""

    __slots__ = ("_fd", "size_bytes")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size_bytes = os.fstat(fd).st_size

    @property
    def linked(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    @property
    def whole(self) -> bool:
        return os.fstat(self._fd).st_size >= self.size_bytes

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        return _transfer(os.preadv, self._fd, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        return _transfer(os.pwritev, self._fd, buffers, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def discard(self) -> None:
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PosixBackend:
    """Opens segments with ``preadv``/``pwritev``, direct when the mount was shown to take it.

    Args:
        directory: an existing directory on the mount; probed with a small file when writable.
        direct_io: ``auto`` probes, ``on`` refuses a mount without direct I/O, ``off`` never.
        writable: whether a probe file may be written.

    Raises:
        StoreError: ``direct_io`` is ``on`` and the mount refuses it.
    """

    name = "posix"

    def __init__(
        self, directory: Path, direct_io: Literal["auto", "on", "off"], writable: bool
    ) -> None:
        self.direct = direct_io != "off" and (
            self._probe(directory) if writable else direct_io == "on"
        )
        if direct_io == "on" and not self.direct:
            raise StoreError(
                f"direct_io is on, but the file system of {directory} does not take it."
            )
        if direct_io == "auto" and writable and not self.direct:
            logger.info("No direct I/O on %s: going through the page cache", directory)
        self.alignment = DIRECT_ALIGNMENT if self.direct else 1
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def create(self, path: Path, size: int) -> PosixFile | None:
        try:
            fd = os.open(path, self._flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # whoever has it now lets go of an empty file at once
            _allocate(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return PosixFile(fd)

    def lock(self, path: Path) -> PosixFile | None:
        fd = os.open(path, self._flags | os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        facts = os.fstat(fd)
        if facts.st_size == 0:  # between its creation and its lock, or its maker was killed there
            if time.time() - facts.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
            os.close(fd)
            return None
        return PosixFile(fd)

    def open(self, path: Path) -> PosixFile:
        return PosixFile(os.open(path, self._flags | os.O_RDONLY))

    @staticmethod
    def _probe(directory: Path) -> bool:
        """Whether a direct write and read of one page work here (some mounts only open it)."""
        path = directory / f".probe-{uuid.uuid4().hex}"
        page = aligned(PAGE_BYTES)
        page[:8] = b"dualpath"
        back = aligned(PAGE_BYTES)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            with contextlib.suppress(OSError):  # some systems make the file before they refuse
                path.unlink()
            if error.errno not in _REFUSED:
                logger.warning("Cannot probe %s for direct I/O: %s", directory, error)
            return False
        try:
            os.pwritev(fd, [page], 0)
            return os.preadv(fd, [back], 0) == PAGE_BYTES and back == page
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True  # it was opened for direct I/O; the disk is only full
            if error.errno not in _REFUSED:
                logger.warning("Cannot probe %s for direct I/O: %s", directory, error)
            return False
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Go on where the kernel stopped short, until all is done or the file ends."""
    done = call(fd, buffers, offset)
    size = sum(len(buffer) for buffer in buffers)
    while 0 < done < size and done % DIRECT_ALIGNMENT == 0:
        more = call(fd, _after(buffers, done), offset + done)
        if more == 0:
            break
        done += more
    return done


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks of a file, or only its size where the file system cannot reserve."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        os.ftruncate(fd, size)
