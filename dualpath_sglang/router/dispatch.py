"""The waiting queue, and the rounds in which requests get their engines.

A round runs whenever its outcome may have changed: a request arrives or ends, an engine reports,
joins, leaves or dies. It is a call of :func:`dualpath_sglang.scheduling.placement.place` over what
is known at that moment, and never waits for anything.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from dualpath_sglang.router.engines import Engine, Registry
from dualpath_sglang.router.nodes import ReadQueues
from dualpath_sglang.router.options import RouterOptions
from dualpath_sglang.router.tokens import HitShare
from dualpath_sglang.scheduling.engines import Cluster, Request
from dualpath_sglang.scheduling.placement import Placement, Round, Rules, place
from dualpath_sglang.scheduling.rules import ReadPath

_AT_ONCE = 64
"""Requests of the queue's head that one call of the scheduler looks at."""


_LOOK_S = 0.25
"""At least so long between two looks at whether an engine is missing, seconds."""


class NoPlaceError(Exception):
    """A request does not get engines.

    Args:
        message: one sentence for the client.
        kind: for the counter.
        status: HTTP status; with 503 it may come again.
    """

    def __init__(self, message: str, kind: str, status: int = 503) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.status = status


class Recording(Protocol):
    """Where rounds are noted."""

    def record(self, queue: list[Request], cluster: Cluster, rules: Rules, done: Round) -> None:
        """Note a round."""
        ...


