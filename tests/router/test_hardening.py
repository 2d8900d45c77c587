"""What must not go wrong in a router: found by review, each once a fault."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import aiohttp
import orjson
import pytest

from dualpath_sglang.router.loads import parse_loads
from dualpath_sglang.router.options import EngineSpec
from dualpath_sglang.router.upstream import failed
from tests.router.bed import asynchronous, bed, stub_process, until

TEN = {"max_new_tokens": 10}


def connector_error(number: int) -> aiohttp.ClientConnectorError:
    key: Any = None
    return aiohttp.ClientConnectorError(key, OSError(number, "so"))


def test_only_a_refusal_says_that_nobody_is_there() -> None:
    assert failed("decode", connector_error(errno.ECONNREFUSED)).failure == "refused"
    # Our own lack of descriptors or ports, or a slow handshake, is no death of an engine.
    for ours in (
        connector_error(errno.EMFILE),
        connector_error(errno.EADDRNOTAVAIL),
        aiohttp.ConnectionTimeoutError(),
    ):
        assert failed("decode", ours).failure == "connect"


@pytest.mark.parametrize("polls", [False, True])
@asynchronous
async def test_a_router_without_file_descriptors_does_not_take_engines_for_dead(
    polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(dead_after_s=20.0, attempts=1) as b:
        session = b.router._session
        real: Any = session._request

        async def out_of_descriptors(method: str, url: Any, **given: Any) -> Any:
            if "/v1/loads" in str(url) and not polls:
                return await real(method, url, **given)
            raise connector_error(errno.EMFILE)

        monkeypatch.setattr(session, "_request", out_of_descriptors)
        assert (await b.generate())[0] == 503
        await asyncio.sleep(0.3)
        assert not any(engine.dead for engine in b.router.registry)
        assert await b.metric("dualpath_router_engine_deaths_total") == 0
        monkeypatch.undo()
        assert (await b.generate())[0] == 200


@asynchronous
async def test_what_a_router_sleeps_through_itself_is_no_engines_silence() -> None:
    slow = {"token_s": 0.2}
    with stub_process("prefill") as prefill, stub_process("decode", **slow) as decode:
        engines = tuple(EngineSpec(s.url, s.role, s.port) for s in (prefill, decode))  # type: ignore[arg-type]
        async with bed(0, 0, extra=engines, dead_after_s=1.0, poll_interval_s=0.1) as b:
            asked = asyncio.create_task(b.events("/generate", text="a", sampling_params=TEN))
            decoding = b.router.registry.of("decode")[0]
            await until(lambda: decoding.own_requests > 0)
            for _ in range(3):  # at whatever point of the polls
                time.sleep(1.1)  # nothing runs meanwhile
                await asyncio.sleep(0.03)
            told = await asked
            deaths = await b.metric("dualpath_router_engine_deaths_total")
        assert told[-1] == "[DONE]"
        assert not any("error" in event for event in told[:-1])
        assert deaths == 0


def test_a_rank_without_work_may_sleep() -> None:
    def loads(busy_at: float) -> bytes:
        ranks = [
            {"num_running_reqs": n, "num_waiting_reqs": 0, "num_total_tokens": 1}
            | {"max_total_num_tokens": 9, "timestamp": at}
            for n, at in ((0, 5.0), (1, busy_at))
        ]
        return orjson.dumps({"loads": ranks})

    assert parse_loads(loads(100.0)).told_at == 100.0
    assert parse_loads(loads(101.0)).told_at == 101.0
    assert parse_loads(loads(3.0)).told_at == 3.0
