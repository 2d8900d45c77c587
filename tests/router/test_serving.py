"""Requests through a router to stub engines, when nothing goes wrong."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.router.bed import bed, until


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


BODIES = {
    "/generate": {"text": "one two", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"model": "tiny", "prompt": "one two", "max_tokens": 3},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 3,
    },
}


def said(path: str, told: Any) -> str:
    if path == "/generate":
        return str(told["text"])
    choice = told["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_both_sides_get_the_request_and_the_client_the_decode_answer(path: str) -> None:
    async with bed() as b:
        status, told = await b.post(path, **BODIES[path])
        assert status == 200
        assert said(path, told) == "w0 w1 w2"
        (prefill,), (decode,) = b.prefill[0].seen, b.decode[0].seen
        assert b.prefill[0].paths == b.decode[0].paths == [path]
        for name in ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
            assert prefill[name] == decode[name]
        assert (decode["bootstrap_host"], decode["bootstrap_port"]) == (
            "127.0.0.1",
            b.prefill[0].port,
        )
        assert 0 <= decode["bootstrap_room"] < 1 << 63
        for name, value in BODIES[path].items():
            assert prefill[name] == decode[name] == value
        await until(b.is_empty)


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_a_stream_is_passed_on_byte_for_byte(path: str) -> None:
    async with bed() as b:
        events = await b.events(path, **BODIES[path], stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        texts = json.dumps(events)
        assert [f"w{i}" in texts for i in range(4)] == [True, True, True, False]
        assert b.decode[0].seen[0]["stream"] is True
        assert "stream_options" in b.decode[0].seen[0]
        assert b.prefill[0].seen[0]["stream"] is False
        assert "stream_options" not in b.prefill[0].seen[0]
        await until(b.is_empty)
