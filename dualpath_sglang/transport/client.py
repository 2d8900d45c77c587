"""Fetching Layer Blocks from a peer over TCP: many fetches on one connection.

One thread receives, straight into the destinations. A fetch that is given up never has its memory
written to afterwards: whoever gives it up waits for the piece that is under way, and ends the
connection when that takes too long.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import (
    Destination,
    End,
    Fetching,
    FetchRequest,
    Load,
    PeerLostError,
    TransportError,
)
from dualpath_sglang.transport.frames import DATA_HEAD, HEAD_BYTES, Head, Kind
from dualpath_sglang.transport.handshake import greet
from dualpath_sglang.transport.socket_io import SocketIo, tune

logger = logging.getLogger(__name__)

_SEND_S = 2.0
_PIECE_S = 10.0
"""A piece that has begun comes within this time, or the connection is given up."""
_GRACE_S = 0.5
_SCRATCH_BYTES = 1 << 16
_MOST_GONE = 1024
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and how to be let in.

    Args:
        secret: shared by all nodes; empty for none.
        tls: encrypts, when given.
        dscp: traffic class of what is sent.
    """

    host: str
    port: int
    secret: bytes = field(default=b"", repr=False)
    tls: ssl.SSLContext | None = None
    dscp: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True, eq=False)
