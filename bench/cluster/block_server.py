"""The storage host: ranges of segment files over TCP, for hosts that have only their metadata.

A request is a fixed head (what, which file, offset, bytes) and, to write, the bytes; the answer is
an error number, a count, and, to read, the bytes: fewer than asked for only at the end of the file.
Many requests may follow each other on a connection. Nobody is authenticated: it is for a network
of namespaces that only the bench is in.

``python -m bench.cluster.block_server ROOT HOST PORT`` prints the port when it listens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import sys
import threading
from pathlib import Path

HEAD = struct.Struct("<B64sQQ")
"""Operation, path below the root (padded with zeros), offset, bytes."""
ANSWER = struct.Struct("<iQ")
"""Error number or 0, bytes."""
READ, WRITE = 1, 2
MOST_BYTES = 64 << 20
"""Of one request."""
SOCKET_BYTES = 1 << 20
_IDLE_S = 600.0
_STEP_BYTES = 1 << 20
_PATH = re.compile(r"[0-9a-f]{32}/seg-[0-9a-f]{8}")


class BlockServer:
    """Serves until it is closed.

    Args:
        root: of the store.
        host, port: where to listen; 0 for any free port.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self._root = root
        self._listener = socket.create_server((host, port), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._listen, name="blocks-listen", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._open.add(sock)
            threading.Thread(target=self._run, args=(sock,), name="blocks", daemon=True).start()

    def _run(self, sock: socket.socket) -> None:
        files: dict[str, int] = {}
        try:
            with sock, contextlib.suppress(OSError):
                tune(sock, _IDLE_S)
                step = memoryview(bytearray(_STEP_BYTES))
                while True:
                    head = bytes(receive(sock, memoryview(bytearray(HEAD.size))))
                    self._answer(sock, head, files, step)
        finally:
            for fd in files.values():
                os.close(fd)
            with self._lock:
                self._open.discard(sock)

    def _answer(
        self, sock: socket.socket, head: bytes, files: dict[str, int], step: memoryview
    ) -> None:
        what, name, offset, size = HEAD.unpack(head)
        if what not in (READ, WRITE) or size > MOST_BYTES:
            raise ConnectionError("that is no request")
        try:
            fd = self._file(name.rstrip(b"\0").decode("ascii", "replace"), files)
            if what == READ:
                size = max(0, min(size, os.fstat(fd).st_size - offset))
        except OSError as error:
            if what == WRITE:
                _drain(sock, size, step)
            sock.sendall(ANSWER.pack(error.errno or errno.EINVAL, 0))
            return
        if what == READ:
            sock.sendall(ANSWER.pack(0, size), socket.MSG_MORE if size else 0)
            _send_file(sock, fd, offset, size)
        else:
            _receive_file(sock, fd, offset, size, step)

    def _file(self, name: str, files: dict[str, int]) -> int:
        if not _PATH.fullmatch(name):
            raise OSError(errno.EINVAL, "that is no segment")
        if (fd := files.get(name)) is not None:
            if os.fstat(fd).st_nlink:
                return fd
            os.close(files.pop(name))
        files[name] = fd = os.open(self._root / name, os.O_RDWR | os.O_CLOEXEC)
        return fd

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            self._closed = True
            sockets = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def tune(sock: socket.socket, timeout_s: float) -> None:
    """As both ends want it: blocking, and each call of the system ends by then.

    The kernel's own timeouts let a call wait for all that it was asked for, in one piece.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    seconds = int(timeout_s)
    patience = struct.pack("ll", seconds, int(1e6 * (timeout_s - seconds)))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, patience)


def receive(sock: socket.socket, view: memoryview) -> memoryview:
    """Fill a buffer.

    Raises:
        OSError: the connection ended; BlockingIOError when nothing came for too long.
    """
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        done += count
    return view


def _send_file(sock: socket.socket, fd: int, offset: int, size: int) -> None:
    """From the page cache, without a copy."""
    end = offset + size
    while offset < end:
        sent = os.sendfile(sock.fileno(), fd, offset, end - offset)
        if sent == 0:
            raise ConnectionError("the file became shorter")
        offset += sent


def _receive_file(sock: socket.socket, fd: int, offset: int, size: int, step: memoryview) -> None:
    done, failed = 0, 0
    while done < size:
        part = receive(sock, step[: min(size - done, len(step))])
        if not failed:
            try:
                _write(fd, part, offset + done)
            except OSError as error:
                failed = error.errno or errno.EIO
        done += len(part)
    sock.sendall(ANSWER.pack(failed, 0 if failed else size))


def _write(fd: int, part: memoryview, offset: int) -> None:
    while part:
        count = os.pwrite(fd, part, offset)
        part, offset = part[count:], offset + count


def _drain(sock: socket.socket, size: int, step: memoryview) -> None:
    while size:
        size -= len(receive(sock, step[: min(size, len(step))]))


def main() -> None:
    """Serve until stdin ends: with the process that started it."""
    root, host, port = sys.argv[1:]
    server = BlockServer(Path(root), host, int(port))
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
