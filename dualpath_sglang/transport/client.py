"""Fetching Layer Blocks from a peer over TCP: many fetches on one connection.

One thread receives, straight into the destinations, each Layer Block once and in order. A fetch
ends at its deadline, or when it is given up; its memory is never written to afterwards: whoever
gives it up waits for the piece that is under way, and ends the connection when that takes too long.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import (
    Destination,
    End,
    Fetching,
    FetchRequest,
    Load,
    PeerLostError,
    Span,
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
_LOOK_EVERY_S = 0.2


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
    _next: array[int] = field(init=False)
    """By block: the layer that comes next; one past the last when nothing more does."""
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.request.keys)
        self._next = array("H", [self.request.first_layer]) * count
        self._left = count * (self.request.end_layer - self.request.first_layer)

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; whether it has."""
        return self.done.wait(timeout_s)

    @property
    def blocks(self) -> int:
        """How many are asked for."""
        return len(self.request.keys)

    @property
    def layer_bytes(self) -> int:
        """Of one Layer Block."""
        return self.destination.layer_bytes

    @property
    def complete(self) -> bool:
        """Whether every Layer Block has come, or was said to be missing."""
        return self._left == 0

    def expect(self, span: Span) -> None:
        """A piece comes now.

        Raises:
            PeerLostError: nobody asked for it, it has come before, or it is not its turn.
        """
        request, end = self.request, span.first + span.count
        if not request.first_layer <= span.first_layer < span.end_layer <= request.end_layer:
            raise PeerLostError("a layer came that nobody asked for")
        if end > len(request.keys):
            raise PeerLostError("blocks came that nobody asked for")
        if self._next[span.first : end] != array("H", [span.first_layer]) * span.count:
            raise PeerLostError("Layer Blocks came twice, or not in their order")
        self._next[span.first : end] = array("H", [span.end_layer]) * span.count
        self._left -= span.layer_blocks

    def lack(self, blocks: Sequence[int]) -> None:
        """Nothing more of these blocks comes.

        Raises:
            PeerLostError: that was known.
        """
        for block in blocks:
            more = self.request.end_layer - self._next[block]
            if more <= 0:
                raise PeerLostError("a block is said to be missing that is not")
            self._left -= more
            self._next[block] = self.request.end_layer


