"""Ends of a connection that send what they like."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.handshake import VERSION, admit, greet
from dualpath_sglang.transport.seal import Seal, Seals
from dualpath_sglang.transport.server import Server
from dualpath_sglang.transport.socket_io import SocketIo
from tests.transport.peers import LAYER_BYTES

HELLO = struct.Struct("!8sH16s")


def frame(
    seal: Seal,
    kind: Kind,
    number: int,
    content: bytes = b"",
    payload: bytes = b"",
    *,
    layer: int = 0,
    block: int = 0,
) -> bytes:
    """A whole frame as it is sent, with the seal whose turn it is."""
    length = len(content) + seal.size + len(payload)
    front = Head(kind, number, layer, block, length).pack() + content
    sealed = front + seal.over(front) + payload
    seal.passed()
    return sealed


def piece(
    seal: Seal, number: int, layer: int, block: int, data: bytes, checksum: int, count: int = 1
) -> bytes:
    """A DATA frame of neighbouring blocks' layer, all with one checksum."""
    content = frames.data_front(Span(layer, layer + 1, block, count), [checksum] * count)
    return frame(seal, Kind.DATA, number, content, data, layer=layer, block=block)


def end(seal: Seal, number: int, how: End = End.OK) -> bytes:
    return frame(seal, Kind.END, number, frames.load_body(Load()), layer=how.value)


class RawPeer:
    """A server that greets, and then does what it is told.

    Args:
        secret: what it proves to know.
        proof: what it sends for its proof instead; whoever calls is let in.
        claims: that it wants a proof.
    """

    def __init__(
        self,
        secret: bytes = b"",
        *,
        proof: bytes | None = None,
        claims: bool = False,
        version: int = VERSION,
    ) -> None:
        self._secret = secret
        self._proof = proof
        self._claims = claims
        self._version = version
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sock = socket.socket()
        self.seals = Seals.plain()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._greet, daemon=True)
        self._thread.start()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            self.sock, _ = self._listener.accept()
            if self._proof is None and self._version == VERSION:
                self.seals = admit(SocketIo(self.sock), self._secret, time.monotonic() + 5.0)
                self.sock.setblocking(True)
            else:
                self.sock.recv(HELLO.size, socket.MSG_WAITALL)
                self.sock.sendall(HELLO.pack(b"DUALPATH", self._version, bytes(16)))
                self.sock.sendall(bytes([self._claims]))
                self.sock.recv(32, socket.MSG_WAITALL)
                self.sock.sendall(b"\1" + (self._proof or bytes(32)))
            self._ready.set()

    @property
    def seal(self) -> Seal:
        """Of what it sends."""
        return self.seals.sent

    def connected(self, secret: bytes = b"") -> Connection:
        address = PeerAddress("127.0.0.1", self.port, secret)
        connection = Connection(address, time.monotonic() + 5.0)
        assert self._ready.wait(5.0)
        return connection

    def send_half_a_piece(self, number: int) -> None:
        whole = piece(self.seal, number, 0, 0, bytes(2 * LAYER_BYTES), 1, count=2)
        self.sock.sendall(whole[:-LAYER_BYTES])

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self._listener.close()


class RawClient:
    """A client that is let in, or not.

    Args:
        receive_bytes: of its receive buffer.
    """

    def __init__(
        self,
        server: Server | int,
        version: int = VERSION,
        secret: bytes = b"",
        receive_bytes: int | None = None,
    ) -> None:
        port = server if isinstance(server, int) else server.port
        self.sock = socket.socket()
        self.sock.settimeout(5.0)
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.connect(("127.0.0.1", port))
        self.seals = Seals.plain()
        if version == VERSION:
            self.seals = greet(SocketIo(self.sock), secret, time.monotonic() + 5.0)
            self.sock.settimeout(5.0)
        else:
            self.sock.sendall(HELLO.pack(b"DUALPATH", version, bytes(16)))
            self.sock.recv(HELLO.size + 1, socket.MSG_WAITALL)

    def fetch(self, number: int, request: FetchRequest) -> None:
        content = frames.fetch_body(request)
        self.sock.sendall(frame(self.seals.sent, Kind.FETCH, number, content))

    def heads(self, pause_s: float = 0.0, step: int = 1 << 18) -> Iterator[Head]:
        """Of the frames that come, read at one's leisure; ends with the connection."""
        left = b""
        while more := self.sock.recv(step):
            left += more
            while len(left) >= frames.HEAD_BYTES:
                head = Head.unpack(left[: frames.HEAD_BYTES])
                if len(left) < frames.HEAD_BYTES + head.length:
                    break
                left = left[frames.HEAD_BYTES + head.length :]
                yield head
            time.sleep(pause_s)

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
