"""Prefill and decode engines without a model, for ``bench.pd_placement``.

They answer ``/generate`` as SGLang's do as far as a router sees, after times that a simple model
gives: a node's storage NIC reads hits one after the other, a PE computes misses one after the
other, and a DE makes tokens more slowly the more tokens it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from bench.router_stubs import loads
from dualpath_sglang.read_hint import from_kv_hints

CAPACITY = 400_000


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second of a node's storage NIC and of a PE; seconds a token of an idle DE, and how
    many tokens in its memory make it half as fast."""

    read: float = 8_000.0
    prefill: float = 5_000.0
    token_s: float = 0.01
    half: float = 60_000.0


class Line:
    """One thing at a time, in the order of arrival."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.done = 0.0

    async def serve(self, amount: float, rate: float) -> None:
        """Wait until that much is done."""
        loop = asyncio.get_running_loop()
        self._free_at = max(loop.time(), self._free_at) + amount / rate
        self.done += amount
        await asyncio.sleep(self._free_at - loop.time())


@dataclass
class World:
    """All engines, on one event loop, and what they share."""

    speeds: Speeds = field(default_factory=Speeds)
    storage: dict[str, Line] = field(default_factory=dict)
    """By node."""
    known: dict[str, int] = field(default_factory=dict)
    """Tokens in the store, by session."""
    rooms: dict[int, asyncio.Event] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)

    def room(self, number: int) -> asyncio.Event:
        """Set when the prefill is done."""
        return self.rooms.setdefault(number, asyncio.Event())

    def reset(self) -> None:
        """As new."""
        self.known.clear()
        self.rooms.clear()
        for line in self.storage.values():
            line.done = 0.0


class Engine:
    """One, on a node of its own."""

    def __init__(self, world: World, role: str, node: str) -> None:
        self.role, self.node, self.port = role, node, 0
        self.outstanding = 0
        """Tokens of requests that have not ended here."""
        self._requests = 0
        self._world = world
        self._compute = Line()
        world.storage[node] = Line()
        world.engines.append(self)

    def app(self) -> web.Application:
        """What it serves."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        return app

    async def _abort(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        del request
        return loads(self.role, self._requests, self.outstanding, CAPACITY)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        tokens = len(body["input_ids"])
        self.outstanding += tokens
        self._requests += 1
        try:
            if self.role == "prefill":
                return await self._prefill(body, tokens)
            return await self._decode(request, body)
        finally:
            self.outstanding -= tokens
            self._requests -= 1

    async def _prefill(self, body: dict[str, Any], tokens: int) -> web.Response:
        world, session = self._world, body["session_id"]
        hit = min(world.known.get(session, 0), tokens)
        if hit:
            hint = from_kv_hints(body.get("kv_hints"))
            shares = hint.shares if hint is not None else ((self.node, 1.0),)
            reads = [
                world.storage[node].serve(hit * share, world.speeds.read) for node, share in shares
            ]
            await asyncio.gather(*reads)
        await self._compute.serve(tokens - hit, world.speeds.prefill)
        world.known[session] = tokens
        world.room(body["bootstrap_room"]).set()
        meta = {"prompt_tokens": tokens, "cached_tokens": hit, "finish_reason": {"type": "length"}}
        return web.json_response({"text": "x", "output_ids": [1], "meta_info": meta})

    async def _decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        room = body["bootstrap_room"]
        await self._world.room(room).wait()
        del self._world.rooms[room]
        speeds = self._world.speeds
        for number in range(body["sampling_params"]["max_new_tokens"]):
            told = {"text": "x", "output_ids": [number], "meta_info": {"finish_reason": None}}
            await response.write(f"data: {json.dumps(told)}\n\n".encode())
            await asyncio.sleep(speeds.token_s * (1 + self.outstanding / speeds.half))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@asynccontextmanager
async def engines(prefills: int, decodes: int, speeds: Speeds) -> AsyncIterator[World]:
    """So many, on this event loop."""
    world = World(speeds)
    async with AsyncExitStack() as stack:
        for number in range(prefills + decodes):
            role, of = ("prefill", number) if number < prefills else ("decode", number - prefills)
            engine = Engine(world, role, f"{role[0]}{of}")
            runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.port = runner.addresses[0][1]
        yield world
