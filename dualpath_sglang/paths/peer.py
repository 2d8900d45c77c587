"""Another node's agent, as this process knows it: a connection, its read queue, its speed.

A peer that fails is let go of and reached anew, with pauses that double; until it has proved by its
handshake that it is alive and of one mind with us, nothing is asked of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from dualpath_sglang.paths.reports import NodeReport
from dualpath_sglang.scheduling.paths import Side
from dualpath_sglang.streaming.estimate import RateMeter
from dualpath_sglang.streaming.other_paths import Blame
from dualpath_sglang.transport.base import (
    Destination,
    End,
    Fetching,
    FetchRequest,
    Load,
    RefusedError,
    Span,
    TransportError,
)
from dualpath_sglang.transport.client import Connection, Fetch
from dualpath_sglang.transport.local_client import LocalConnection

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_PAUSES_S = (0.25, 4.0)
_WELL_S = 10.0
"""Who fails after so long without a failure begins with a short pause again."""
_BUSY_S = 0.2
_UNKNOWN_S = 2.0
_SILENT_S = 0.5
_STALE_S = 1.0
"""A node of which nothing was heard for so long is asked how it is."""
_SHARED = 3.0
_DELAY_S = 0.002
"""What the way over another node adds to a read, beside the reading."""


AnyConnection: TypeAlias = Connection | LocalConnection
Dial: TypeAlias = Callable[[bool, float], AnyConnection]


@dataclass(frozen=True, slots=True)
class Told:
    """What a node said of itself, and when (monotonic seconds)."""

    load: Load
    at: float


class Peer:
    """See the module. Thread-safe.

    Args:
        name: unique; what sides are called.
        where: it listens, for people.
        dial: connects, by a deadline (monotonic seconds); told whether the last try was refused.
        counts: of all peers: fetches by how they ended, and what went wrong.
    """

    def __init__(
        self,
        name: str,
        where: str,
        dial: Dial,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.where = where
        self.read_rate: float | None = None
        """Bytes a second that it reads from storage, as it says itself."""
        self._report: object = None
        """Which of its reports was heeded last."""
        self._dial = dial
        self._refused = False
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: AnyConnection | None = None
        self._busy = False
        """Whether a thread connects, or asks how it is."""
        self._closed = False
        self._pause_s = 0.0
        self._try_at = -math.inf
        self._not_before = 0.0
        self._unknown: dict[bytes, float] = {}
        self._meter = RateMeter()
        self._told = Told(Load(), clock())
        self._asked_since = 0
        self._outstanding = 0
        self._heard = clock()
        self._state = ""

    # -- whether and how well ---------------------------------------------------------------

    def usable(self, geometry_id: bytes) -> bool:
        """Whether blocks of a geometry can be asked for now."""
        now = self._clock()
        connection = self._connection
        return (
            connection is not None
            and connection.lost is None
            and now >= self._not_before
            and now >= self._unknown.get(geometry_id, 0.0)
        )

    def side(self) -> Side:
        """The peer as one that can read."""
        rate = self._expected(self._meter.hope(self._clock()))
        return Side(self.name, self._queue_bytes(rate), rate, _DELAY_S)

    @property
    def rate(self) -> float | None:
        """Bytes a second that it brought last; None when nothing is known."""
        return self._expected(self._meter.rate(self._clock()))

    def _expected(self, arrives: float | None) -> float | None:
        """Of what arrives here, and what it says that it reads.

        What arrives is less than what it reads when others ask it too, and then its queue says so.
        Only a way that brings far less than it reads counts.
        """
        if self.read_rate is None or arrives is None:
            return self.read_rate or arrives
        return min(self.read_rate, _SHARED * arrives)

    def _queue_bytes(self, rate: float | None) -> int:
        """What it has still to read: what it said, what was asked of it since, what it read."""
        with self._lock:
            told, since, ours = self._told, self._asked_since, self._outstanding
        read = int((self._clock() - told.at) * (rate or 0.0))
        return max(ours, told.load.bytes + since - read)

    def said(self, load: Load) -> None:
        """It told how long its read queue is."""
        with self._lock:
            self._told = Told(load, self._clock())
            self._asked_since = 0

    def heed(self, report: NodeReport) -> None:
        """What it says of itself."""
        if report.load is not None and report.told != self._report:
            self._report = report.told
            self.said(report.load)
        self.read_rate = report.read_rate or self.read_rate

    # -- the connection ---------------------------------------------------------------------

    def reach(self) -> None:
        """Begin to connect, or to ask how it is, in a thread, if there is need and it is time."""
        with self._lock:
            connection = self._connection
            alive = connection is not None and connection.lost is None
            due_at = self._told.at + _STALE_S if alive else self._try_at
            if self._busy or self._closed or self._clock() < due_at:
                return
            self._busy = True
        if connection is not None and not alive:
            self._say(connection.lost or "the connection was closed")
        work = self._connect if connection is None or not alive else partial(self._ask, connection)
        try:
            threading.Thread(target=work, name="dualpath-connect", daemon=True).start()
        except RuntimeError as error:  # no more threads for now
            with self._lock:
                self._busy = False
                self._wait_longer()
            self._say(str(error))

    def _ask(self, connection: AnyConnection) -> None:
        """Nobody has told its load for a while. One that does not answer is given up soon."""
        try:
            load = connection.ask_load(_STALE_S) if isinstance(connection, Connection) else None
            if load is not None:
                self.said(load)
        finally:
            self._busy = False

    def _connect(self) -> None:
        connection = None
        try:
            refused, self._refused = self._refused, False
            connection = self._dial(refused, time.monotonic() + _CONNECT_S)
        except RefusedError as error:
            self._refused = True
            self._counts["refused"] += 1
            self._say(str(error))
        except TransportError as error:
            self._counts["unreachable"] += 1
            self._say(str(error))
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is said once
            self._counts["unreachable"] += 1
            self._say(f"connecting failed: {error!r}")
        with self._lock:
            self._busy = False
            old, self._connection = self._connection, connection
            closed = self._closed
            if connection is None:
                self._wait_longer()
            else:
                self._told, self._asked_since = Told(Load(), self._clock()), 0
        if connection is not None:
            self._say("")
            if closed:
                connection.close()
        if old is not None:
            old.close()

    def _wait_longer(self) -> None:
        """With the lock held. All fetches of a connection fail with it: that is one failure."""
        now = self._clock()
        if now < self._try_at:
            return
        first, longest = _PAUSES_S
        again = now - self._try_at <= _WELL_S
        self._pause_s = min(2 * self._pause_s, longest) if again else first
        self._try_at = now + self._pause_s

    def _say(self, why: str) -> None:
        """One line a change of state."""
        if why == self._state:
            return
        if why:
            logger.warning("Node %s at %s is not used: %s", self.name, self.where, why)
        else:
            logger.info("Node %s at %s reads for this one", self.name, self.where)
        self._state = why

    def leave(self) -> None:
        """Let go of it; every fetch ends soon. Does not wait."""
        with self._lock:
            self._closed = True
            connection = self._connection
        if connection is not None:
            connection.shut()

    def close(self) -> None:
        """The same, and wait until every fetch has ended."""
        self.leave()
        connection = self._connection
        if connection is not None:
            connection.close()

    # -- fetching ---------------------------------------------------------------------------

    def begin(
        self, request: FetchRequest, destination: Destination, told: Fetching
    ) -> PeerFetch | None:
        """Ask for blocks; None when that cannot be done now."""
        connection = self._connection
        if connection is None:
            return None
        layers = request.end_layer - request.first_layer
        size = len(request.keys) * layers * destination.layer_bytes
        going = PeerFetch(
            self, connection, told, request.geometry_id, destination.layer_bytes, size
        )
        with self._lock:
            if self._outstanding <= 0:  # what was asked before may have been given up
                self._meter.pause()
            self._asked_since += size
            self._outstanding += size
        try:
            going.fetch = connection.fetch(request, destination, going)
        except (TransportError, ValueError) as error:
            with self._lock:
                self._asked_since = max(0, self._asked_since - size)
                self._outstanding -= size
            self._counts["not_begun"] += 1
            logger.debug("A fetch from %s cannot begin: %s", self.name, error)
            return None
        return going

    def blame(self, why: Blame) -> None:
        """It did not do what it should."""
        self._counts[why.value] += 1
        silent = self._clock() - self._heard > _SILENT_S
        if why is Blame.BAD or silent:
            said = "what it sends is damaged" if why is Blame.BAD else "it does not answer in time"
            self._say(said)
            self._let_go()
        else:  # it has much to do
            self._not_before = self._clock() + _BUSY_S

    def _let_go(self) -> None:
        with self._lock:
            connection = self._connection
            self._wait_longer()
        if connection is not None:
            connection.shut()

    # -- for its fetches --------------------------------------------------------------------

    def _came(self, size: int, of_fetch: int, began: float) -> None:
        """
        Args:
            size: of what came now.
            of_fetch: of all that has come of its fetch, since that began.
        """
        now = self._heard = self._clock()
        with self._lock:
            self._outstanding -= size
            self._meter.note(size, now, full=self._outstanding > 0)
            if now > began:
                self._meter.at_least(of_fetch / (now - began), now)

    def _returned(self, size: int) -> None:
        with self._lock:
            self._outstanding -= size

    def _ended(self, geometry_id: bytes, end: End, load: Load | None, left: int) -> None:
        self._returned(left)
        self._counts[end.name.lower()] += 1
        if load is not None:
            self._heard = self._clock()
            self.said(load)
        if end is End.BUSY:
            self._not_before = self._clock() + _BUSY_S
        elif end is End.UNKNOWN:
            self._unknown[geometry_id] = self._clock() + _UNKNOWN_S
        elif end is End.LOST:
            with self._lock:
                self._wait_longer()


class PeerFetch:
    """A fetch under way; passes on what comes, and notes it. See :class:`Fetching`."""

    def __init__(
        self,
        peer: Peer,
        connection: AnyConnection,
        told: Fetching,
        geometry_id: bytes,
        layer_bytes: int,
        size: int,
    ) -> None:
        self.fetch: Fetch | None = None
        self._peer = peer
        self._connection = connection
        self._told = told
        self._geometry_id = geometry_id
        self._layer_bytes = layer_bytes
        self._size = self._left = size
        self._began = peer._clock()

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        """See :class:`Fetching`."""
        size = span.layer_blocks * self._layer_bytes
        self._left -= size
        self._peer._came(size, self._size - self._left, self._began)
        self._told.landed(span, checksums)

    def missing(self, blocks: Sequence[int]) -> None:
        """See :class:`Fetching`."""
        self._told.missing(blocks)

    def ended(self, end: End, load: Load | None) -> None:
        """See :class:`Fetching`."""
        self._peer._ended(self._geometry_id, end, load, self._left)
        self._told.ended(end, load)

    def cancel(self) -> None:
        """Give it up; nothing writes to its destination afterwards."""
        if self.fetch is not None:
            self._connection.cancel(self.fetch)