class Fetch:
    """One request on its way. Made by :meth:`Connection.fetch`."""

    request: FetchRequest
    destination: Destination
    told: Fetching
    number: int
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; whether it has."""
        return self.done.wait(timeout_s)


class Connection:
    """A connection to a peer. Thread-safe.

    Args:
        deadline: monotonic seconds until which it must stand.

    Raises:
        RefusedError: the two do not fit together; to try again is of no use.
        PeerLostError: it cannot be reached, or does not answer in time.
    """

    def __init__(self, address: PeerAddress, deadline: float) -> None:
        self.address = address
        self._io = SocketIo(_dial(address, deadline))
        try:
            greet(self._io, address.secret, deadline)
        except BaseException:
            self._io.close()
            raise
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._piece_over = threading.Condition(self._lock)
        self._fetches: dict[int, Fetch] = {}
        self._gone: dict[int, Fetch] = {}
        self._receiving: Fetch | None = None
        self._number = 0
        self._lost: str | None = None
        self.load: Load | None = None
        """The peer's read queue, as it said last."""
        self._thread = threading.Thread(
            target=self._receive, name=f"dualpath-fetch-{address}", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the connection ended; None while it stands."""
        return self._lost

    def fetch(self, request: FetchRequest, destination: Destination, told: Fetching) -> Fetch:
        """Ask for Layer Blocks; returns at once.

        Args:
            told: called from the connection's thread; its ``ended`` is called in any case, but
                when this raises.

        Raises:
            ValueError: the destination does not hold what is asked for.
            PeerLostError: the connection has ended.
        """
        destination.check(len(request.keys), request.end_layer - request.first_layer)
        with self._lock:
            if self._lost is not None:
                raise PeerLostError(self._lost)
            self._number = (self._number + 1) & 0xFFFFFFFF
            deadline = time.monotonic() + request.timeout_s
            fetch = Fetch(request, destination, told, self._number, deadline)
            self._fetches[fetch.number] = fetch
        body = frames.fetch_body(request)
        self._send(Head(Kind.FETCH, fetch.number, length=len(body)), body, deadline)
        return fetch

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards."""
        with self._lock:
            if self._fetches.pop(fetch.number, None) is None:
                return
            self._gone[fetch.number] = fetch
            while len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]
            if threading.current_thread() is not self._thread:
                self._wait_for_piece(fetch)
        self._send(Head(Kind.CANCEL, fetch.number), b"", time.monotonic() + _SEND_S)
        self._tell_end(fetch, end, None)

    def _wait_for_piece(self, fetch: Fetch) -> None:
        """With the lock held."""
        if not self._piece_over.wait_for(lambda: self._receiving is not fetch, _GRACE_S):
            self._io.shut()
            self._piece_over.wait_for(lambda: self._receiving is not fetch)

    def close(self) -> None:
        """End the connection and every fetch on it."""
        self._io.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- sending ----------------------------------------------------------------------------

    def _send(self, head: Head, body: bytes, deadline: float) -> None:
        """A failure ends the connection, and so the fetch: nobody else need be told."""
        deadline = min(deadline, time.monotonic() + _SEND_S)
        try:
            with self._sending:
                self._io.send([head.pack(), body], deadline)
        except PeerLostError:
            self._io.shut()

    # -- receiving --------------------------------------------------------------------------

    def _receive(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                head = Head.unpack(self._io.receive(HEAD_BYTES, _FOREVER))
                self._take(head, time.monotonic() + _PIECE_S)
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.address)
            why = f"receiving failed: {error}"
        with self._lock:
            self._lost = f"{self.address}: {why}"
            left = list(self._fetches.values())
            self._fetches.clear()
            self._receiving = None
            self._piece_over.notify_all()
        self._io.close()
        for fetch in left:
            self._tell_end(fetch, End.LOST, None)

    def _take(self, head: Head, deadline: float) -> None:
        with self._lock:
            fetch = self._fetches.get(head.request)
            gone = self._gone.get(head.request)
        if head.kind is Kind.DATA:
            self._take_data(head, fetch, gone, deadline)
            return
        if head.kind not in (Kind.MISSING, Kind.END) or (fetch or gone) is None:
            raise PeerLostError("a frame came that answers nothing")
        body = self._io.receive(head.length, deadline)
        if head.kind is Kind.END:
            self._take_end(head, body)
            return
        known = fetch or gone
        assert known is not None
        blocks = frames.parse_missing(body, len(known.request.keys))
        if fetch is not None:
            fetch.told.missing(blocks)

    def _take_end(self, head: Head, body: bytes) -> None:
        end, self.load = frames.parse_end(head, body)
        with self._lock:
            fetch = self._fetches.pop(head.request, None)
            self._gone.pop(head.request, None)
        if fetch is not None:
            self._tell_end(fetch, end, self.load)

    def _take_data(
        self, head: Head, fetch: Fetch | None, gone: Fetch | None, deadline: float
    ) -> None:
        known = fetch or gone
        if known is None:
            raise PeerLostError("a piece came that nobody asked for")
        request, layer_bytes = known.request, known.destination.layer_bytes
        fixed = self._io.receive(DATA_HEAD.size, deadline)
        count = frames.data_count(head, fixed, layer_bytes)
        if not request.first_layer <= head.layer < request.end_layer:
            raise PeerLostError("a layer came that nobody asked for")
        if head.block + count > len(request.keys):
            raise PeerLostError("blocks came that nobody asked for")
        checksums = frames.parse_checksums(fixed, self._io.receive(8 * count, deadline))
        with self._lock:
            if self._fetches.get(head.request) is fetch:
                self._receiving = fetch
        if fetch is None or self._receiving is None:
            self._discard(count * layer_bytes, deadline)
            return
        layer = head.layer - request.first_layer
        try:
            for view in known.destination.views(layer, head.block, count):
                self._io.receive_into(view, deadline)
            if head.request in self._fetches:
                self._tell_landed(fetch, head, checksums)
        finally:
            with self._lock:
                self._receiving = None
                self._piece_over.notify_all()

    def _tell_landed(self, fetch: Fetch, head: Head, checksums: tuple[int, ...]) -> None:
        try:
            fetch.told.landed(head.layer, head.block, checksums)
        except Exception:
            logger.exception("Layer Blocks from %s cannot be used", self.address)
            self.cancel(fetch, End.FAILED)

    def _discard(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._io.receive_into(part, deadline)
            size -= len(part)

    @staticmethod
    def _tell_end(fetch: Fetch, end: End, load: Load | None) -> None:
        try:
            fetch.told.ended(end, load)
        finally:
            fetch.done.set()


def _dial(address: PeerAddress, deadline: float) -> socket.socket:
    left_s = max(0.001, deadline - time.monotonic())
    try:
        sock = socket.create_connection((address.host, address.port), left_s)
    except OSError as error:
        raise PeerLostError(f"{address} cannot be reached: {error}") from error
    try:
        tune(sock, address.dscp)
        if address.tls is None:
            return sock
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return address.tls.wrap_socket(sock, server_hostname=address.host)
    except OSError as error:
        sock.close()
        raise PeerLostError(f"{address} does not speak TLS with us: {error}") from error
