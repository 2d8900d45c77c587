"""Stub engines: aiohttp servers that speak SGLang 0.5.23's wire forms as far as a router sees them.

What they take and answer is read from SGLang's source: ``/generate`` and the OpenAI endpoints with
and without streams, the bootstrap fields, ``/abort_request`` by prefix of a rid that is known,
``/v1/loads``. A decode stub waits for its prefill stub as SGLang's does: it asks at the bootstrap
address for the room, and when nobody answers there it waits until it is told to abort.

Run as a process: ``python -m tests.router.stub --role prefill --port 0``; the port is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

CAPACITY = 1_000_000


@dataclass
class Behaviour:
    """What a stub does with the next requests; changed in place, or by ``POST /behave``."""

    prefill_s: float = 0.0
    token_s: float = 0.0
    tokens: int = 4
    status: int = 0
    """Answers requests so."""
    fail_next: int = 0
    """How many more requests fail with status 500."""
    fail_s: float = 0.0
    """After how long."""
    abort_first: bool = False
    """A stream begins with an abort, as after a failed transfer."""
    die_after: int = -1
    """A stream's connection is cut after so many tokens."""
    hang: bool = False
    """Requests are taken and never answered."""
    rendezvous: bool = True
    transfer: bool = False
    """A prefill stub answers when decode has been told, as SGLang's does after the transfer."""
    frozen: bool = False
    """/v1/loads goes on telling what it told last: the scheduler stands still."""
    foreign_requests: int = 0
    foreign_tokens: int = 0
    capacity: int = CAPACITY
    model: str = "tiny"
    prompt_tokens: int = 0
    """Told in answers; 0: one a word."""


