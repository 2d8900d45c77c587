"""A storage backend that calls back before every read, and its use: a limit in bytes a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dualpath_storage.backends import Backend, PosixBackend

OnRead = Callable[[Path, int, int], None]
"""File, offset and bytes of a read that is about to be made. May block, may raise OSError."""


class HookedBackend:
    """A backend through which every read of a segment is seen first.

    Args:
        inner: does the work; by default files of ``directory`` without direct I/O.
    """

    def __init__(self, directory: Path, on_read: OnRead, inner: Backend | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._inner = inner or PosixBackend(directory, "off", writable=True)
        self.on_read = on_read
        self.name = self._inner.name
        self.alignment = self._inner.alignment

    def create(self, path: Path, size: int) -> Any:
        return self._hooked(path, self._inner.create(path, size))

    def lock(self, path: Path) -> Any:
        return self._hooked(path, self._inner.lock(path))

    def open(self, path: Path) -> Any:
        return self._hooked(path, self._inner.open(path))

    def _hooked(self, path: Path, file: Any) -> Any:
        return None if file is None else _HookedFile(self, path, file)


class _HookedFile:
    def __init__(self, backend: HookedBackend, path: Path, file: Any) -> None:
        self._backend = backend
        self._path = path
        self._file = file

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._backend.on_read(self._path, offset, sum(len(buffer) for buffer in buffers))
        return int(self._file.read(buffers, offset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_GRACE_S = 0.05


class Throttle:
    """Lets bytes pass at a rate, whoever asks, first come first served.

    Readers that a busy machine wakes up a little late lose nothing of the rate, as they would not
    on a device with a queue of its own; what nobody asked for is not saved up.

    Args:
        bytes_per_s: may be changed at any time; 0 lets everything pass.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def __call__(self, path: Path, offset: int, size: int) -> None:
        del path, offset
        if not self.bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            begin = self._free_at if now - self._free_at < _GRACE_S else now
            self._free_at = begin + size / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))
