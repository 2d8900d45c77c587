"""Engines are started, join, drain, hang, die and leave under steady load, again and again: every
request is answered, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.router.bed import Bed, StubProcess, bed, until
from tests.router.stub import Behaviour

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SECONDS = float(os.environ.get("TEST_CHURN_S", "120"))
CLIENTS = 24
SPEED = {"prefill_s": 0.01, "token_s": 0.005}
DEAD_AFTER_S = 3.0
"""All of this is one process and its children, on a machine that does other things too."""
MOST = 2
"""Engines of a role beside the one that always stays."""
LONGEST_S = 30.0


@dataclass
class Seen:
    """What clients got."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    texts: list[str] = field(default_factory=list)


async def client(here: Bed, number: int, seen: Seen, told: asyncio.Event) -> None:
    """One, with sessions of its own; now and then it goes away in the middle."""
    source = random.Random(number)
    while not told.is_set():
        session = f"{number}-{source.randrange(20)}"
        body: dict[str, Any] = {
            "text": f"{session} " + "word " * source.randrange(5, 60),
            "sampling_params": {"max_new_tokens": 4},
            "stream": source.random() < 0.4,
        }
        impatient = source.random() < 0.1
        total = source.uniform(0.0, 0.05) if impatient else 2 * LONGEST_S
        began = time.monotonic()
        try:
            async with here.http.post(
                here.url + "/generate",
                json=body,
                headers={"x-dualpath-session": session},
                timeout=aiohttp.ClientTimeout(total=total),
            ) as answer:
                text = await answer.text()
                if answer.status != 200:
                    outcome = "error"
                elif body["stream"] and '"error"' in text:
                    outcome = "broken"
                else:
                    outcome = "ok" if "w0 w1 w2 w3" in text else "wrong"
                if outcome != "ok":
                    seen.texts.append(text[-300:])
        except TimeoutError:
            outcome = "left" if impatient else "hangs"
        seen.outcomes[outcome] += 1
        seen.longest_s = max(seen.longest_s, time.monotonic() - began)


class Churn:
    """Engines in processes of their own come and go."""

    def __init__(self, here: Bed, stack: ExitStack) -> None:
        self._here = here
        self._stack = stack
        self._random = random.Random(5)
        self._ways = itertools.cycle(("kill", "stop", "drain", "reborn"))
        self.engines: list[StubProcess] = []
        self.done: Counter[str] = Counter()

    async def step(self) -> None:
        """Something happens to one of them."""
        role = self._random.choice(("prefill", "decode"))
        mine = [engine for engine in self.engines if engine.role == role]
        if len(mine) < MOST:
            await self._join(role)
            return
        engine = self._random.choice(mine)
        how = next(self._ways)
        self.done[how] += 1
        await getattr(self, f"_{how}")(engine)

    async def end(self) -> None:
        """All of them leave."""
        for engine in list(self.engines):
            await self._leave(engine)

    async def _join(self, role: str) -> None:
        engine = await asyncio.to_thread(StubProcess, role, transfer=True, **SPEED)
        self._stack.callback(engine.close)
        self.engines.append(engine)
        await self._here.post(
            "/engines", url=engine.url, role=role, bootstrap_port=engine.port, node=engine.name
        )
        self.done["join"] += 1

    async def _kill(self, engine: StubProcess) -> None:
        """It is removed when somebody has noticed."""
        await asyncio.to_thread(engine.close)
        await asyncio.sleep(0.5)
        await self._remove(engine)

    async def _stop(self, engine: StubProcess) -> None:
        """Longer than a router waits; then it goes on with what it had."""
        engine.send(signal.SIGSTOP)
        await asyncio.sleep(DEAD_AFTER_S + 1.0)
        engine.send(signal.SIGCONT)

    async def _drain(self, engine: StubProcess) -> None:
        """In order: it gets nothing new, and leaves when it is done."""
        await self._here.post(f"/engines/{engine.name}/drain")
        known = self._here.router.registry.get(engine.name)
        assert known is not None
        await until(lambda: known.dead or not known.own_requests)
        await self._leave(engine)

    async def _leave(self, engine: StubProcess) -> None:
        """At once, in the middle of what it does."""
        await self._remove(engine)
        await asyncio.to_thread(engine.close)

    async def _reborn(self, engine: StubProcess) -> None:
        """It leaves, and another takes its place."""
        await self._leave(engine)
        await self._join(engine.role)

    async def _remove(self, engine: StubProcess) -> None:
        if engine in self.engines:
            self.engines.remove(engine)
        async with self._here.http.delete(f"{self._here.url}/engines/{engine.name}") as answer:
            await answer.read()


def held() -> dict[str, int]:
    """What would grow if something leaked."""
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
    }


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    asyncio.run(asyncio.wait_for(_churn(), SECONDS + 240))


async def _churn() -> None:
    with ExitStack() as stack:
        async with bed(1, 1, sessions=200, dead_after_s=DEAD_AFTER_S) as here:
            for stub in here.stubs:
                stub.do = Behaviour(transfer=True, **SPEED)
            churn, seen, told = Churn(here, stack), Seen(), asyncio.Event()
            await asyncio.sleep(1.0)
            before = held()
            clients = [
                asyncio.create_task(client(here, number, seen, told)) for number in range(CLIENTS)
            ]
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                await churn.step()
                await asyncio.sleep(0.05)
            await churn.end()
            told.set()
            await asyncio.gather(*clients)
            print(f"{dict(churn.done)} {dict(seen.outcomes)}, longest {seen.longest_s:.1f} s")
            _check(seen, churn)
            await until(here.is_empty)
            await until(lambda: not any(stub.running for stub in here.stubs))
            await until(lambda: len(here.router.aborter) == 0)
            assert [engine.name for engine in here.router.registry] == [
                stub.name for stub in here.stubs
            ]
            assert len(here.router.sessions) <= 200
            await here.http.close()  # with the connections of the clients
            await until(lambda: held()["files"] <= before["files"] + 4, 30.0)
            await until(lambda: held()["tasks"] <= before["tasks"] + 2, 30.0)


def _check(seen: Seen, churn: Churn) -> None:
    assert {"join", "kill", "stop", "drain", "reborn"} <= set(churn.done)
    assert seen.outcomes["ok"] > 200
    assert not seen.outcomes["wrong"], seen.texts
    assert not seen.outcomes["hangs"]
    # One engine of each role always stays: whoever is not in the middle of a stream is served.
    assert not seen.outcomes["error"], seen.texts
    assert seen.longest_s < LONGEST_S