@dataclass
class Stub:
    """One engine."""

    role: str
    do: Behaviour = field(default_factory=Behaviour)
    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)
    """(rid, how) of requests that are over: answered, aborted, cancelled, failed."""
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    """By rid: set when aborted."""
    rooms: dict[int, asyncio.Event] = field(default_factory=dict)
    _loads: dict[str, Any] | None = None
    _client: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._v1_loads)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/room/{room}", self._room)
        app.router.add_post("/behave", self._behave)
        app.router.add_get("/seen", self._seen)
        return app

    # -- endpoints ----------------------------------------------------------------------------

    async def _behave(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            assert hasattr(self.do, name)
            setattr(self.do, name, value)
        return web.json_response({})

    async def _seen(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "seen": self.seen,
                "aborts": self.aborts,
                "ended": self.ended,
                "running": list(self.running),
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self.do.model, "object": "model"}]}
        )

    async def _v1_loads(self, request: web.Request) -> web.Response:
        if self._loads is None or not self.do.frozen:
            requests = len(self.running) + self.do.foreign_requests
            rank = {
                "timestamp": time.time(),
                "dp_rank": 0,
                "num_running_reqs": requests,
                "num_waiting_reqs": 0,
                "num_used_tokens": self.do.foreign_tokens,
                "num_total_tokens": self.do.foreign_tokens,
                "max_total_num_tokens": self.do.capacity,
                "total_prefill_uncached_tokens": 0,
                "total_prefill_busy_us": 0,
                "disaggregation": {"mode": self.role},
            }
            self._loads = {"timestamp": "now", "version": "0.5.23", "loads": [rank]}
        return web.json_response(self._loads)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        if rid in self.running:
            for other, told in self.running.items():
                if other.startswith(rid):
                    told.set()
        return web.Response()

    async def _room(self, request: web.Request) -> web.StreamResponse:
        room = int(request.match_info["room"])
        await self._event(room).wait()
        response = web.Response()
        await response.prepare(request)
        await response.write_eof()
        self._event(-room - 1).set()
        return response

    async def _sent(self, room: int, told: asyncio.Event) -> bool:
        """Whether decode has been told; False when aborted."""
        waits = [asyncio.create_task(e.wait()) for e in (self._event(-room - 1), told)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not told.is_set()

    def _event(self, room: int) -> asyncio.Event:
        return self.rooms.setdefault(room, asyncio.Event())

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        rids = body["rid"] if isinstance(body["rid"], list) else [body["rid"]]
        assert not set(rids) & set(self.running), "a rid that is in use"
        told = asyncio.Event()
        for rid in rids:
            self.running[rid] = told
        how = "cancelled"
        try:
            response, how = await self._answer(request, body, told)
            return response
        finally:
            for rid in rids:
                self.running.pop(rid, None)
                self.ended.append((rid, how))

    # -- answers ------------------------------------------------------------------------------

    async def _answer(
        self, request: web.Request, body: dict[str, Any], told: asyncio.Event
    ) -> tuple[web.StreamResponse, str]:
        do = self.do
        if do.fail_next > 0:
            do.fail_next -= 1
            await asyncio.sleep(do.fail_s)
            return web.json_response({"detail": "a stub was told to fail"}, status=500), "failed"
        if do.status:
            error = {"object": "error", "message": "a stub was told so", "code": do.status}
            return web.json_response(error, status=do.status), "failed"
        if do.hang:
            await told.wait()
            return self._aborted(request, body), "aborted"
        room = body["bootstrap_room"]
        if self.role == "prefill":
            if await _either(told, do.prefill_s):
                return self._aborted(request, body), "aborted"
            self._event(room).set()
            if do.transfer and not await self._sent(room, told):
                return self._aborted(request, body), "aborted"
            return web.json_response(self._whole(request.path, body, 1)), "answered"
        if do.rendezvous and not await self._met(body, told):
            return self._aborted(request, body), "aborted"
        if body.get("stream"):
            return await self._stream(request, body, told)
        if await _either(told, do.token_s * self._wanted(body)):
            return self._aborted(request, body), "aborted"
        return web.json_response(self._whole(request.path, body, self._wanted(body))), "answered"

    async def _met(self, body: dict[str, Any], told: asyncio.Event) -> bool:
        """Whether the prefill is done; False when aborted."""
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}"

        async def ask() -> None:
            if self._client is None:
                self._client = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                )
            try:
                async with self._client.get(f"{url}/room/{body['bootstrap_room']}") as answer:
                    await answer.read()
            except aiohttp.ClientError:
                await asyncio.sleep(300)

        asking, aborted = asyncio.create_task(ask()), asyncio.create_task(told.wait())
        try:
            await asyncio.wait({asking, aborted}, return_when=asyncio.FIRST_COMPLETED)
            return not aborted.done()
        finally:
            asking.cancel()
            aborted.cancel()

    def _wanted(self, body: dict[str, Any]) -> int:
        params = body.get("sampling_params") or {}
        params = params[0] if isinstance(params, list) else params
        return params.get("max_new_tokens") or body.get("max_tokens") or self.do.tokens

    def _aborted(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        reason = {"type": "abort", "message": "Abort before prefill"}
        told = self._whole(request.path, body, 0)
        for item in told if isinstance(told, list) else [told]:
            if "meta_info" in item:
                item["meta_info"]["finish_reason"] = reason
            for choice in item.get("choices", ()):
                choice["finish_reason"] = "abort"
        return web.json_response(told)

    def _meta(self, body: dict[str, Any], rid: str, tokens: int, prompt: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid,
            "prompt_tokens": self.do.prompt_tokens or _tokens_of(prompt),
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": tokens},
        }
        if body.get("return_logprob"):
            size = _tokens_of(prompt) if self.role == "prefill" else 1
            meta["input_token_logprobs"] = [[-0.5, i, self.role] for i in range(size)]
        return meta

    def _whole(self, path: str, body: dict[str, Any], tokens: int) -> Any:
        text = " ".join(f"w{i}" for i in range(tokens))
        if path == "/generate":
            prompts = body.get("text", body.get("input_ids"))
            if isinstance(body["rid"], list):
                return [
                    {"text": text, "meta_info": self._meta(body, rid, tokens, prompt)}
                    for rid, prompt in zip(body["rid"], prompts, strict=True)
                ]
            return {"text": text, "meta_info": self._meta(body, body["rid"], tokens, prompts)}
        prompts = body.get("prompt") or body["messages"]
        rid = body["rid"] if isinstance(body["rid"], str) else body["rid"][0]
        choice = {"index": 0, "finish_reason": "length"}
        chat = path.endswith("chat/completions")
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": self.do.prompt_tokens or _tokens_of(prompts)}
        return {"id": rid, "choices": [choice], "usage": usage}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], told: asyncio.Event
    ) -> tuple[web.StreamResponse, str]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")

        async def send(event: Any) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())

        rid = body["rid"]
        if chat:
            await send(
                {
                    "id": rid,
                    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                }
            )
        if self.do.abort_first:
            if request.path == "/generate":
                meta = {
                    "id": rid,
                    "finish_reason": {
                        "type": "abort",
                        "status_code": 500,
                        "message": "KVTransferError",
                    },
                }
                await send({"text": "", "meta_info": meta})
            else:
                await send({"error": {"message": "KVTransferError", "code": 500}})
            await send("[DONE]")
            await response.write_eof()
            return response, "failed"
        words: list[str] = []
        for i in range(self._wanted(body)):
            if i == self.do.die_after:
                assert request.transport is not None
                request.transport.abort()
                return response, "failed"
            if await _either(told, self.do.token_s):
                await send(
                    {
                        "text": " ".join(words),
                        "meta_info": {"id": rid, "finish_reason": {"type": "abort"}},
                    }
                )
                await send("[DONE]")
                await response.write_eof()
                return response, "aborted"
            words.append(f"w{i}")
            if request.path == "/generate":
                meta = self._meta(body, rid, i + 1, body.get("text", body.get("input_ids")))
                await send({"text": " ".join(words), "meta_info": meta, "at": time.monotonic()})
            else:
                said = {"delta": {"content": f"w{i} "}} if chat else {"text": f"w{i} "}
                await send({"id": rid, "choices": [{"index": 0, **said}], "at": time.monotonic()})
        await send("[DONE]")
        await response.write_eof()
        return response, "answered"


def _tokens_of(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.split())
    return len(prompt) if prompt and isinstance(prompt[0], int) else 1


async def _either(told: asyncio.Event, seconds: float) -> bool:
    """Wait; True when told before."""
    if seconds <= 0:
        return told.is_set()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(told.wait(), seconds)
    return told.is_set()


@contextlib.asynccontextmanager
async def serving(role: str, port: int = 0, **behaviour: Any) -> AsyncIterator[Stub]:
    """A stub on this event loop."""
    stub = Stub(role, Behaviour(**behaviour))
    runner = web.AppRunner(stub.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    stub.port = runner.addresses[0][1]
    try:
        yield stub
    finally:
        if stub._client is not None:
            await stub._client.close()
        await runner.cleanup()


async def _main(role: str, port: int, behaviour: dict[str, Any]) -> None:
    async with serving(role, port, **behaviour) as stub:
        print(stub.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", default="{}")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(given.role, given.port, json.loads(given.behaviour)))
