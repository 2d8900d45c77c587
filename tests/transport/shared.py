"""A source whose blocks lie in a file in memory, and an agent that says what it likes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dualpath_sglang.node.shared_memory import SharedMemory
from dualpath_sglang.transport import local_frames as frames
from dualpath_sglang.transport.base import End, FetchRequest, Missing, Piece, Served
from tests.transport.peers import Blocks

MEMORY_BYTES = 8 << 20


class SharedBlocks(Blocks):
    """As :class:`Blocks`, in a file. Its memory is used for one piece after the other.

    Args:
        reuse_after: pieces, after which their memory holds something else: only once the reader
            has taken them.
    """

    def __init__(self, *args: Any, reuse_after: int = 5, **how: Any) -> None:
        super().__init__(*args, **how)
        self.memory = SharedMemory(MEMORY_BYTES)
        self.reuse_after = reuse_after
        self.reused = 0

    @property
    def shared_file(self) -> tuple[int, int] | None:
        return None if self.memory.fd is None else (self.memory.fd, self.memory.size_bytes)

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        begun = super().serve(request)
        return begun if isinstance(begun, End) else self._sharing(begun)

    @contextlib.contextmanager
    def _sharing(self, begun: contextlib.AbstractContextManager[Served]) -> Iterator[Served]:
        with begun as served:
            answer = _Shared(self, served)
            try:
                yield answer
            finally:
                answer.reuse()


class _Shared:
    def __init__(self, blocks: SharedBlocks, served: Served) -> None:
        self._blocks = blocks
        self._served = served
        self._taken: Callable[[], None] = lambda: None
        self._runs: list[tuple[int, int]] = []

    def hold_until(self, taken: Callable[[], None]) -> None:
        self._taken = taken

    def __iter__(self) -> Iterator[Piece | Missing]:
        for part in self._served:
            if isinstance(part, Piece):
                yield self._shared(part)
                if len(self._runs) >= self._blocks.reuse_after:
                    self._taken()
                    self.reuse()
            else:
                yield part
        self._taken()

    def _shared(self, piece: Piece) -> Piece:
        (data,) = piece.buffers
        memory = self._blocks.memory
        with self._blocks.lock:
            offset = memory.take(len(data))
        assert offset is not None
        memory.bytes[offset : offset + len(data)] = data
        self._runs.append((offset, len(data)))
        view = memory.bytes[offset : offset + len(data)]
        return Piece(piece.span, piece.checksums, [view], [offset])

    def reuse(self) -> None:
        memory = self._blocks.memory
        for offset, size in self._runs:
            memory.bytes[offset : offset + size] = b"\xee" * size
            with self._blocks.lock:
                memory.give(offset, size)
            self._blocks.reused += 1
        self._runs.clear()

    def cancel(self) -> None:
        self._served.cancel()


class RawAgent:
    """Passes on a file, sealed or not, and then sends what it is told."""

    def __init__(
        self, path: Path, *, size: int = 1 << 20, says: int | None = None, seals: bool = True
    ) -> None:
        self.fd: int | None = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.hello = frames.HELLO.pack(frames.MAGIC, frames.VERSION, says or size)
        self.sock = socket.socket()
        self.ready = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._greet, daemon=True)

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            self.sock, _ = self._listener.accept()
            fds = [] if self.fd is None else [self.fd]
            socket.send_fds(self.sock, [self.hello], fds)
            self.ready.set()

    def __enter__(self) -> RawAgent:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self._listener.close()
        self._thread.join()
        if self.fd is not None:
            os.close(self.fd)
