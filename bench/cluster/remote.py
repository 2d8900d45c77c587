"""A storage backend whose segment data comes from a :mod:`.block_server` over the network.

Metadata (names, sizes, locks) is that of a directory which all hosts see, as with a mounted file
system whose data path is another one.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.cluster.block_server import ANSWER, HEAD, MOST_BYTES, READ, WRITE, receive, tune
from dualpath_storage.backends import PosixBackend, SegmentFile

_MOST_BUFFERS = 512
_UNAVAILABLE = errno.EHOSTUNREACH
"""What says nothing about a block, unlike an error of a device."""


class Link:
    """A few connections to a block server. Thread-safe.

    Args:
        address: host and port.
        connections: at a time; who finds all in use waits.
        timeout_s: of each request, the wait for a connection included.
        window_bytes: that may be on the way on each connection. No more than a shaped link's queue
            holds should be on all of them: what it drops is sent again, and takes time that no
            storage network would.
    """

    def __init__(
        self,
        address: tuple[str, int],
        connections: int = 4,
        timeout_s: float = 10.0,
        window_bytes: int = 32 << 10,
    ) -> None:
        self.address = address
        self._window_bytes = window_bytes
        self.read_bytes = 0
        """That have come, whatever they were asked for."""
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers from a file; bytes that there were.

        Raises:
            OSError: the server's error, or it does not answer.
        """
        size = sum(len(buffer) for buffer in buffers)
        deadline = time.monotonic() + self._timeout_s
        with self._connection(deadline) as sock:
            _send(sock, [HEAD.pack(READ, name.encode(), offset, size)], deadline)
            got = _answer(sock, size, deadline)
            _receive_all(sock, buffers, got, deadline)
        with self._lock:
            self.read_bytes += got
        return got

    def write(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Write buffers into a file; bytes written.

        Raises:
            OSError: as :meth:`read`.
        """
        size = sum(len(buffer) for buffer in buffers)
        deadline = time.monotonic() + self._timeout_s
        with self._connection(deadline) as sock:
            _send(sock, [HEAD.pack(WRITE, name.encode(), offset, size), *buffers], deadline)
            return _answer(sock, size, deadline)

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[socket.socket]:
        """One that is used again unless something goes wrong in the middle of it."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OSError(errno.ETIMEDOUT, "no connection to the block server became free")
        try:
            with self._lock:
                sock = self._idle.pop() if self._idle else None
            if sock is None:
                sock = self._connect(deadline)
            try:
                yield sock
            except ServerError:
                self._keep(sock)
                raise
            except BaseException:
                sock.close()
                raise
            self._keep(sock)
        except ServerError as error:
            raise OSError(error.errno, error.strerror) from None
        except (TimeoutError, BlockingIOError) as error:
            raise OSError(errno.ETIMEDOUT, f"the block server is late: {error}") from error
        except ConnectionError as error:
            raise OSError(_UNAVAILABLE, f"the block server is away: {error}") from error
        finally:
            self._free.release()

    def _connect(self, deadline: float) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._window_bytes)
            sock.settimeout(max(0.001, _left(deadline)))
            sock.connect(self.address)
            tune(sock, self._timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            self._idle.append(sock)

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()


class ServerError(Exception):
    """The server's own error; the connection is as it was."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.errno = number
        self.strerror = "the block server said so"


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("its deadline has passed")
    return left_s


def _send(sock: socket.socket, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
    for first in range(0, len(buffers), _MOST_BUFFERS):
        left = [memoryview(buffer).cast("B") for buffer in buffers[first : first + _MOST_BUFFERS]]
        while left:
            _left(deadline)
            count = sock.sendmsg(left)
            left = _after(left, count)


def _answer(sock: socket.socket, most: int, deadline: float) -> int:
    _left(deadline)
    number, size = ANSWER.unpack(receive(sock, memoryview(bytearray(ANSWER.size))))
    if number:
        raise ServerError(number)
    if size > most:
        raise ConnectionError("it sent more than was asked for")
    return int(size)


def _receive_all(
    sock: socket.socket, buffers: Sequence[memoryview], size: int, deadline: float
) -> None:
    left = list(buffers)
    while size:
        _left(deadline)
        if len(left) == 1 or len(left[0]) >= size:
            count = sock.recv_into(left[0][:size], 0, socket.MSG_WAITALL)
        else:
            chosen = _first(left[:_MOST_BUFFERS], size)
            count = sock.recvmsg_into(chosen, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        size -= count
        left = _after(left, count)


def _first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """As many as hold so many bytes: the next answer's bytes must stay in the socket."""
    chosen = []
    for buffer in buffers:
        if size <= 0:
            break
        chosen.append(buffer[:size])
        size -= len(buffer)
    return chosen


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of them."""
    i = 0
    while i < len(buffers) and done >= len(buffers[i]):
        done -= len(buffers[i])
        i += 1
    return [buffers[i][done:], *buffers[i + 1 :]] if done else buffers[i:]


class RemoteFile:
    """See :class:`~dualpath_storage.backends.SegmentFile`.

    Args:
        file: the metadata, and the lock.
        name: path below the root.
    """

    def __init__(self, link: Link, file: SegmentFile, name: str) -> None:
        self._link = link
        self._file = file
        self._name = name

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def linked(self) -> bool:
        return self._file.linked

    @property
    def whole(self) -> bool:
        return self._file.whole

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        assert sum(len(buffer) for buffer in buffers) <= MOST_BYTES
        return self._link.read(self._name, offset, buffers)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        assert sum(len(buffer) for buffer in buffers) <= MOST_BYTES
        return self._link.write(self._name, offset, buffers)

    def sync(self) -> None:
        self._file.sync()

    def unlock(self) -> None:
        self._file.unlock()

    def discard(self) -> None:
        self._file.discard()

    def close(self) -> None:
        self._file.close()


class RemoteBackend:
    """See :class:`~dualpath_storage.backends.Backend`.

    Args:
        root: of the store, as this host sees it; on the storage host it is the same directory.
        link: to the block server.
    """

    name = "remote"
    alignment = 1

    def __init__(self, root: Path, link: Link) -> None:
        self._root = root
        self._link = link
        self._inner = PosixBackend(root, "off", writable=False)

    def create(self, path: Path, size: int) -> RemoteFile | None:
        file = self._inner.create(path, size)
        return None if file is None else self._remote(path, file)

    def lock(self, path: Path) -> RemoteFile | None:
        file = self._inner.lock(path)
        return None if file is None else self._remote(path, file)

    def open(self, path: Path) -> RemoteFile:
        return self._remote(path, self._inner.open(path))

    def _remote(self, path: Path, file: SegmentFile) -> RemoteFile:
        return RemoteFile(self._link, file, str(path.relative_to(self._root)))
