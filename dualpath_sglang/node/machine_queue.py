"""The read queue of a machine: what all of its processes have accepted to read and not yet read.

Each process has a slot in one file that all have mapped, and the lock of one byte of it: the
kernel gives that back when the process dies, however it dies, and from then on the slot counts no
more. To count costs two stores to memory; to sum up, one look at the slots and a system call for
each that is in use.

| bytes | what |
|---|---|
| 0..64 | magic, format version, number of slots |
| 64 + 32 i | slot i: bytes, tokens, 1 while it is somebody's, 0 |
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np

from dualpath_sglang.node import byte_locks
from dualpath_storage.locks import file_lock

logger = logging.getLogger(__name__)

SLOTS = 1024
_HEAD = struct.Struct("<8sII")
_RIGHT = _HEAD.pack(b"DUALPQ\0\0", 1, SLOTS)
_HEAD_BYTES, _WORDS = 64, 4
FILE_BYTES = _HEAD_BYTES + SLOTS * 8 * _WORDS
_SUM_S = 0.002
"""A sum is good for so long: an agent asks at the end of each fetch."""
_MAKE_S = 1.0


class _DamagedError(Exception):
    """The file is no such queue."""


class MachineQueue:
    """This process's slot in the queue of its machine, and the sum over all. Thread-safe.

    Never raises: when there is no slot to be had, the process counts itself alone, and one warning
    says so.

    Args:
        path: of the file, in a directory of this user's own. Nobody may ever write to it by other
            means: it is mapped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._warned = False
        self._mine = (0, 0)
        self._sum: tuple[float, int, int] = (float("-inf"), 0, 0)
        self._slot = -1
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._words: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
        self._own: memoryview | None = None
        """The slot's words; each is one store of 8 aligned bytes."""
        self._closed = False
        byte_locks.close_in_children(self, MachineQueue._leave)
        self.renew()

    def put(self, size: int, tokens: int) -> None:
        """What this process has to read by now: bytes and tokens. One thread at a time.

        Takes no lock: a sum that another thread makes does not hold a read up.
        """
        self._mine = (size, tokens)
        own = self._own
        if own is not None:
            own[0] = size
            own[1] = tokens

    def total(self) -> tuple[int, int]:
        """Bytes and tokens of all living processes of the machine."""
        now = time.monotonic()
        with self._lock:
            since, size, tokens = self._sum
            if now - since >= _SUM_S:
                size, tokens = self._others()
                self._sum = (now, size, tokens)
            return self._mine[0] + size, self._mine[1] + tokens

    def others(self) -> int:
        """How many other slots are somebody's: processes of the machine that use the store."""
        with self._lock:
            return len(self._living())

    def renew(self) -> None:
        """Have a slot, if there is one to be had; every few seconds, for the file may be lost."""
        with self._lock:
            if self._closed or (self._words is not None and self._stands()):
                return
            self._release()
            try:
                self._join()
            except (_DamagedError, OSError, ValueError) as error:
                self._release()
                if not self._warned:
                    self._warned = True
                    logger.warning("This process counts only its own reads: %s", error)
            else:
                self._warned = False

    def close(self) -> None:
        """Give the slot back."""
        with self._lock:
            self._closed = True
            self._own = None
            if self._words is not None:
                self._words[self._slot] = 0
                byte_locks.give_back(self._fd, _at(self._slot))
            self._release()

    # -- with the lock held -----------------------------------------------------------------

    def _join(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.pread(self._fd, _HEAD.size, 0) != _RIGHT or os.fstat(self._fd).st_size != FILE_BYTES:
            self._make()
        self._map = mmap.mmap(self._fd, FILE_BYTES)
        count = SLOTS * _WORDS
        words = np.frombuffer(self._map, np.int64, count, _HEAD_BYTES).reshape(SLOTS, _WORDS)
        for slot in range(SLOTS):
            if byte_locks.take(self._fd, _at(slot)):
                self._slot = slot
                begin = _at(slot)
                own = memoryview(self._map)[begin : begin + 8 * _WORDS].cast("q")
                self._words, self._own = words, own
                mine = None
                while mine is not self._mine:  # it may change meanwhile
                    mine = self._mine
                    own[0], own[1] = mine
                own[2] = 1
                return
        raise _DamagedError(f"all {SLOTS} slots of {self._path} are taken")

    def _make(self) -> None:
        """Fill a new file; every byte of it is allocated, for a mapped hole may find no room."""
        with file_lock(self._path.with_name("queue.lock"), _MAKE_S) as held:
            size, head = os.fstat(self._fd).st_size, os.pread(self._fd, _HEAD.size, 0)
            begun = size == FILE_BYTES and not any(head)  # whoever made it was killed
            if held and (size == 0 or begun):
                os.posix_fallocate(self._fd, 0, FILE_BYTES)
                os.pwrite(self._fd, _RIGHT, 0)
            elif size != FILE_BYTES or head != _RIGHT:
                raise _DamagedError(f"{self._path} is no read queue of this version; remove it")

    def _stands(self) -> bool:
        """Whether others still see the file."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        except OSError:
            return False

    def _living(self) -> list[int]:
        """Slots of others; what dead ones left is wiped."""
        words = self._words
        if words is None:
            return []
        living = []
        with contextlib.suppress(OSError):
            for slot in np.flatnonzero(words[:, 2]).tolist():
                if slot == self._slot:
                    continue
                if byte_locks.taken(self._fd, _at(slot)):
                    living.append(slot)
                elif byte_locks.take(self._fd, _at(slot)):  # lest it is somebody's again by now
                    words[slot] = 0
                    byte_locks.give_back(self._fd, _at(slot))
        return living

    def _others(self) -> tuple[int, int]:
        living = self._living()
        if self._words is None or not living:
            return 0, 0
        size, tokens = self._words[living, :2].clip(min=0).sum(axis=0).tolist()
        return size, tokens

    def _release(self) -> None:
        self._words = self._own = None
        self._slot = -1
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # a sum is under way: it goes with the garbage
                mapped.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _leave(self) -> None:
        """In a forked child: the slot is the parent's."""
        self._lock = threading.Lock()  # whoever held it is not here
        self._closed = True
        self._release()


def _at(slot: int) -> int:
    """The byte whose lock is the slot's."""
    return _HEAD_BYTES + 8 * _WORDS * slot
