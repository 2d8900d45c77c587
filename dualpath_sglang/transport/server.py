"""Serving Layer Blocks to peers over TCP.

A connection has one thread that receives, and one for each fetch that is answered. Those take
turns piece by piece, so that a short fetch does not wait for a long one. A peer that does not take
what it asked for is given up at its own deadline; nothing is kept for it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Missing,
    PeerLostError,
    Piece,
    RefusedError,
    Served,
    Source,
)
from dualpath_sglang.transport.frames import HEAD_BYTES, Head, Kind
from dualpath_sglang.transport.handshake import admit
from dualpath_sglang.transport.socket_io import SocketIo, tune
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_BODY_S = 10.0
_END_S = 2.0
_POLL_S = 0.2
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to listen.

    Args:
        host, port: where; 0 for any free port.
        secret: what every client must know; empty for none.
        tls: encrypts, when given.
        dscp: traffic class of what is sent.
        most_connections, most_fetches: of the server, and of one connection at a time.
    """

    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""
    tls: ssl.SSLContext | None = None
    dscp: int = 0
    most_connections: int = 256
    most_fetches: int = 64


class Server:
    """Listens until it is closed. Thread-safe.

    Args:
        source: what it serves.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, source: Source, options: ServerOptions | None = None) -> None:
        self._source = source
        self._options = options or ServerOptions()
        self.counts: Counter[str] = Counter()
        """Connections, refused ones, fetches by how they ended, bytes of payload."""
        self._notices = Notices(logger)
        self._lock = threading.Lock()
        self._open: set[_Client] = set()
        self._closed = threading.Event()
        self._draining = threading.Event()
        where = (self._options.host, self._options.port)
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._listener = socket.create_server(where, family=family, backlog=128)
        self._listener.settimeout(_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="dualpath-serve", daemon=True)
        self._thread.start()

    @property
    def most_fetches(self) -> int:
        """That one connection may have at a time; more are told so."""
        return self._options.most_fetches

    @property
    def draining(self) -> bool:
        """Whether new fetches are sent elsewhere."""
        return self._draining.is_set()

    def drain(self, timeout_s: float) -> bool:
        """Take on nothing more and let what is under way end; whether it has."""
        self._draining.set()
        end = time.monotonic() + timeout_s
        while any(client.busy for client in self._clients()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """End every connection at once."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        for client in self._clients():
            client.shut()
        for client in self._clients():
            client.join()

    def _clients(self) -> list[_Client]:
        with self._lock:
            return list(self._open)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._notices.warn("Cannot accept connections: %s", error)
                self._closed.wait(_POLL_S)
                continue
            with self._lock:
                full = len(self._open) >= self._options.most_connections
            if full:
                sock.close()
                self.counts["refused"] += 1
                self._notices.warn("Too many connections: %s is sent away", peer[0])
                continue
            client = _Client(self, sock, str(peer[0]))
            with self._lock:
                self._open.add(client)
            client.start()

    # -- for its clients --------------------------------------------------------------------

    def admit(self, sock: socket.socket, name: str) -> SocketIo | None:
        """A connection whose other end is trusted, or None."""
        deadline = time.monotonic() + _HANDSHAKE_S
        options = self._options
        try:
            tune(sock, options.dscp)
            if options.tls is not None:
                sock.settimeout(_HANDSHAKE_S)
                sock = options.tls.wrap_socket(sock, server_side=True)
            io = SocketIo(sock)
            admit(io, options.secret, deadline)
        except (RefusedError, PeerLostError, OSError) as error:
            self.counts["refused"] += 1
            self._notices.warn("A connection from %s is refused: %s", name, error)
            sock.close()
            return None
        self.counts["connections"] += 1
        return io

    def begin(
        self, request: FetchRequest, under_way: int
    ) -> contextlib.AbstractContextManager[Served] | End:
        """Take a fetch on, or say why not."""
        if self._draining.is_set() or under_way > self._options.most_fetches:
            return End.BUSY
        return self._source.serve(request)

    def end_body(self) -> bytes:
        """What every END says."""
        return frames.end_body(self._source.load())

    def gone(self, client: _Client) -> None:
        """A connection has ended."""
        with self._lock:
            self._open.discard(client)


