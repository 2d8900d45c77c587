"""A router and its stubs on one event loop, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.router.app import Router, listening
from dualpath_sglang.router.options import EngineSpec, RouterOptions
from tests.router.stub import Stub, serving
from tests.support.processes import REPOSITORY

WAIT_S = 20.0


@dataclass
class Bed:
    """What stands."""

    router: Router
    url: str
    prefill: list[Stub]
    decode: list[Stub]
    http: aiohttp.ClientSession

    @property
    def stubs(self) -> list[Stub]:
        return [*self.prefill, *self.decode]

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, text: str = "a b c", tokens: int = 4, **body: Any) -> tuple[int, Any]:
        params = {"max_new_tokens": tokens}
        return await self.post("/generate", **{"text": text, "sampling_params": params, **body})

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Of a stream, parsed; [DONE] as text."""
        found = []
        async with self.http.post(self.url + path, json={"stream": True, **body}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip().decode()
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        rows = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    async def is_empty(self) -> bool:
        """Whether nothing is counted anywhere any more."""
        engines = list(self.router.registry)
        return (
            not len(self.router.forwarder)
            and not len(self.router.dispatcher)
            and not any(e.own_requests or e.own_tokens or e.attempts for e in engines)
            and not self.router.reads.promised
            and not self.router.forwarder._by_rid
        )


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def until(what: Callable[[], bool | Awaitable[bool]], timeout_s: float = WAIT_S) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + timeout_s
    while True:
        found = what()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)


def spec(stub: Stub, node: str = "") -> EngineSpec:
    return EngineSpec(stub.url, stub.role, stub.port, node)


@contextlib.asynccontextmanager
async def bed(
    prefills: int = 1,
    decodes: int = 1,
    *,
    config: DualPathConfig | None = None,
    nodes: bool = True,
    extra: tuple[EngineSpec, ...] = (),
    ready: bool = True,
    **options: Any,
) -> AsyncIterator[Bed]:
    """A router over new stubs, when all of them have answered."""
    async with contextlib.AsyncExitStack() as stack:
        roles = ["prefill"] * prefills + ["decode"] * decodes
        stubs = [await stack.enter_async_context(serving(role)) for role in roles]
        specs = tuple(spec(stub, f"node{i}" if nodes else "") for i, stub in enumerate(stubs))
        given = {"poll_interval_s": 0.05, "dead_after_s": 1.0, **options}
        made = RouterOptions(port=0, engines=(*specs, *extra), **given)
        router = await stack.enter_async_context(Router(made, config))
        _, _, port = await stack.enter_async_context(listening(router))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        here = Bed(router, f"http://127.0.0.1:{port}", stubs[:prefills], stubs[prefills:], http)
        if ready:
            await until(lambda: all(e.heard_at is not None for e in router.registry))
        yield here


class StubProcess:
    """A stub in a process of its own, that can be stopped and killed."""

    def __init__(self, role: str, **behaviour: Any) -> None:
        self.role = role
        more = ["--behaviour", json.dumps(behaviour)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.stub", "--role", role, *more],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def stub_process(role: str, **behaviour: Any) -> Iterator[StubProcess]:
    """A stub in a process of its own."""
    stub = StubProcess(role, **behaviour)
    try:
        yield stub
    finally:
        stub.close()
