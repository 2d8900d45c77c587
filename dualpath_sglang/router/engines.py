"""The engines that a router knows, and what it knows of each. For the event loop's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

from dualpath_sglang.router.options import EngineSpec, Role
from dualpath_sglang.scheduling.engines import DecodeEngine, PrefillEngine

logger = logging.getLogger(__name__)

Source: TypeAlias = Literal["flags", "index", "admin"]
State: TypeAlias = Literal["starting", "ready", "draining", "dead", "other model"]

_REFUSALS = 2
"""Polls in a row that find nobody listening, after which nobody is there."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine says of itself, see SGLang's ``GET /v1/loads``; summed over its DP ranks.

    Args:
        requests: running and waiting.
        tokens: in memory for them, and of the prompts that wait.
        capacity_tokens: that its memory takes; 0 when it does not say.
        mode: ``prefill``, ``decode`` or ``null``; empty when it does not say.
        told_at: its own clock, seconds; of the ranks with work the oldest one's.
        prefill_tokens, prefill_busy_us: computed so far, and how long that took.
    """

    requests: int = 0
    tokens: int = 0
    capacity_tokens: int = 0
    mode: str = ""
    told_at: float = 0.0
    prefill_tokens: int = 0
    prefill_busy_us: int = 0


class Attempt(Protocol):
    """A request under way on an engine."""

    def engine_died(self, engine: Engine) -> None:
        """Do not wait for it any more."""
        ...


class Engine:
    """One engine and its load.

    What is known of its load is what this router has given it, exactly, and of what it reports the
    part that is not ours: requests of other routers.
    """

    def __init__(self, spec: EngineSpec, source: Source) -> None:
        self.spec = spec
        self.source = source
        self.name = spec.name
        self.role: Role = spec.role
        self.node = spec.node or spec.host
        self.draining = False
        self.heard_at: float | None = None
        """When it answered last, monotonic seconds."""
        self.dead = False
        self.model: str | None = None
        """Name of what it serves; empty when it does not say, None while it was not asked."""
        self.foreign_model = False
        """Whether that is another model than the router's."""
        self.reason = ""
        self.since = time.monotonic()
        self.load: Load | None = None
        self.own_requests = 0
        self.own_tokens = 0
        self.foreign_requests = 0
        self.foreign_tokens = 0
        self.compute_rate: float | None = None
        """Prompt tokens a second that a PE computes, measured."""
        self.attempts: set[Attempt] = set()
        self.busy_since = 0.0
        """Since when it has had requests of ours all the time, monotonic seconds."""
        self.refusals = 0
        self.told_changed_at = time.monotonic()

    @property
    def state(self) -> State:
        """What may be done with it."""
        if self.dead:
            return "dead"
        if self.heard_at is None:
            return "starting"
        if self.foreign_model:
            return "other model"
        return "draining" if self.draining else "ready"

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.state == "ready"

    @property
    def requests(self) -> int:
        """seq_e."""
        return self.own_requests + self.foreign_requests

    @property
    def tokens(self) -> int:
        """tok_e."""
        return self.own_tokens + self.foreign_tokens

    def take(self, attempt: Attempt, tokens: int) -> None:
        """A request is given to it."""
        if not self.own_requests:
            self.busy_since = time.monotonic()
        self.own_requests += 1
        self.own_tokens += tokens
        self.attempts.add(attempt)

    def give_back(self, attempt: Attempt, tokens: int) -> None:
        """That request has ended there."""
        self.own_requests -= 1
        self.own_tokens -= tokens
        self.attempts.discard(attempt)

    def as_prefill(self) -> PrefillEngine:
        """For scheduling."""
        return PrefillEngine(self.name, self.node, self.requests, self.tokens)

    def as_decode(self) -> DecodeEngine:
        """For scheduling. A node without a named group is one. Unknown memory is unbounded."""
        capacity = self.load.capacity_tokens if self.load is not None else 0
        free = max(0, capacity - self.tokens) if capacity else 1 << 60
        return DecodeEngine(
            self.name,
            self.node,
            self.spec.group or self.node,
            self.requests,
            self.tokens,
            free,
            capacity or None,
        )

    def as_json(self) -> dict[str, object]:
        """For a person, or a tool."""
        load = self.load
        return {
            "name": self.name,
            "url": self.spec.url,
            "role": self.role,
            "model": self.model,
            "node": self.node,
            "bootstrap_port": self.spec.bootstrap_port if self.role == "prefill" else None,
            "state": self.state,
            "reason": self.reason,
            "source": self.source,
            "requests": self.requests,
            "tokens": self.tokens,
            "own_requests": self.own_requests,
            "own_tokens": self.own_tokens,
            "capacity_tokens": load.capacity_tokens if load else 0,
            "compute_rate": self.compute_rate,
            "heard_s": None
            if self.heard_at is None
            else round(time.monotonic() - self.heard_at, 3),
        }


