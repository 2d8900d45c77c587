"""Ends of a connection that send what they like."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import FetchRequest, Span
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.server import Server
from tests.transport.peers import LAYER_BYTES

HELLO = struct.Struct("!8sH16s")


class RawPeer:
    """A server that greets, and then does what it is told.

    Args:
        proof: what it sends for its proof; whoever calls is let in.
    """

    def __init__(self, proof: bytes = bytes(32), version: int = VERSION) -> None:
        self._proof = proof
        self._version = version
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sock = socket.socket()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._greet, daemon=True)
        self._thread.start()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            self.sock, _ = self._listener.accept()
            self.sock.recv(HELLO.size, socket.MSG_WAITALL)
            wants = b"\1" if any(self._proof) or self._proof == b"" else b"\0"
            self.sock.sendall(HELLO.pack(b"DUALPATH", self._version, bytes(16)))
            self.sock.sendall(b"\1" if self._secret else wants)
            self.sock.recv(32, socket.MSG_WAITALL)
            self.sock.sendall(b"\1" + self._proof)
            self._ready.set()

    _secret = False

    def connected(self, secret: bytes = b"") -> Connection:
        self._secret = bool(secret)
        address = PeerAddress("127.0.0.1", self.port, secret)
        connection = Connection(address, time.monotonic() + 5.0)
        assert self._ready.wait(5.0)
        return connection

    def send_half_a_piece(self, number: int) -> None:
        front = frames.data_front(Span(0, 1, 0, 2), [1, 2])
        head = Head(Kind.DATA, number, 0, 0, len(front) + 2 * LAYER_BYTES)
        self.sock.sendall(head.pack() + front + bytes(LAYER_BYTES))

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self._listener.close()


class RawClient:
    """A client that is let in, or not."""

    def __init__(self, server: Server, version: int = VERSION) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), 5.0)
        self.sock.sendall(HELLO.pack(b"DUALPATH", version, bytes(16)))
        self.sock.recv(HELLO.size + 1, socket.MSG_WAITALL)
        if version == VERSION:
            self.sock.sendall(bytes(32))
            self.sock.recv(33, socket.MSG_WAITALL)

    def fetch(self, number: int, request: FetchRequest) -> None:
        body = frames.fetch_body(request)
        self.sock.sendall(Head(Kind.FETCH, number, length=len(body)).pack() + body)

    def is_closed(self) -> bool:
        """Whether the server has ended the connection."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
