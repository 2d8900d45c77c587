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
from dualpath_sglang.transport.fetches import Ask, Fetch, Gone
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.handshake import greet
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_sglang.transport.wire import Wire

__all__ = ["Connection", "Fetch", "PeerAddress"]

logger = logging.getLogger(__name__)

_SEND_S = 2.0
_PIECE_S = 10.0
"""A piece that has begun comes within this time, or the connection is given up."""
_GRACE_S = 0.5
_MOST_GONE = 1024
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
        self._lock = threading.Lock()
        self._piece_over = threading.Condition(self._lock)
        self._fetches: dict[int, Fetch] = {}
        self._gone: dict[int, Gone] = {}
        self._receiving: Fetch | None = None
        self._telling: Fetch | None = None
        self._ask: Ask | None = None
        self._number = 0
        self._lost: str | None = None
        self._verdict: str | None = None
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
        if not self._send(Kind.FETCH, fetch.number, body, deadline):
            self._end(fetch, End.TIMEOUT)
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
        with self._lock:
            if self._lost is not None:
                return None
            ask, new = self._ask, self._ask is None
            if ask is None:
                self._number = self._free_number()
                dead_s = max(timeout_s, _DEAD_S)
                ask = self._ask = Ask(self._number, time.monotonic(), dead_s)
        end = time.monotonic() + timeout_s
        if new and not self._send(Kind.PING, ask.number, deadline=end):
            with self._lock:  # there was no turn for it; whoever comes next may try
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
        with self._lock:
            ask = self._ask
        if ask is not None and time.monotonic() >= ask.dead_at and self._io.silent(ask.dead_s):
            self._verdict = "the peer was asked, and does not answer"
            self._io.shut()

    def _free_number(self) -> int:
        """With the lock held."""
        number = self._number
        while True:
            number = (number + 1) & 0xFFFFFFFF
            asked = self._ask is not None and self._ask.number == number
            if number not in self._fetches and number not in self._gone and not asked:
                return number

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards.

        Waits for a callback of it that is under way, but not for long.
        """
        if self._end(fetch, end):
            self._send(Kind.CANCEL, fetch.number)

    def _end(self, fetch: Fetch, end: End) -> bool:
        """Whether it had not ended before."""
        with self._lock:
            ours = self._fetches.get(fetch.number) is fetch
            if ours:
                del self._fetches[fetch.number]
                self._gone[fetch.number] = Gone(len(fetch.request.keys), fetch.layer_bytes)
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
                if self._io.readable(self._next_deadline()):
                    deadline = time.monotonic() + _PIECE_S
                    self._take(self._wire.receive_head(deadline), deadline)
                self._expire()
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.address)
            why = f"receiving failed: {error}"
        with self._lock:
            self._lost = f"{self.address}: {self._verdict or why}"
            left = list(self._fetches.values())
            self._fetches.clear()
            self._gone.clear()
            ask, self._ask = self._ask, None
            self._receiving = self._telling = None
            self._piece_over.notify_all()
        self._io.close()
        if ask is not None:
            ask.done.set()
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
        self._give_up_if_dead()

    def _take(self, head: Head, deadline: float) -> None:
        if head.kind is Kind.LOAD:
            self._take_load(head, self._wire.receive_content(head, deadline))
            return
        with self._lock:
            fetch = self._fetches.get(head.request)
            gone = self._gone.get(head.request)
        known = fetch or gone
        if known is None:
            raise PeerLostError("a frame came that answers nothing")
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
            self._take_end(head, content)
        else:
            raise PeerLostError("it sent what only a client sends")

    def _take_load(self, head: Head, content: bytes) -> None:
        load = frames.parse_load(content)
        with self._lock:
            ask = self._ask
            if ask is None or ask.number != head.request:
                raise PeerLostError("it said its load, and nobody asked")
            self._ask = None
        self.load = ask.load = load
        ask.done.set()

    def _take_end(self, head: Head, content: bytes) -> None:
        end, self.load = frames.parse_end(head), frames.parse_load(content)
        with self._lock:
            fetch = self._fetches.pop(head.request, None)
            self._gone.pop(head.request, None)
        if fetch is not None:
            # It says that all was sent; what came says so too, or it is not so.
            end = End.FAILED if end is End.OK and not fetch.complete else end
            self._tell_end(fetch, end, self.load)

    def _take_data(self, head: Head, known: Fetch | Gone, deadline: float) -> None:
        span, checksums = self._wire.receive_front(head, known.layer_bytes, deadline)
        with self._lock:
            fetch = self._receiving = self._fetches.get(head.request)
        if fetch is None:  # given up, perhaps just now
            self._wire.discard(span.layer_blocks * known.layer_bytes, deadline)
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
            self._wire.discard(span.layer_blocks * known.layer_bytes, deadline)
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

    def _tell_end(self, fetch: Fetch, end: End, load: Load | None) -> None:
        try:
            fetch.told.ended(end, load)
        except Exception:
            logger.exception("The end of a fetch from %s cannot be used", self.address)
        finally:
            fetch.done.set()