class Registry:
    """All engines.

    Args:
        model: name of the model that is served; empty for that of the engine that answers first.
            Reports of one store may be of several, and a prefill of one is nothing to another.
        changed: called when a round of placement may go otherwise than the last one.
    """

    def __init__(self, model: str = "", changed: Callable[[], None] = lambda: None) -> None:
        self._model = model
        self._engines: dict[str, Engine] = {}
        self.changed = changed
        self.on_death: Callable[[Engine], None] = lambda _: None
        self._sorted: dict[Role, list[Engine]] = {"prefill": [], "decode": []}

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, name: str) -> Engine | None:
        """By name, None when there is none."""
        return self._engines.get(name)

    def of(self, role: Role) -> list[Engine]:
        """Of one role, in the order of their names."""
        return self._sorted[role]

    def ready(self, role: Role) -> list[Engine]:
        """Those that take requests."""
        return [engine for engine in self.of(role) if engine.ready]

    def add(self, spec: EngineSpec, source: Source) -> Engine:
        """Know an engine. One that is known already stays, unless it is another by now."""
        known = self._engines.get(spec.name)
        if known is not None:
            if known.spec == replace(spec, node=known.spec.node):
                if spec.node and spec != known.spec:
                    known.spec, known.node = spec, spec.node  # only now it is known where it is
                    self.changed()
                return known
            self.remove(spec.name, "it is another one now")
        engine = Engine(spec, source)
        self._engines[engine.name] = engine
        self._sort()
        logger.info("The %s server %s of node %s joins", engine.role, engine.name, engine.node)
        self.changed()
        return engine

    def remove(self, name: str, why: str) -> None:
        """Forget an engine; what it is doing is not waited for."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        self._sort()
        logger.info("The %s server %s leaves: %s", engine.role, name, why)
        self._fail(engine, f"the server was removed: {why}")
        self.changed()

    def _sort(self) -> None:
        ordered = sorted(self._engines.values(), key=lambda e: e.name)
        self._sorted = {
            "prefill": [e for e in ordered if e.role == "prefill"],
            "decode": [e for e in ordered if e.role == "decode"],
        }

    def drain(self, engine: Engine, draining: bool = True) -> None:
        """Give it nothing new."""
        if engine.draining != draining:
            engine.draining = draining
            logger.info(
                "The %s server %s %s", engine.role, engine.name, "drains" if draining else "is back"
            )
            self.changed()

    def mark_dead(self, engine: Engine, reason: str) -> None:
        """Nobody waits for it any more."""
        if not engine.dead:
            logger.warning("The %s server %s is dead: %s", engine.role, engine.name, reason)
            self._fail(engine, reason)
            self.changed()

    def _fail(self, engine: Engine, reason: str) -> None:
        engine.dead, engine.reason, engine.since = True, reason, time.monotonic()
        engine.foreign_requests = engine.foreign_tokens = 0
        engine.model = None  # another may answer there next
        self.on_death(engine)
        for attempt in list(engine.attempts):
            attempt.engine_died(engine)

    def heard(self, engine: Engine, load: Load, own_requests: int, own_tokens: int) -> None:
        """It answered.

        Args:
            own_requests, own_tokens: of ours, when it was asked.
        """
        now = time.monotonic()
        first = engine.heard_at is None
        engine.heard_at, engine.refusals = now, 0
        if engine.load is None or load.told_at != engine.load.told_at or not load.told_at:
            engine.told_changed_at = now
        _measure(engine, load)
        engine.load = load
        # Of ours it may know those of before the question, or those of after it.
        engine.foreign_requests = max(0, load.requests - max(own_requests, engine.own_requests))
        engine.foreign_tokens = max(0, load.tokens - max(own_tokens, engine.own_tokens))
        self._model = self._model or engine.model or ""
        engine.foreign_model = bool(engine.model) and engine.model != self._model
        if engine.foreign_model and (first or engine.dead):
            logger.warning(
                "%s serves %s, not %s, and gets nothing", engine.name, engine.model, self._model
            )
        if first or engine.dead:
            logger.info("The %s server %s answers", engine.role, engine.name)
            engine.dead, engine.reason, engine.since = False, "", now
        self.changed()

    def refused(self, engine: Engine, reason: str, *, at_once: bool = False) -> None:
        """Nobody listens there.

        Args:
            at_once: a request met it, so that there is no doubt.
        """
        engine.refusals += 1
        if at_once or engine.refusals >= _REFUSALS:
            self.mark_dead(engine, reason)


def _measure(engine: Engine, load: Load) -> None:
    """How fast a PE computes, from what it has computed since it was asked last."""
    last = engine.load
    if last is None:
        return
    tokens = load.prefill_tokens - last.prefill_tokens
    busy_s = (load.prefill_busy_us - last.prefill_busy_us) / 1e6
    if tokens > 0 and busy_s > 1e-3:
        rate, weight = tokens / busy_s, min(1.0, busy_s)  # a second of work outweighs the past
        known = engine.compute_rate
        engine.compute_rate = rate if known is None else known + weight * (rate - known)
