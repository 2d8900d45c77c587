"""What is under way on a connection, whatever carries it, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.transport.base import (
    Destination,
    End,
    Fetching,
    FetchRequest,
    Load,
    PeerLostError,
    Span,
)

logger = logging.getLogger(__name__)

_GRACE_S = 0.5
_LAST_S = 10.0
_LOOK_EVERY_S = 0.2
_MOST_GONE = 1024


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
class Gone:
    """What is still to be known of a fetch that was given up: nothing that holds its memory."""

    blocks: int
    layer_bytes: int


class Fetches:
    """Those of one connection, from their beginning to their end. Thread-safe.

    The connection's thread, the *receiver*, writes to destinations and calls back; any thread
    begins a fetch and gives it up. Whoever gives one up waits for what the receiver does with it.

    Args:
        who: at the other end, for messages.
        give_up: ends the connection, when a piece that is under way does not come to its end.
        patience_s: how long that is waited for before; half a second by default.
    """

    def __init__(
        self, who: str, give_up: Callable[[], None], patience_s: float | None = None
    ) -> None:
        self.lost: str | None = None
        """Why the connection ended; None while it stands."""
        self.receiver: threading.Thread | None = None
        self._who = who
        self._give_up = give_up
        self._patience_s = _GRACE_S if patience_s is None else patience_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._live: dict[int, Fetch] = {}
        self._gone: dict[int, Gone] = {}
        self._filling: Fetch | None = None
        self._telling: Fetch | None = None
        self._number = 0

    # -- from any thread --------------------------------------------------------------------

    def begin(self, request: FetchRequest, destination: Destination, told: Fetching) -> Fetch:
        """A new one, which is still to be asked for.

        Raises:
            ValueError: the destination does not hold what is asked for.
            PeerLostError: the connection has ended.
        """
        destination.check(request)
        with self._lock:
            number = self._free_number()
            deadline = time.monotonic() + request.timeout_s
            fetch = self._live[number] = Fetch(request, destination, told, number, deadline)
        return fetch

    def number(self) -> int:
        """One for a question of another kind.

        Raises:
            PeerLostError: the connection has ended.
        """
        with self._lock:
            return self._free_number()

    def _free_number(self) -> int:
        if self.lost is not None:
            raise PeerLostError(self.lost)
        while True:
            self._number = (self._number + 1) & 0xFFFFFFFF
            if self._number not in self._live and self._number not in self._gone:
                return self._number

    def end(self, fetch: Fetch, end: End) -> bool:
        """Nothing writes to its destination afterwards; whether it had not ended before."""
        with self._lock:
            ours = self._live.get(fetch.number) is fetch
            if ours:
                del self._live[fetch.number]
                self._gone[fetch.number] = Gone(fetch.blocks, fetch.layer_bytes)
                while len(self._gone) > _MOST_GONE:
                    del self._gone[next(iter(self._gone))]
            if threading.current_thread() is not self.receiver:
                if not self._changed.wait_for(lambda: self._filling is not fetch, self._patience_s):
                    self._give_up()
                    self._changed.wait_for(lambda: self._filling is not fetch, _LAST_S)
                self._changed.wait_for(lambda: self._telling is not fetch, _GRACE_S)
        if ours:
            self.tell_end(fetch, end, None)
        return ours

    # -- for the receiver -------------------------------------------------------------------

    def look_by(self) -> float:
        """When one may be late, monotonic seconds; soon, for a new one may be before all others."""
        with self._lock:
            deadlines = [fetch.deadline for fetch in self._live.values()]
        return min([time.monotonic() + _LOOK_EVERY_S, *deadlines])

    def late(self) -> list[Fetch]:
        """Those whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            return [fetch for fetch in self._live.values() if fetch.deadline <= now]

    def known(self, number: int) -> tuple[Fetch | None, Gone]:
        """The fetch of that number, None when it was given up; and what can be said of both.

        Raises:
            PeerLostError: there never was one.
        """
        with self._lock:
            fetch, gone = self._live.get(number), self._gone.get(number)
        if fetch is not None:
            return fetch, Gone(fetch.blocks, fetch.layer_bytes)
        if gone is None:
            raise PeerLostError("a frame came that answers nothing")
        return None, gone

    @contextlib.contextmanager
    def filling(self, number: int) -> Iterator[Fetch | None]:
        """While its destination is written to; None when it was given up, perhaps just now."""
        with self._lock:
            self._filling = self._live.get(number)
        try:
            yield self._filling
        finally:
            with self._lock:
                self._filling = None
                self._changed.notify_all()

    def tell(self, fetch: Fetch, call: Callable[[], None]) -> bool:
        """Call back, unless it has ended meanwhile; False when it cannot use what came."""
        with self._lock:
            if self._live.get(fetch.number) is not fetch:
                return True
            self._telling = fetch
        try:
            call()
        except Exception:
            logger.exception("What came from %s cannot be used", self._who)
            return False
        finally:
            with self._lock:
                self._telling = None
                self._changed.notify_all()
        return True

    def finished(self, number: int, end: End, load: Load) -> None:
        """The peer says that nothing more comes."""
        with self._lock:
            fetch = self._live.pop(number, None)
            self._gone.pop(number, None)
        if fetch is not None:
            # It says that all was sent; what came says so too, or it is not so.
            end = End.FAILED if end is End.OK and not fetch.complete else end
            self.tell_end(fetch, end, load)

    def lose(self, why: str) -> list[Fetch]:
        """The connection has ended; those that are to be told so."""
        with self._lock:
            self.lost = why
            left = list(self._live.values())
            self._live.clear()
            self._gone.clear()
            self._filling = self._telling = None
            self._changed.notify_all()
        return left

    def tell_end(self, fetch: Fetch, end: End, load: Load | None) -> None:
        """The last call back."""
        try:
            fetch.told.ended(end, load)
        except Exception:
            logger.exception("The end of a fetch from %s cannot be used", self._who)
        finally:
            fetch.done.set()


@dataclass(slots=True, eq=False)
class Ask:
    """A question for the peer's load, shared by all who ask while it is under way.

    Args:
        number: of its PING.
        asked_at: monotonic seconds.
        dead_s: for how long the peer has to send nothing at all to be taken for dead.
    """

    number: int
    asked_at: float
    dead_s: float
    done: threading.Event = field(default_factory=threading.Event)
    load: Load | None = None

    @property
    def dead_at(self) -> float:
        """Monotonic seconds before which the peer may take its time."""
        return self.asked_at + self.dead_s