class Seat:
    """A place on a PE and a DE, counted there until it is given back.

    Args:
        placement: what the scheduler said.
        reads: where the read that it brings is counted.
    """

    def __init__(
        self,
        request: Request,
        placement: Placement,
        engines: tuple[Engine, Engine],
        reads: ReadQueues,
    ) -> None:
        self.placement = placement
        self.prefill, self.decode = engines
        self.on_death: Callable[[Engine], None] | None = None
        self._tokens = (request.tokens, request.reserved_tokens)
        self._reads = reads
        self._promises = reads.promise(placement.shares, placement.read_tokens)
        self._held = {self.prefill, self.decode}
        self.prefill.take(self, request.tokens)
        self.decode.take(self, request.reserved_tokens)

    def engine_died(self, engine: Engine) -> None:
        """See :class:`dualpath_sglang.router.engines.Attempt`."""
        if self.on_death is not None:
            self.on_death(engine)

    def end_prefill(self) -> None:
        """The PE has nothing to do for it any more."""
        if self.prefill in self._held:
            self._held.discard(self.prefill)
            self.prefill.give_back(self, self._tokens[0])
            self._reads.kept(self._promises)

    def end(self) -> None:
        """Nor has the DE."""
        self.end_prefill()
        if self.decode in self._held:
            self._held.discard(self.decode)
            self.decode.give_back(self, self._tokens[1])


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue.

    Args:
        number: its turn: that of its arrival, also when it is placed again.
        since: monotonic seconds.
    """

    number: int
    request: Request
    since: float
    placed: asyncio.Future[Seat]


class Dispatcher:
    """The queue of one router."""

    def __init__(
        self,
        registry: Registry,
        reads: ReadQueues,
        options: RouterOptions,
        recording: Recording | None = None,
    ) -> None:
        self._registry = registry
        self._reads = reads
        self._options = options
        self._recording = recording
        self._queue: list[Waiting] = []
        self._numbers = itertools.count(1)
        self._turns = (0, 0, 0)
        self._due = False
        self._missing_since: float | None = None
        """Since when no engine of some role has been ready, monotonic seconds."""
        self.rounds = 0
        self.hits = HitShare()
        registry.changed = self.changed

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def number(self) -> int:
        """A turn, for a request that arrives now."""
        return next(self._numbers)

    def changed(self) -> None:
        """Hold a round as soon as whatever runs now is done."""
        self._note_missing()
        if not self._due and self._queue:
            self._due = True
            asyncio.get_running_loop().call_soon(self._round)

    async def place(self, request: Request, number: int) -> Seat:
        """Wait for engines.

        Raises:
            NoPlaceError: the queue is full, it took too long, or no engine can ever take it.
        """
        if len(self._queue) >= self._options.queue_limit:
            raise NoPlaceError("Too many requests are waiting; try again later", "queue_full")
        future: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        waiting = Waiting(number, request, time.monotonic(), future)
        insort(self._queue, waiting, key=lambda w: w.number)
        try:
            self._round()
            while not future.done():
                left = self._left_s(waiting)
                if left <= 0:
                    raise self._refusal(waiting)
                await asyncio.wait([future], timeout=left)
        except BaseException:
            if not future.done():
                self._queue.remove(waiting)
                self.changed()
            elif future.exception() is None:  # nobody will sit there
                self.release(future.result())
            raise
        return future.result()

    def withdraw(self, number: int) -> None:
        """The request of that turn does not want a place any more, if it still waits for one."""
        for waiting in self._queue:
            if waiting.number == number and not waiting.placed.done():
                waiting.placed.set_exception(
                    NoPlaceError("The request was aborted", "aborted", 499)
                )
                self._queue.remove(waiting)
                self.changed()
                return

    def release(self, seat: Seat) -> None:
        """A request has ended, or has to be placed again."""
        seat.end()
        self.changed()

    def release_prefill(self, seat: Seat) -> None:
        """A request's prefill has ended."""
        seat.end_prefill()
        self.changed()

    def _left_s(self, waiting: Waiting) -> float:
        """How much longer it may wait, or until somebody should look again."""
        now = time.monotonic()
        patience = self._options.engine_wait_s
        left = self._options.queue_timeout_s - (now - waiting.since)
        missing = self._note_missing()
        if missing is None:
            return min(left, max(patience, _LOOK_S))  # an engine may be missing by then
        return min(left, max(missing, waiting.since) + patience - now)

    def _note_missing(self) -> float | None:
        if not self._missing_role():
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        return self._missing_since

    def _missing_role(self) -> str:
        if not self._registry.ready("prefill"):
            return "prefill"
        return "" if self._registry.ready("decode") else "decode"

    def _refusal(self, waiting: Waiting) -> NoPlaceError:
        now = time.monotonic()
        waited = now - waiting.since
        role = self._missing_role()
        if role:
            missing = now - (self._missing_since or now)
            return NoPlaceError(
                f"No {role} server has been ready for {missing:.0f} s", f"no_{role}"
            )
        return NoPlaceError(
            f"No server has had room for {waited:.0f} s; try again later", "queue_timeout"
        )

    # -- rounds -----------------------------------------------------------------------------

    def rules(self) -> Rules:
        """The rules of the next round, from the options and from what has been measured."""
        options = self._options
        engines = self._registry.ready("prefill")
        rates = [e.compute_rate for e in engines if e.compute_rate]
        compute = options.prefill_rate
        if rates:  # of tokens that are computed; what is queued are tokens of prompts
            compute = self.hits.factor * sum(rates) / len(rates)
        node_rates = list(self._reads.rates().values())
        read = sum(node_rates) / len(node_rates) if node_rates else options.read_rate
        path: ReadPath = "shorter_queue" if options.path == "free" else options.path
        if options.policy == "round_robin" and path == "shorter_queue":
            path = "alternate"  # nor do read queues count
        return Rules(
            policy=options.policy,
            path=path,
            alpha=math.inf if read is None else read * options.alpha_s,
            beta=math.inf if compute is None else compute * options.beta_s,
            affinity=options.affinity,
            compute_rate=compute,
            read_rate=read,
            # A decode server that has DualPath reads hits for itself too.
            decode_restores=any(e.spec.node for e in self._registry.ready("decode")),
        )

    def cluster(self) -> Cluster:
        """What is known now of engines that take requests."""
        turns = self._turns
        return Cluster(
            tuple(engine.as_prefill() for engine in self._registry.ready("prefill")),
            tuple(engine.as_decode() for engine in self._registry.ready("decode")),
            self._reads.queues(),
            self._reads.rates(),
            *turns,
        )

    def _round(self) -> None:
        self._due = False
        if not self._queue or self._missing_role():
            return
        try:
            self._place(self._queue, self.rules(), self.cluster())
        finally:
            self._queue = [w for w in self._queue if not w.placed.done()]

    def _place(self, queue: list[Waiting], rules: Rules, cluster: Cluster) -> None:
        """In turn, until one must wait.

        One that engines failed before may only go to others, and does not hold up those behind it
        while these are full: it is passed, and comes first again in the next round.
        """
        while queue:
            part, rest = queue[:_AT_ONCE], queue[_AT_ONCE:]
            asked = [_offered(w.request, cluster) for w in part]
            done = place(asked, cluster, rules)
            self.rounds += 1
            if self._recording is not None:
                self._recording.record(asked, cluster, rules, done)
            self._apply({w.request.id: w for w in part}, done)
            cluster = done.cluster_after
            self._turns = (cluster.next_prefill, cluster.next_decode, cluster.next_side)
            if done.waiting and not done.waiting[0].excluded:
                return
            behind = {request.id for request in done.waiting[1:]}
            queue = [w for w in part if w.request.id in behind] + rest

    def _apply(self, waiting: dict[str, Waiting], done: Round) -> None:
        for placement in done.placements:
            one = waiting[placement.request]
            prefill = self._registry.get(placement.prefill)
            decode = self._registry.get(placement.decode)
            if prefill is None or decode is None:  # they are of this very moment
                raise RuntimeError(f"{placement} names a server that nobody knows")
            one.placed.set_result(Seat(one.request, placement, (prefill, decode), self._reads))
        for request in done.stranded:
            waiting[request.id].placed.set_exception(
                NoPlaceError(
                    f"No decode server can hold {request.reserved_tokens} tokens, which the "
                    "prompt and the longest answer take",
                    "too_large",
                    400,
                )
            )


def _offered(request: Request, cluster: Cluster) -> Request:
    """A request that all engines of a role failed may try them again: there are no others."""
    excluded = request.excluded
    if not excluded:
        return request
    for engines in (cluster.prefill, cluster.decode):
        names = {engine.name for engine in engines}
        if names <= excluded:
            excluded = excluded - names
    return replace(request, excluded=excluded)