class _Client:
    """One connection."""

    def __init__(self, server: Server, sock: socket.socket, name: str) -> None:
        self._server = server
        self._sock = sock
        self._name = name
        self._io: SocketIo | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._thread = threading.Thread(target=self._run, name="dualpath-peer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._io is not None:
            self._io.shut()

    def _run(self) -> None:
        try:
            self._io = self._server.admit(self._sock, self._name)
            if self._io is not None:
                self._receive(self._io)
        except PeerLostError as error:
            logger.debug("The connection from %s ended: %s", self._name, error)
        except Exception:
            logger.exception("The connection from %s failed", self._name)
        finally:
            with self._lock:
                answers = list(self._answers.values())
            for answer in answers:
                answer.cancel()
            if self._io is not None:
                self._io.shut()
            for answer in answers:
                answer.join()
            if self._io is not None:
                self._io.close()
            self._server.gone(self)

    def _receive(self, io: SocketIo) -> None:
        while True:
            head = Head.unpack(io.receive(HEAD_BYTES, _FOREVER))
            if head.kind is Kind.CANCEL:
                with self._lock:
                    cancelled = self._answers.get(head.request)
                if cancelled is not None:
                    cancelled.cancel()
                continue
            if head.kind is not Kind.FETCH:
                raise PeerLostError("it sent what only a server sends")
            body = io.receive(head.length, time.monotonic() + _BODY_S)
            request = frames.parse_fetch(body)
            answer = _Answer(self, head.request, request)
            with self._lock:
                if head.request in self._answers:
                    raise PeerLostError("it used a number twice")
                if len(self._answers) >= 2 * self._server.most_fetches:
                    raise PeerLostError("it asks for more without reading how the last ones ended")
                self._answers[head.request] = answer
            answer.start()

    # -- for its answers --------------------------------------------------------------------

    def begin(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        return self._server.begin(request, len(self._answers))

    def send(self, head: Head, buffers: list[bytes | memoryview], deadline: float) -> None:
        assert self._io is not None
        try:
            with self._sending:
                self._io.send([head.pack(), *buffers], deadline)
        except PeerLostError:
            self._io.shut()  # half a frame may have gone
            raise

    def ended(self, number: int, end: End) -> None:
        """Say how a fetch ended, and forget it: its number may come again from now on."""
        with self._lock:
            del self._answers[number]
        self._server.counts[end.name.lower()] += 1
        body = self._server.end_body()
        head = Head(Kind.END, number, layer=end.value, length=len(body))
        with contextlib.suppress(PeerLostError):
            self.send(head, [body], time.monotonic() + _END_S)

    def sent(self, size: int) -> None:
        self._server.counts["bytes"] += size


class _Answer:
    """The answer to one fetch, in a thread of its own."""

    def __init__(self, client: _Client, number: int, request: FetchRequest) -> None:
        self._client = client
        self._number = number
        self._request = request
        self._deadline = time.monotonic() + request.timeout_s
        self._served: Served | None = None
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dualpath-answer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            served = self._served
        if served is not None:
            served.cancel()

    def _run(self) -> None:
        end = End.FAILED
        try:
            end = self._answer()
        except TimeoutError:
            end = End.TIMEOUT
        except PeerLostError:
            end = End.LOST
        except Exception:
            logger.exception("A fetch could not be answered")
        self._client.ended(self._number, End.FAILED if end is End.LOST else end)

    def _answer(self) -> End:
        begun = self._client.begin(self._request)
        if isinstance(begun, End):
            return begun
        with begun as served:
            with self._lock:
                self._served = served
                if self._cancelled.is_set():
                    return End.CANCELLED
            for part in served:
                if self._cancelled.is_set():
                    break
                self._send(part)
        return End.CANCELLED if self._cancelled.is_set() else End.OK

    def _send(self, part: Piece | Missing) -> None:
        if isinstance(part, Missing):
            body = frames.missing_body(part.blocks)
            head = Head(Kind.MISSING, self._number, length=len(body))
            self._client.send(head, [body], self._deadline)
            return
        front = frames.data_front(part.checksums)
        size = sum(len(buffer) for buffer in part.buffers)
        head = Head(Kind.DATA, self._number, part.layer, part.first, len(front) + size)
        self._client.send(head, [front, *part.buffers], self._deadline)
        self._client.sent(size)
