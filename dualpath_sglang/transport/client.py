"""Fetching Layer Blocks from a peer over TCP: many fetches on one connection.

One thread receives, straight into the destinations, each Layer Block once and in order. A fetch
ends at its deadline, or when it is given up; its memory is never written to afterwards: whoever
gives it up waits for the piece that is under way, and ends the connection when that takes too long.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

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
from dualpath_sglang.transport.dial import PeerAddress, dial
from dualpath_sglang.transport.fetches import Ask, Fetch, Fetches, Gone
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.handshake import greet
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_sglang.transport.wire import Wire

__all__ = ["Connection", "Fetch", "PeerAddress"]

logger = logging.getLogger(__name__)

_SEND_S = 2.0
_PIECE_S = 10.0
"""A piece that has begun comes within this time, or the connection is given up."""
_LOOK_EVERY_S = 0.2
_DEAD_S = 2.0
"""A peer that was asked, and sends nothing at all for so long, is given up."""


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
        self._io = SocketIo(dial(address, deadline))
        try:
            self._io.agree_on_tls(deadline)
            self._wire = Wire(self._io, greet(self._io, address.secret, deadline))
        except TimeoutError as error:
            self._io.close()
            raise PeerLostError("the peer did not answer in time") from error
        except BaseException:
            self._io.close()
            raise
        self._fetches = Fetches(str(address), self._io.shut)
        self._asking = threading.Lock()
        self._ask: Ask | None = None
        self._verdict: str | None = None
        self.load: Load | None = None
        """The peer's read queue, as it said last."""
        self._thread = threading.Thread(
            target=self._receive, name=f"dualpath-fetch-{address}", daemon=True
        )
        self._fetches.receiver = self._thread
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the connection ended; None while it stands."""
        return self._fetches.lost

    def fetch(self, request: FetchRequest, destination: Destination, told: Fetching) -> Fetch:
        """Ask for Layer Blocks; returns at once.

        Args:
            told: called from the connection's thread; its ``ended`` is called in any case, but
                when this raises.

        Raises:
            ValueError: the destination does not hold what is asked for.
            PeerLostError: the connection has ended.
        """
        fetch = self._fetches.begin(request, destination, told)
        body = frames.fetch_body(request)
        if not self._send(Kind.FETCH, fetch.number, body, fetch.deadline):
            self._fetches.end(fetch, End.TIMEOUT)
        return fetch

    def ask_load(self, timeout_s: float) -> Load | None:
        """The peer's read queue as it is now; also whether the peer is there at all.

        A peer that was asked, and from which nothing whatever comes for two seconds, or for
        ``timeout_s`` if that is longer, is given up, and with it the connection. A callback of a
        fetch is not answered: it would wait for itself.

        Args:
            timeout_s: how long to wait for it.

        Returns:
            None when it does not come in time, or the connection has ended.
        """
        if threading.current_thread() is self._thread:
            return None
        with self._asking:
            ask, new = self._ask, self._ask is None
            if ask is None:
                try:
                    number = self._fetches.number()
                except PeerLostError:
                    return None
                ask = self._ask = Ask(number, time.monotonic(), max(timeout_s, _DEAD_S))
        end = time.monotonic() + timeout_s
        if new and not self._send(Kind.PING, ask.number, deadline=end):
            with self._asking:  # there was no turn for it; whoever comes next may try
                self._ask = None
            ask.done.set()
        while True:  # the thread that receives may be in the middle of a piece that does not come
            now = time.monotonic()
            if ask.done.wait(max(0.0, min(end - now, max(ask.dead_at - now, _LOOK_EVERY_S)))):
                return ask.load
            self._give_up_if_dead()
            if time.monotonic() >= end:
                return ask.load

    def _give_up_if_dead(self) -> None:
        ask = self._ask
        if ask is not None and time.monotonic() >= ask.dead_at and self._io.silent(ask.dead_s):
            self._verdict = "the peer was asked, and does not answer"
            self._io.shut()

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards.

        Waits for a callback of it that is under way, but not for long.
        """
        if self._fetches.end(fetch, end):
            self._send(Kind.CANCEL, fetch.number)

    def shut(self) -> None:
        """End the connection and every fetch on it, soon."""
        self._io.shut()

    def close(self) -> None:
        """The same, and wait for it."""
        self._io.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- sending ----------------------------------------------------------------------------

    def _send(
        self, kind: Kind, number: int, content: bytes = b"", deadline: float = math.inf
    ) -> bool:
        """Whether it could be sent in time; a failure ends the connection, and so every fetch."""
        begin_by = min(deadline, time.monotonic() + _SEND_S)
        try:
            self._wire.send(kind, number, content, begin_by=begin_by)
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
                if self._io.readable(self._fetches.look_by()):
                    deadline = time.monotonic() + _PIECE_S
                    self._take(self._wire.receive_head(deadline), deadline)
                self._expire()
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.address)
            why = f"receiving failed: {error}"
        left = self._fetches.lose(f"{self.address}: {self._verdict or why}")
        self._io.close()
        with self._asking:
            ask, self._ask = self._ask, None
        if ask is not None:
            ask.done.set()
        for fetch in left:
            self._fetches.tell_end(fetch, End.LOST, None)

    def _expire(self) -> None:
        for fetch in self._fetches.late():
            self.cancel(fetch, End.TIMEOUT)
        self._give_up_if_dead()

    def _take(self, head: Head, deadline: float) -> None:
        if head.kind is Kind.LOAD:
            self._take_load(head, self._wire.receive_content(head, deadline))
            return
        fetch, known = self._fetches.known(head.request)
        if head.kind is Kind.DATA:
            self._take_data(head, known, deadline)
            return
        content = self._wire.receive_content(head, deadline)
        if head.kind is Kind.MISSING:
            blocks = frames.parse_missing(content, known.blocks)
            if fetch is not None:
                fetch.lack(blocks)
                self._tell(fetch, lambda: fetch.told.missing(blocks))
        elif head.kind is Kind.END:
            self.load = frames.parse_load(content)
            self._fetches.finished(head.request, frames.parse_end(head), self.load)
        else:
            raise PeerLostError("it sent what only a client sends")

    def _take_load(self, head: Head, content: bytes) -> None:
        load = frames.parse_load(content)
        with self._asking:
            ask = self._ask
            if ask is None or ask.number != head.request:
                raise PeerLostError("it said its load, and nobody asked")
            self._ask = None
        self.load = ask.load = load
        ask.done.set()

    def _take_data(self, head: Head, known: Gone, deadline: float) -> None:
        span, checksums = self._wire.receive_front(head, known.layer_bytes, deadline)
        views = None
        with self._fetches.filling(head.request) as fetch:
            if fetch is not None:
                fetch.expect(span)
                views = fetch.destination.views(span, fetch.deadline)
                deadline = time.monotonic() + _PIECE_S
            if views is not None:
                self._io.receive_into_all(views, deadline)
        if views is None:
            self._wire.discard(span.layer_blocks * known.layer_bytes, deadline)
        if fetch is not None:
            if views is None:
                self.cancel(fetch)
            else:
                self._tell(fetch, lambda: fetch.told.landed(span, checksums))

    def _tell(self, fetch: Fetch, call: Callable[[], None]) -> None:
        """What it cannot use ends it, and no other."""
        if not self._fetches.tell(fetch, call):
            self.cancel(fetch, End.FAILED)
