"""Asks every engine how it is, again and again: its load, and whether it lives.

An engine is dead when it has not answered for a while (a stopped process keeps its sockets open),
when nobody listens, or when its HTTP server answers and its scheduler has stopped: SGLang's
``GET /v1/loads`` tells what the scheduler published last, and when. A scheduler with work publishes
after each prefill and every few decode steps, so one that has our requests and tells nothing new
for ``stuck_after_s`` is dead to us.

What this process itself has slept through (stopped, swapped out, busy) is nobody else's silence:
after it engines have all their time again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import aiohttp
import orjson

from dualpath_sglang.router.engines import Engine, Load, Registry
from dualpath_sglang.router.options import RouterOptions
from dualpath_sglang.router.upstream import nobody_listens

logger = logging.getLogger(__name__)

_QUERY = "/v1/loads?include=core,disagg"
_TICK_S = 0.1
_LATE_S = 0.1


class LoadError(ValueError):
    """It answered, but not what SGLang answers."""


def parse_loads(body: bytes) -> Load:
    """What ``GET /v1/loads`` says.

    Raises:
        LoadError: it is not that.
    """
    try:
        ranks = orjson.loads(body)["loads"]
        if not ranks:
            return Load()
        # A rank without work may sleep, and then tells nothing new.
        busy = [r for r in ranks if r["num_running_reqs"] + r["num_waiting_reqs"]]
        modes = {(rank.get("disaggregation") or {}).get("mode", "") for rank in ranks}
        return Load(
            requests=sum(r["num_running_reqs"] + r["num_waiting_reqs"] for r in ranks),
            tokens=sum(r["num_total_tokens"] for r in ranks),
            capacity_tokens=sum(r["max_total_num_tokens"] for r in ranks),
            mode=modes.pop() if len(modes) == 1 else "",
            told_at=min(float(r["timestamp"]) for r in busy or ranks),
            prefill_tokens=sum(r.get("total_prefill_uncached_tokens", 0) for r in ranks),
            prefill_busy_us=sum(r.get("total_prefill_busy_us", 0) for r in ranks),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError(f"it says nothing of its load ({error!r:.80})") from None


class Awake:
    """A clock that stands while the event loop does."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._ticked_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on; on an event loop."""
        self._ticked_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Not any more."""
        if self._timer is not None:
            self._timer.cancel()

    def lost_s(self) -> float:
        """Seconds in which the loop stood, in all; also when it has only just come back."""
        return self._lost_s + self._late_s()

    def _late_s(self) -> float:
        late = time.monotonic() - self._ticked_at - _TICK_S
        return late if late > _LATE_S else 0.0

    def _tick(self) -> None:
        self._lost_s += self._late_s()
        self.start()


class LoadPoller:
    """One task an engine; engines come and go.

    Args:
        session: connections to engines.
        watch: called with each answer's round trip in seconds.
    """

    def __init__(
        self,
        registry: Registry,
        session: aiohttp.ClientSession,
        options: RouterOptions,
        watch: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._session = session
        self._options = options
        self._watch = watch
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._wake: dict[Engine, asyncio.Event] = {}
        self._awake = Awake()
        self._awake.start()

    def follow(self) -> None:
        """Ask those that are known, and no others."""
        known = set(self._registry)
        for engine in known - self._tasks.keys():
            self._wake[engine] = asyncio.Event()
            self._tasks[engine] = asyncio.create_task(self._follow(engine))
        for engine in self._tasks.keys() - known:
            self._tasks.pop(engine).cancel()
            self._wake.pop(engine, None)

    def ask_now(self, engine: Engine) -> None:
        """There is doubt about it."""
        if engine in self._wake:
            self._wake[engine].set()

    async def close(self) -> None:
        """Ask nobody any more."""
        self._awake.stop()
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, engine: Engine) -> None:
        wake = self._wake[engine]
        began = time.monotonic()
        lost, dead_after = self._awake.lost_s(), self._options.dead_after_s
        while True:
            asked, answered = time.monotonic(), engine.heard_at
            heard = began if answered is None else answered
            silent = asked - heard - (self._awake.lost_s() - lost)
            within = dead_after if engine.dead else max(0.1, dead_after - silent)
            problem = f"no answer for {dead_after:g} s"
            try:
                await self._ask(engine, within)
            except LoadError as error:
                problem = str(error)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.debug("%s: %r", engine.name, error)
                if nobody_listens(error):
                    self._registry.refused(engine, "nobody listens there")
            except Exception:
                logger.exception("Asking %s for its load failed", engine.name)
            now = time.monotonic()
            if engine.heard_at != answered:
                lost = self._awake.lost_s()
            heard = began if engine.heard_at is None else engine.heard_at
            if now - heard - (self._awake.lost_s() - lost) >= dead_after:
                self._registry.mark_dead(engine, problem)
            elif engine.heard_at != answered and self._stuck(engine, now):
                self._registry.mark_dead(
                    engine, f"its scheduler stands still for {self._options.stuck_after_s:g} s"
                )
            wake.clear()
            left = max(0.01, self._options.poll_interval_s - (now - asked))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), left)

    def _stuck(self, engine: Engine, now: float) -> bool:
        limit = self._options.stuck_after_s
        return (
            engine.own_requests > 0
            and now - engine.busy_since >= limit
            and now - engine.told_changed_at >= limit
        )

    async def _ask(self, engine: Engine, within_s: float) -> None:
        own_requests, own_tokens = engine.own_requests, engine.own_tokens
        began = time.monotonic()
        within = aiohttp.ClientTimeout(total=within_s)
        headers = {}
        if self._options.engine_key:
            headers["Authorization"] = f"Bearer {self._options.engine_key}"
        async with self._session.get(
            engine.spec.url + _QUERY, headers=headers, timeout=within
        ) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise LoadError(f"status {answer.status}")
        load = parse_loads(body)
        if load.mode and load.mode != engine.role:
            raise LoadError(f"it is no {engine.role} server: its mode is {load.mode}")
        if engine.dead and engine.load is not None and self._still_stuck(engine, load):
            return
        if engine.model is None:
            engine.model = await self._model(engine, headers, within)
        self._watch(time.monotonic() - began)
        self._registry.heard(engine, load, own_requests, own_tokens)

    async def _model(
        self, engine: Engine, headers: dict[str, str], within: aiohttp.ClientTimeout
    ) -> str:
        """The name of what it serves; empty when it does not say."""
        async with self._session.get(
            f"{engine.spec.url}/v1/models", headers=headers, timeout=within
        ) as answer:
            body = await answer.read()
        try:
            return str(orjson.loads(body)["data"][0]["id"]) if answer.status == 200 else ""
        except (ValueError, TypeError, LookupError):
            return ""

    @staticmethod
    def _still_stuck(engine: Engine, load: Load) -> bool:
        """Its HTTP server answered all along."""
        return (
            "stands still" in engine.reason
            and engine.load is not None
            and bool(load.told_at)
            and load.told_at == engine.load.told_at
        )
