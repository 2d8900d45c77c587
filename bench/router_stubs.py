"""Engines without a model, for ``bench.router``: they answer as SGLang does, after fixed times.

``python -m bench.router_stubs PREFILL DECODE``: so many of each in one process; their ports are
printed as JSON. A prefill takes 5 ms; decode sends ``max_tokens`` tokens, 10 ms apart.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import orjson
from aiohttp import web

PREFILL_S = 0.005
TOKEN_S = 0.010


def loads(
    role: str, requests: int = 0, tokens: int = 0, capacity: int = 100_000_000
) -> web.Response:
    """``GET /v1/loads``."""
    rank = {
        "timestamp": time.time(),
        "num_running_reqs": requests,
        "num_waiting_reqs": 0,
        "num_total_tokens": tokens,
        "max_total_num_tokens": capacity,
        "disaggregation": {"mode": role},
    }
    return web.json_response({"loads": [rank]})


class Engine:
    """One of either role."""

    def __init__(self, role: str) -> None:
        self.role = role

    def app(self) -> web.Application:
        """What it serves."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.serve)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/v1/loads", self.loads)
        return app

    async def loads(self, request: web.Request) -> web.Response:
        del request
        return loads(self.role)

    async def abort(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """A chat."""
        body = orjson.loads(await request.read())
        await asyncio.sleep(PREFILL_S)
        if self.role == "prefill" or not body["stream"]:
            if self.role == "decode":
                await asyncio.sleep(TOKEN_S * body["max_tokens"])
            choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "length"}
            told = {"id": body["rid"], "choices": [choice], "usage": {"prompt_tokens": 900}}
            return web.Response(body=orjson.dumps(told), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(TOKEN_S)
            choice = {"index": 0, "delta": {"content": "word "}}
            event = {"id": body["rid"], "at": time.monotonic(), "choices": [choice]}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def main(prefill: int, decode: int) -> None:
    """Serve until killed."""
    ports: dict[str, list[int]] = {"prefill": [], "decode": []}
    for role in ["prefill"] * prefill + ["decode"] * decode:
        runner = web.AppRunner(Engine(role).app(), access_log=None, keepalive_timeout=3600)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ports[role].append(runner.addresses[0][1])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


def run() -> None:
    """With the faster loop where it is installed."""
    counts = [int(text) for text in sys.argv[1:3]]
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(*counts))
    else:
        uvloop.run(main(*counts))


if __name__ == "__main__":
    run()
