"""Somebody between two nodes, who passes their handshake on and then does what he likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from dualpath_sglang.transport.frames import HEAD_BYTES, Head
from tests.transport.raw import HELLO

Tamper = Callable[[int, Head, bytes], Sequence[bytes]]
"""What goes on instead of a frame, which is the n-th of its direction."""


def pass_on(number: int, head: Head, frame: bytes) -> Sequence[bytes]:
    del number, head
    return [frame]


class Relay:
    """In front of a server.

    Args:
        target: its port.
        up, down: what becomes of the client's frames, and of the server's.
    """

    def __init__(self, target: int, up: Tamper = pass_on, down: Tamper = pass_on) -> None:
        self._target = target
        self._tampers = (up, down)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard = bytearray()
        """What the client sent in the handshake."""
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [client, server]
            for source, sink, size in (
                (client, server, HELLO.size),
                (server, client, HELLO.size + 1),
                (client, server, 32),
                (server, client, 33),
            ):
                data = source.recv(size, socket.MSG_WAITALL)
                sink.sendall(data)
                if source is client:
                    self.heard += data
            for ends, tamper in zip(
                ((client, server), (server, client)), self._tampers, strict=True
            ):
                thread = threading.Thread(target=self._pump, args=(*ends, tamper), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, tamper: Tamper) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while head := source.recv(HEAD_BYTES, socket.MSG_WAITALL):
                parsed = Head.unpack(head)
                frame = head + source.recv(parsed.length, socket.MSG_WAITALL)
                for data in tamper(number, parsed, frame):
                    sink.sendall(data)
                number += 1
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._ends:
            sock.close()
