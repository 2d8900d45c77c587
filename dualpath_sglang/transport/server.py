"""Serving Layer Blocks to peers over TCP.

A connection has one thread that receives, and one for each fetch that is answered. Those send
piece by piece, so that a short fetch does not wait for a long one. A fetch whose turn does not come
by its deadline ends; a peer that takes nothing for a while is given up with all of its fetches.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

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
from dualpath_sglang.transport.socket_io import SocketIo, shut_down, tune
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_BODY_S = 10.0
_END_S = 2.0
_POLL_S = 0.2
_FOREVER = float("inf")
_MOST_S = 600.0
"""Nobody's fetch lasts longer."""


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
        self._refusals = Notices(logger)
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

    def drain(self, timeout_s: float) -> bool:
        """Take on nothing more and let what is under way end; whether it has."""
        self._draining.set()
        end = time.monotonic() + timeout_s
        while any(client.busy for client in self._clients()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def change_secret(self, secret: bytes) -> None:
        """Let in only who knows this one from now on; who is in stays."""
        self._options = replace(self._options, secret=secret)

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
                self.count("refused")
                self._notices.warn("Too many connections: %s is sent away", peer[0])
                continue
            client = _Client(self, sock, str(peer[0]))
            with self._lock:
                self._open.add(client)
            try:
                client.start()
            except RuntimeError as error:  # no more threads for now
                self.gone(client)
                sock.close()
                self._notices.warn("A connection cannot be served: %s", error)

    # -- for its clients --------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether all connections are to end."""
        return self._closed.is_set()

    def tune(self, sock: socket.socket) -> socket.socket:
        """The socket to go on with: wrapped for TLS, the handshake still to be done."""
        tune(sock, self._options.dscp)
        if self._options.tls is None:
            return sock
        return self._options.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def admit(self, sock: socket.socket) -> SocketIo:
        """A connection whose other end is trusted.

        Raises:
            RefusedError, PeerLostError, OSError: it is not.
        """
        deadline = time.monotonic() + _HANDSHAKE_S
        io = SocketIo(sock)
        io.agree_on_tls(deadline)
        admit(io, self._options.secret, deadline)
        self.count("connections")
        return io

    def refused(self, name: str, error: Exception) -> None:
        """A connection was not let in."""
        self.count("refused")
        self._refusals.warn("A connection from %s is refused: %s", name, error)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to :attr:`counts`."""
        with self._lock:
            self.counts[name] += amount

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
        shut_down(self._sock)

    def _run(self) -> None:
        try:
            self._sock = self._server.tune(self._sock)
            if self._server.closed:  # it may have shut the socket before that
                return
            self._io = self._server.admit(self._sock)
        except (RefusedError, PeerLostError, OSError) as error:
            self._server.refused(self._name, error)
            return
        finally:
            if self._io is None:
                self._sock.close()
                self._server.gone(self)
        try:
            self._receive(self._io)
        except PeerLostError as error:
            logger.debug("The connection from %s ended: %s", self._name, error)
        except Exception:
            logger.exception("The connection from %s failed", self._name)
        finally:
            self._end(self._io)

    def _end(self, io: SocketIo) -> None:
        try:
            with self._lock:
                answers = list(self._answers.values())
            io.shut()
            for answer in answers:
                answer.cancel()
            for answer in answers:
                answer.join()
        finally:
            io.close()
            self._server.gone(self)

    def _receive(self, io: SocketIo) -> None:
        while not self._server.closed:
            io.readable(_FOREVER)
            head = Head.unpack(io.receive(HEAD_BYTES, time.monotonic() + _BODY_S))
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
            try:
                answer.start()
            except RuntimeError:  # no more threads for now
                self.ended(head.request, End.BUSY)

    # -- for its answers --------------------------------------------------------------------

    def begin(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        return self._server.begin(request, len(self._answers))

    def send(self, head: Head, buffers: list[bytes | memoryview], begin_by: float) -> None:
        assert self._io is not None
        try:
            self._io.send([head.pack(), *buffers], begin_by)
        except PeerLostError:
            self._io.shut()  # half a frame may have gone
            raise

    def ended(self, number: int, end: End) -> None:
        """Say how a fetch ended, and then forget it: until it has heard, it counts."""
        try:
            self._server.count(end.name.lower())
            body = self._server.end_body()
            head = Head(Kind.END, number, layer=end.value, length=len(body))
            self.send(head, [body], time.monotonic() + _END_S)
        except (TimeoutError, PeerLostError):
            self.shut()  # it would wait for an end that does not come
        finally:
            with self._lock:
                del self._answers[number]

    def sent(self, size: int) -> None:
        self._server.count("bytes", size)


class _Answer:
    """The answer to one fetch, in a thread of its own."""

    def __init__(self, client: _Client, number: int, request: FetchRequest) -> None:
        self._client = client
        self._number = number
        self._request = request
        self._deadline = time.monotonic() + min(request.timeout_s, _MOST_S)
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
        if self._cancelled.is_set():
            return End.CANCELLED
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
        span = part.span
        front = frames.data_front(span, part.checksums)
        size = sum(len(buffer) for buffer in part.buffers)
        head = Head(Kind.DATA, self._number, span.first_layer, span.first, len(front) + size)
        self._client.send(head, [front, *part.buffers], self._deadline)
        self._client.sent(size)