@dataclass(frozen=True, slots=True)
class _Gone:
    """What is still to be known of a fetch that was given up: nothing that holds its memory."""

    blocks: int
    layer_bytes: int


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
            self._io.agree_on_tls(deadline)
            greet(self._io, address.secret, deadline)
        except BaseException:
            self._io.close()
            raise
        self._lock = threading.Lock()
        self._piece_over = threading.Condition(self._lock)
        self._fetches: dict[int, Fetch] = {}
        self._gone: dict[int, _Gone] = {}
        self._receiving: Fetch | None = None
        self._telling: Fetch | None = None
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
        destination.check(request)
        with self._lock:
            if self._lost is not None:
                raise PeerLostError(self._lost)
            self._number = self._free_number()
            deadline = time.monotonic() + request.timeout_s
            fetch = Fetch(request, destination, told, self._number, deadline)
            self._fetches[fetch.number] = fetch
        body = frames.fetch_body(request)
        if not self._send(Head(Kind.FETCH, fetch.number, length=len(body)), body, deadline):
            self._end(fetch, End.TIMEOUT)
        return fetch

    def _free_number(self) -> int:
        """With the lock held."""
        number = self._number
        while True:
            number = (number + 1) & 0xFFFFFFFF
            if number not in self._fetches and number not in self._gone:
                return number

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards.

        Waits for a callback of it that is under way, but not for long.
        """
        if self._end(fetch, end):
            self._send(Head(Kind.CANCEL, fetch.number), b"", time.monotonic() + _SEND_S)

    def _end(self, fetch: Fetch, end: End) -> bool:
        """Whether it had not ended before."""
        with self._lock:
            ours = self._fetches.get(fetch.number) is fetch
            if ours:
                del self._fetches[fetch.number]
                self._gone[fetch.number] = _Gone(len(fetch.request.keys), fetch.layer_bytes)
                while len(self._gone) > _MOST_GONE:
                    del self._gone[next(iter(self._gone))]
            if threading.current_thread() is not self._thread:
                if not self._piece_over.wait_for(lambda: self._receiving is not fetch, _GRACE_S):
                    self._io.shut()
                    self._piece_over.wait_for(lambda: self._receiving is not fetch, _PIECE_S)
                self._piece_over.wait_for(lambda: self._telling is not fetch, _GRACE_S)
        if ours:
            self._tell_end(fetch, end, None)
        return ours

    def shut(self) -> None:
        """End the connection and every fetch on it, soon."""
        self._io.shut()

    def close(self) -> None:
        """The same, and wait for it."""
        self._io.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- sending ----------------------------------------------------------------------------

    def _send(self, head: Head, body: bytes, deadline: float) -> bool:
        """Whether it could be sent in time; a failure ends the connection, and so every fetch."""
        try:
            self._io.send([head.pack(), body], min(deadline, time.monotonic() + _SEND_S))
        except TimeoutError:
            return False
        except PeerLostError:
            self._io.shut()
        return True

    # -- receiving --------------------------------------------------------------------------

    def _receive(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                if self._io.readable(self._next_deadline()):
                    deadline = time.monotonic() + _PIECE_S
                    self._take(Head.unpack(self._io.receive(HEAD_BYTES, deadline)), deadline)
                self._expire()
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.address)
            why = f"receiving failed: {error}"
        with self._lock:
            self._lost = f"{self.address}: {why}"
            left = list(self._fetches.values())
            self._fetches.clear()
            self._gone.clear()
            self._receiving = self._telling = None
            self._piece_over.notify_all()
        self._io.close()
        for fetch in left:
            self._tell_end(fetch, End.LOST, None)

    def _next_deadline(self) -> float:
        soon = time.monotonic() + _LOOK_EVERY_S  # a new fetch may end earlier than the others
        with self._lock:
            return min([soon, *(fetch.deadline for fetch in self._fetches.values())])

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [fetch for fetch in self._fetches.values() if fetch.deadline <= now]
        for fetch in late:
            self.cancel(fetch, End.TIMEOUT)

    def _take(self, head: Head, deadline: float) -> None:
        with self._lock:
            fetch = self._fetches.get(head.request)
            gone = self._gone.get(head.request)
        known = fetch or gone
        if known is None:
            raise PeerLostError("a frame came that answers nothing")
        if head.kind is Kind.DATA:
            self._take_data(head, known, deadline)
        elif head.kind is Kind.MISSING:
            body = self._io.receive(head.length, deadline)
            blocks = frames.parse_missing(body, known.blocks)
            if fetch is not None:
                fetch.lack(blocks)
                self._tell(fetch, lambda: fetch.told.missing(blocks))
        elif head.kind is Kind.END:
            self._take_end(head, self._io.receive(head.length, deadline))
        else:
            raise PeerLostError("it sent what only a client sends")

    def _take_end(self, head: Head, body: bytes) -> None:
        end, self.load = frames.parse_end(head, body)
        with self._lock:
            fetch = self._fetches.pop(head.request, None)
            self._gone.pop(head.request, None)
        if fetch is not None:
            # It says that all was sent; what came says so too, or it is not so.
            end = End.FAILED if end is End.OK and not fetch.complete else end
            self._tell_end(fetch, end, self.load)

    def _take_data(self, head: Head, known: Fetch | _Gone, deadline: float) -> None:
        fixed = self._io.receive(DATA_HEAD.size, deadline)
        span = frames.data_span(head, fixed, known.layer_bytes)
        packed = self._io.receive(8 * span.layer_blocks, deadline)
        checksums = frames.parse_checksums(fixed, packed)
        with self._lock:
            fetch = self._receiving = self._fetches.get(head.request)
        if fetch is None:  # given up, perhaps just now
            self._discard(span.layer_blocks * known.layer_bytes, deadline)
            return
        try:
            fetch.expect(span)
            views = fetch.destination.views(span, fetch.deadline)
            deadline = time.monotonic() + _PIECE_S
            if views is not None:
                self._io.receive_into_all(views, deadline)
        finally:
            with self._lock:
                self._receiving = None
                self._piece_over.notify_all()
        if views is None:
            self._discard(span.layer_blocks * known.layer_bytes, deadline)
            self.cancel(fetch)
        else:
            self._tell(fetch, lambda: fetch.told.landed(span, checksums))

    def _tell(self, fetch: Fetch, call: Callable[[], None]) -> None:
        """Unless it has ended meanwhile. What it cannot use ends it, and no other."""
        with self._lock:
            if self._fetches.get(fetch.number) is not fetch:
                return
            self._telling = fetch
        failed = False
        try:
            call()
        except Exception:
            logger.exception("What came from %s cannot be used", self.address)
            failed = True
        finally:
            with self._lock:
                self._telling = None
                self._piece_over.notify_all()
        if failed:
            self.cancel(fetch, End.FAILED)

    def _discard(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._io.receive_into(part, deadline)
            size -= len(part)

    def _tell_end(self, fetch: Fetch, end: End, load: Load | None) -> None:
        try:
            fetch.told.ended(end, load)
        except Exception:
            logger.exception("The end of a fetch from %s cannot be used", self.address)
        finally:
            fetch.done.set()


def _dial(address: PeerAddress, deadline: float) -> socket.socket:
    left_s = max(0.001, deadline - time.monotonic())
    try:
        sock = socket.create_connection((address.host, address.port), left_s)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
        raise PeerLostError(f"{address} cannot be reached: {error}") from error
    try:
        tune(sock, address.dscp)
        if address.tls is None:
            return sock
        return address.tls.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )
    except BaseException:
        sock.close()
        raise
