"""One open LMDB file: transactions with deadlines, and the guard in front of its memory map.

LMDB trusts its file. Bytes that anybody else changes under the map can end the process that reads
them, so every transaction first asks whether the file is still as our own last commit left it:

| bytes of ``<file>-writer`` | written by | read by |
|---|---|---|
| 0..7: mtime of the index (ns) after the last commit; 0 while a commit is under way; 1 once
  damage was met | the holder of that file's lock | everybody, before each transaction |

What escapes is damage done in the microseconds between that look and the end of the transaction.
Only local file systems keep the mtime as it was at the commit; elsewhere the look is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import lmdb

from dualpath_sglang.index.base import IndexDamagedError, IndexUnavailableError
from dualpath_storage.locks import acquire

_MAP_BYTES = 64 << 30  # address space, not disk: the file grows as it is written
_MIN_BYTES = 2 * 4096  # two meta pages
_LOCAL = frozenset(b"ext2 ext3 ext4 xfs btrfs f2fs bcachefs zfs tmpfs overlay".split())
_STAMP = struct.Struct("<Q")
_COMMITTING = 0
_DAMAGED = 1

_TRANSIENT = (
    lmdb.DiskError,
    lmdb.LockError,
    lmdb.MapFullError,
    lmdb.MemoryError,
    lmdb.ReadersFullError,
    lmdb.ReadonlyError,
    lmdb.TlsFullError,
    lmdb.TxnFullError,
)
"""What LMDB says of the machine, not of the file. Everything else, a page number beyond the map as
much as a malformed row, means that the file cannot be used any more."""


class Environment:
    """LMDB allows one a process and file, so all indexes of a path share it.

    Args:
        path: the file; created when missing.
        tables: names of the tables in it.
        read_only: never write; the file must exist.
        timeout_s: how long to wait for a turn to create the tables.

    Raises:
        IndexDamagedError: the file is no usable index.
        IndexUnavailableError: it cannot be opened now.
    """

    _open: ClassVar[dict[str, Environment]] = {}
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, path: Path, tables: Sequence[str], read_only: bool, timeout_s: float
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._users = 0
        self._mutex = threading.Lock()
        self._size_bytes = 0
        self._stamps = _is_local(path.parent)
        self._lock_fd = self._open_lock_file()
        self._env: lmdb.Environment | None = None
        try:
            self._identity = self._files()
            self._look_before_opening()
            self._env = lmdb.open(
                str(path),
                map_size=_MAP_BYTES,
                subdir=False,
                readonly=read_only,
                create=not read_only,
                sync=False,
                metasync=False,
                max_dbs=len(tables),
                max_readers=1024,
                lock=not read_only or os.access(path.parent, os.W_OK),
            )
            self._env.reader_check()
            self._identity = self._files()
            self.tables = self._open_tables(tables, timeout_s)
        except BaseException as error:
            self._close()
            if isinstance(error, (*_TRANSIENT, OSError)):
                raise IndexUnavailableError(f"{path} cannot be opened: {error}") from error
            if isinstance(error, (lmdb.Error, struct.error)):
                raise IndexDamagedError(f"{path} is damaged: {error}") from error
            raise

    @classmethod
    def share(
        cls, path: Path, tables: Sequence[str], read_only: bool, timeout_s: float
    ) -> Environment:
        """The environment of a path, to be given back by :meth:`release`."""
        with cls._open_lock:
            name = str(path.resolve())
            shared = cls._open.get(name)
            if shared is not None and not shared._replaced():
                if shared.read_only and not read_only:
                    raise IndexUnavailableError(f"{path} is open for reading only in this process")
            else:
                shared = cls._open[name] = cls(path, tables, read_only, timeout_s)
            shared._users += 1
            return shared

    def release(self) -> None:
        """Close it when nobody uses it any more."""
        with self._open_lock:
            self._users -= 1
            if self._users:
                return
            for name in [n for n, shared in self._open.items() if shared is self]:
                del self._open[name]
            self._close()

    def _open_lock_file(self) -> int:
        name = f"{self.path}-writer"
        try:
            if self.read_only:
                return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if self.read_only:
                return -1
            raise IndexUnavailableError(f"{name} cannot be opened: {error}") from error

    def _look_before_opening(self) -> None:
        """Refuse a bad file before LMDB maps it; an empty or missing one is to be made."""
        if not self.read_only and (not self.path.exists() or self.path.stat().st_size == 0):
            self._write_stamp(_COMMITTING)
        else:
            self._guard()

    def _open_tables(self, names: Sequence[str], timeout_s: float) -> dict[str, lmdb._Database]:
        assert self._env is not None
        if self.read_only:
            return {name: self._env.open_db(name.encode(), create=False) for name in names}
        # Always in turn: to open tables for writing takes LMDB's own lock, which has no deadline.
        with self.write(timeout_s) as txn:
            return {name: self._env.open_db(name.encode(), txn=txn) for name in names}

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # -- transactions -----------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """A snapshot.

        Raises:
            IndexDamagedError, IndexUnavailableError: also for LMDB's errors in the body.
        """
        assert self._env is not None
        self._guard()
        with self._told(), self._env.begin() as txn:
            yield txn

    @contextlib.contextmanager
    def write(self, timeout_s: float) -> Iterator[lmdb.Transaction]:
        """A transaction in turn with all other writers, begun within ``timeout_s`` seconds.

        Raises:
            IndexDamagedError, IndexUnavailableError: as :meth:`read`; nothing is changed then.
        """
        if self.read_only:
            raise IndexUnavailableError(f"{self.path} is open for reading only")
        assert self._env is not None
        with self._turn(timeout_s):
            self._guard()
            self._write_stamp(_COMMITTING)
            sound = True
            try:
                with self._told(), self._env.begin(write=True) as txn:
                    yield txn
            except IndexDamagedError:
                sound = False
                raise
            finally:
                self._stamp_commit(sound)

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        end = time.monotonic() + timeout_s
        late = IndexUnavailableError(f"{self.path}: no turn to write within {timeout_s:.1f} s")
        if not self._mutex.acquire(timeout=max(0.0, timeout_s)):
            raise late
        try:
            try:
                if not acquire(self._lock_fd, end - time.monotonic()):
                    raise late
            except OSError as error:
                raise IndexUnavailableError(f"{self.path}: {error}") from error
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """LMDB's errors as ours."""
        try:
            yield
        except (*_TRANSIENT, OSError) as error:
            raise IndexUnavailableError(f"{self.path}: {error}") from error
        except (lmdb.Error, struct.error) as error:
            raise IndexDamagedError(f"{self.path} is damaged: {error}") from error

    def sync(self) -> None:
        """Make the commits of all processes durable."""
        assert self._env is not None
        with self._told():
            self._env.sync(True)
            if not self.read_only:
                os.fsync(self._lock_fd)

    def reap_readers(self) -> None:
        """Forget the snapshots of killed processes, which keep old pages from being reused."""
        assert self._env is not None
        with self._told():
            self._env.reader_check()

    def copy_structure(self) -> None:
        """Walk every page, the tables' and the free list's, as LMDB itself does.

        Raises:
            IndexDamagedError: it meets what cannot be.
        """
        assert self._env is not None
        self._guard()
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with self._told():
                self._env.copyfd(fd, compact=True)
        finally:
            os.close(fd)

    # -- the guard --------------------------------------------------------------------------

    def guard(self) -> None:
        """Look again, in the course of a long transaction.

        Raises:
            IndexDamagedError: the file was removed, replaced, cut short or changed by others.
        """
        self._guard()

    def _guard(self) -> None:
        if self._replaced():
            raise IndexDamagedError(f"{self.path} was removed or replaced")
        size_bytes = self._size_bytes  # ahead of the look, which another thread may overtake
        stat = self._stat()
        stamp = self._read_stamp()
        if stamp == stat.st_mtime_ns:
            return
        if stamp != _COMMITTING:
            # A commit may have ended between the two looks; if so, the stamp changes too.
            stat = self._stat()
            if stamp == self._read_stamp() != stat.st_mtime_ns:
                raise IndexDamagedError(f"{self.path} was changed by another program")
        if stat.st_size < max(_MIN_BYTES, size_bytes):
            raise IndexDamagedError(f"{self.path} was cut short")
        self._size_bytes = max(self._size_bytes, stat.st_size)

    def _stat(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise IndexDamagedError(f"{self.path} is gone: {error}") from error

    def _files(self) -> tuple[int, ...]:
        """Names the index, LMDB's reader table and our lock file: they only make sense together."""
        names: list[int] = []
        for suffix in ("", "-lock", "-writer"):
            try:
                stat = os.stat(f"{self.path}{suffix}")  # noqa: PTH116 -- hot path
                names += (stat.st_dev, stat.st_ino)
            except OSError:
                names += (0, 0)
        return tuple(names)

    def _replaced(self) -> bool:
        return self._files() != self._identity

    def _read_stamp(self) -> int:
        if not self._stamps or self._lock_fd < 0:
            return _COMMITTING
        try:
            data = os.pread(self._lock_fd, _STAMP.size, 0)
        except OSError:
            return _COMMITTING
        return _STAMP.unpack(data)[0] if len(data) == _STAMP.size else _COMMITTING

    def _write_stamp(self, stamp: int) -> None:
        if self.read_only or not self._stamps:
            return
        try:
            os.pwrite(self._lock_fd, _STAMP.pack(stamp), 0)
        except OSError as error:
            if stamp == _COMMITTING:  # an older stamp would call the next commit damage
                raise IndexUnavailableError(f"{self.path}: {error}") from error

    def _stamp_commit(self, sound: bool) -> None:
        try:
            modified_ns = self.path.stat().st_mtime_ns
        except OSError:
            return
        if not self._replaced():
            self._write_stamp(modified_ns if sound else _DAMAGED)


def _is_local(directory: Path) -> bool:
    """Whether a directory lies on a file system whose times no server sets."""
    try:
        where = os.fsencode(directory.resolve())
        lines = Path("/proc/self/mounts").read_bytes().splitlines()
    except OSError:
        return False
    best, kind = b"", b""
    for line in lines:
        _, point, this, *_ = line.split(b" ")
        point = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), point)
        inside = where == point or where.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):
            best, kind = point, this
    return kind in _LOCAL
