"""What becomes of requests when engines fail, stop, stand still or die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import Any

import aiohttp
import pytest

from dualpath_sglang.router.options import EngineSpec
from tests.router.bed import Bed, StubProcess, asynchronous, bed, stub_process, until
from tests.router.test_serving import BODIES, said


def spec(stub: StubProcess) -> EngineSpec:
    return EngineSpec(stub.url, stub.role, stub.port, stub.role)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_a_request_that_an_engine_fails_is_placed_again_elsewhere(
    role: str, stream: bool, path: str
) -> None:
    async with bed(2, 2) as b:
        failing = b.prefill if role == "prefill" else b.decode
        for stub in failing:  # whichever is first
            stub.do.fail_next = 1
        # The next one it is placed on must not fail: only the first of them does.
        task = asyncio.create_task(
            b.events(path, **BODIES[path]) if stream else b.post(path, **BODIES[path])
        )
        await until(lambda: any(s.do.fail_next == 0 for s in failing) or task.done())
        for stub in failing:
            stub.do.fail_next = 0
        told: Any = await task
        if stream:
            assert told[-1] == "[DONE]"
            assert "w2" in json.dumps(told)
        else:
            assert told[0] == 200
            assert said(path, told[1]) == "w0 w1 w2"
        assert await b.metric("dualpath_router_retries_total") in (1, 2)
        rids = [body["rid"] for stub in b.decode for body in stub.seen]
        rooms = [body["bootstrap_room"] for stub in b.decode for body in stub.seen]
        assert len(set(rids)) == len(rids)
        assert len(set(rooms)) == len(rooms)
        await until(b.is_empty)
        await until(lambda: not any(stub.running for stub in b.stubs))


@asynchronous
async def test_decode_is_told_to_abort_when_prefill_fails() -> None:
    async with bed(1, 1, attempts=1) as b:
        b.prefill[0].do.fail_next, b.prefill[0].do.fail_s = 1, 0.2
        status, told = await b.generate()
        assert status == 500
        assert "the prefill server answered 500" in told["error"]["message"]
        await until(lambda: not b.decode[0].running)
        assert b.decode[0].aborts[0] == b.decode[0].seen[0]["rid"]
        assert (
            b.decode[0].ended == [(b.decode[0].seen[0]["rid"], "aborted")]
            or b.decode[0].ended[0][1] == "cancelled"
        )
        await until(b.is_empty)


@asynchronous
async def test_prefill_is_told_to_abort_when_decode_fails() -> None:
    async with bed(1, 1, attempts=1) as b:
        b.prefill[0].do.prefill_s = 30
        b.decode[0].do.fail_next, b.decode[0].do.fail_s = 1, 0.2
        status, _ = await b.generate()
        assert status == 500
        await until(lambda: not b.prefill[0].running)
        await until(lambda: bool(b.prefill[0].aborts))
        await until(b.is_empty)


@asynchronous
async def test_the_only_engine_gets_the_request_again() -> None:
    async with bed(1, 1) as b:
        b.prefill[0].do.fail_next = 2
        status, told = await b.generate()
        assert (status, told["text"]) == (200, "w0 w1 w2 w3")
        assert len(b.prefill[0].seen) == 3


@asynchronous
async def test_after_so_many_attempts_the_client_is_told() -> None:
    async with bed(2, 1) as b:
        for stub in b.prefill:
            stub.do.fail_next = 5
        status, told = await b.post("/v1/completions", **BODIES["/v1/completions"])
        assert status == 500
        assert "tried 3 times" in told["error"]["message"]
        assert told["error"]["type"] == "server_error"
        failed = 'dualpath_router_failures_total{failure="status",role="prefill"}'
        assert await b.metric(failed) == 3
        assert await b.metric('dualpath_router_requests_total{endpoint="completions"') == 1


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_a_stream_that_begins_with_a_failed_transfer_is_placed_again(path: str) -> None:
    async with bed(2, 2) as b:
        first = min(b.decode, key=lambda stub: stub.name)  # of equals the first
        first.do.abort_first = True
        events = await b.events(path, **BODIES[path])
        assert first.seen
        assert "KVTransferError" not in json.dumps(events)
        assert "w2" in json.dumps(events)
        await until(b.is_empty)


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_a_stream_that_breaks_off_ends_with_an_event_that_says_whose_fault_it_is(
    path: str,
) -> None:
    async with bed(1, 2) as b:
        for stub in b.decode:
            stub.do.die_after = 2
        events = await b.events(path, **BODIES[path])
        assert events[-1] == "[DONE]"
        error = events[-2]["error"]
        assert error["part"] == "decode"
        assert "breaks off" in error["message"]
        assert "w1" in json.dumps(events)
        assert await b.metric('dualpath_router_broken_streams_total{role="decode"}') == 1
        assert sum(len(stub.seen) for stub in b.decode) == 1  # not placed again
        await until(b.is_empty)


@asynchronous
async def test_an_engine_that_refuses_connections_is_dead_at_once() -> None:
    async with bed(1, 1, ready=False, poll_interval_s=30.0, dead_after_s=30.0) as b:
        with stub_process("prefill") as gone:
            await b.post("/engines", **spec(gone).as_json())
            await until(lambda: all(engine.ready for engine in b.router.registry))
        await asyncio.gather(*(b.generate() for _ in range(4)))
        engine = b.router.registry.get(gone.name)
        assert engine is not None
        assert engine.state == "dead"
        assert len(b.prefill[0].seen) == 4


async def answers(b: Bed, count: int, **body: Any) -> list[tuple[int, Any]]:
    return await asyncio.gather(*(b.generate(f"{i} a b", **body) for i in range(count)))


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@asynchronous
async def test_requests_on_an_engine_that_is_killed_or_stopped_are_served_by_another(
    role: str, signal_name: str
) -> None:
    with stub_process(role, hang=True) as ill:
        async with bed(1, 1, extra=(spec(ill),)) as b:
            began = time.monotonic()
            task = asyncio.create_task(answers(b, 8))
            here = b.prefill[0] if role == "prefill" else b.decode[0]
            engine = b.router.registry.get(ill.name)
            assert engine is not None
            await until(lambda: engine.own_requests > 0)
            await asyncio.sleep(0.1)
            ill.send(signal.Signals[signal_name])
            told = await task
            assert [status for status, _ in told] == [200] * 8
            assert time.monotonic() - began < 10  # the bound is the contract: nobody waits 300 s
            assert len(here.seen) >= 8
            await until(lambda: engine.state == "dead")
            assert len(b.router.registry.ready(engine.role)) == 1
            if signal_name == "SIGSTOP":
                ill.send(signal.SIGCONT)
                await until(lambda: engine.state == "ready")
            await until(b.is_empty)
            await until(lambda: not any(stub.running for stub in b.stubs))


@asynchronous
async def test_an_engine_whose_scheduler_stands_still_is_dead_though_it_answers() -> None:
    async with bed(2, 1, stuck_after_s=0.5) as b:
        ill = b.prefill[0]
        ill.do.hang = ill.do.frozen = True
        told = await answers(b, 4)
        assert [status for status, _ in told] == [200] * 4
        engine = b.router.registry.get(ill.name)
        assert engine is not None
        assert "stands still" in engine.reason
        await asyncio.sleep(0.3)
        assert engine.state == "dead"  # it answers all along
        ill.do.hang = ill.do.frozen = False
        await until(lambda: engine.state == "ready")


@asynchronous
async def test_a_server_of_the_other_role_gets_nothing() -> None:
    async with bed(1, 1) as b:
        wrong = {"url": b.decode[0].url, "role": "prefill", "bootstrap_port": 1}
        status, _ = await b.post("/engines", **wrong)
        assert status == 200
        assert len(b.router.registry) == 2
        engine = b.router.registry.get(b.decode[0].name)
        assert engine is not None
        await until(lambda: "its mode is decode" in engine.reason)
        assert not b.router.registry.ready("decode")


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_client_that_goes_away_ends_its_request_on_both_sides(stream: bool) -> None:
    async with bed() as b:
        b.prefill[0].do.prefill_s = 30
        b.decode[0].do.token_s = 30
        body = {"text": "a", "stream": stream}
        task = asyncio.create_task(b.http.post(b.url + "/generate", json=body))
        await until(lambda: bool(b.prefill[0].running and b.decode[0].running))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: not (b.prefill[0].running or b.decode[0].running))
        await until(b.is_empty)
        await until(lambda: bool(b.prefill[0].aborts and b.decode[0].aborts))
        counter = 'dualpath_router_requests_total{endpoint="generate",outcome="cancelled"}'
        assert await b.metric(counter) == 1


@asynchronous
async def test_so_does_one_in_the_middle_of_a_stream() -> None:
    async with bed() as b:
        b.decode[0].do.token_s = 0.05
        async with aiohttp.ClientSession() as other:
            params = {"max_new_tokens": 1000}
            body = {"text": "a", "stream": True, "sampling_params": params}
            async with other.post(b.url + "/generate", json=body) as answer:
                await answer.content.readline()
                assert b.decode[0].running
                answer.close()
        await until(lambda: not b.decode[0].running)
        await until(b.is_empty)
        await until(lambda: bool(b.decode[0].aborts))


@asynchronous
async def test_a_full_queue_and_a_long_wait_are_told_with_503() -> None:
    async with bed(queue_limit=2, queue_timeout_s=0.5) as b:
        b.decode[0].do.capacity = 4096
        await until(lambda: b.router.registry.get(b.decode[0].name).load.capacity_tokens == 4096)
        b.decode[0].do.token_s = 1.0
        ids = list(range(3000))
        params = {"max_new_tokens": 1}
        body = {"input_ids": ids, "sampling_params": params}
        running = asyncio.create_task(b.post("/generate", **body))
        await until(lambda: bool(b.decode[0].running))
        waiting = [asyncio.create_task(b.post("/generate", **body)) for _ in range(2)]
        await until(lambda: len(b.router.dispatcher) == 2)
        status, told = await b.post("/generate", **body)
        assert status == 503
        assert "Too many requests" in told["error"]["message"]
        for status, told in await asyncio.gather(*waiting):
            assert status == 503
            assert "No server has had room" in told["error"]["message"]
        assert (await running)[0] == 200
        await until(b.is_empty)


@asynchronous
async def test_who_waits_is_served_in_turn_when_there_is_room() -> None:
    async with bed() as b:
        b.decode[0].do.capacity = 4096
        b.decode[0].do.token_s = 0.1
        await until(lambda: b.router.registry.get(b.decode[0].name).load.capacity_tokens == 4096)
        body = {"input_ids": list(range(3000)), "sampling_params": {"max_new_tokens": 1}}
        tasks = []
        for i in range(4):
            tasks.append(asyncio.create_task(b.post("/generate", rid=f"number{i}", **body)))
            await until(lambda i=i: len(b.router.forwarder) == i + 1)
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
        assert [seen["rid"][-1] for seen in b.decode[0].seen] == list("0123")
        assert await b.metric("dualpath_router_queue_seconds_count") == 4


@asynchronous
async def test_a_request_that_waits_can_be_aborted() -> None:
    async with bed(1, 0) as b:
        task = asyncio.create_task(b.generate(rid="mine"))
        await until(lambda: len(b.router.dispatcher) == 1)
        assert (await b.post("/abort_request", rid="mine"))[1]["found"] is True
        status, told = await task
        assert (status, told["error"]["message"]) == (499, "The request was aborted")
        await until(b.is_empty)
        assert not b.prefill[0].seen


@asynchronous
async def test_a_request_that_waits_can_be_aborted_by_going_away() -> None:
    async with bed(1, 0) as b:
        task = asyncio.create_task(b.generate())
        await until(lambda: len(b.router.dispatcher) == 1)
        task.cancel()
        await until(b.is_empty)


@asynchronous
async def test_nothing_is_left_after_churn() -> None:
    """Clients that go away, engines that fail, die and come back, streams and batches."""
    async with bed(2, 2) as b:
        for stub in b.stubs:
            stub.do.prefill_s = 0.01
            stub.do.token_s = 0.005

        async def one(i: int) -> None:
            body: dict[str, Any] = {"text": f"{i} a b c", "stream": i % 3 == 0}
            if i % 5 == 0:
                body = {"text": ["a", "b"]}
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                timeout = aiohttp.ClientTimeout(total=0.02 if i % 4 == 0 else 20)
                async with b.http.post(b.url + "/generate", json=body, timeout=timeout) as answer:
                    await answer.read()

        async def trouble() -> None:
            for i in range(8):
                b.stubs[i % 4].do.fail_next = 3
                await asyncio.sleep(0.05)

        troubled = asyncio.create_task(trouble())
        for _ in range(4):
            await asyncio.gather(*(one(i) for i in range(60)))
        await troubled
        await until(b.is_empty)
        await until(lambda: not any(stub.running for stub in b.stubs))
        await until(lambda: len(b.router.aborter) == 0)
        engines = list(b.router.registry)
        assert [e.own_requests for e in engines] == [0] * 4
        assert [e.own_tokens for e in engines] == [0] * 4
