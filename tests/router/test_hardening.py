"""What must not go wrong in a router: found by review, each once a fault."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.router import attempt, dispatch, forward
from dualpath_sglang.router.attempt import Attempt
from dualpath_sglang.router.engines import Engine, Registry
from dualpath_sglang.router.loads import parse_loads
from dualpath_sglang.router.nodes import ReadQueues
from dualpath_sglang.router.options import EngineSpec, RouterOptions
from dualpath_sglang.router.requests import parse
from dualpath_sglang.router.sessions import Warm
from dualpath_sglang.router.shared import Shared
from dualpath_sglang.router.upstream import Bodies, bodies, failed
from dualpath_sglang.scheduling.engines import Request
from tests.router.bed import asynchronous, bed, stub_process, until
from tests.router.stub import serving
from tests.support.redis_server import RedisServer

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


def test_engines_that_joined_by_a_call_outlive_the_memory_of_redis(tmp_path: Path) -> None:
    @asynchronous
    async def test() -> None:
        index = f"redis://127.0.0.1:{redis.port}"
        config = DualPathConfig.load({"index": index, "root": str(tmp_path), "index_timeout_s": 1})
        async with bed(1, 0, config=config, ready=False) as b, serving("decode") as decode:
            decode.do.token_s = 0.1
            await b.post("/engines", url=decode.url, role="decode", node="x")
            await until(lambda: bool(b.router.registry.ready("decode")))
            key = "dualpath:router:{default}:engines"
            admin = redis.admin()
            await until(lambda: bool(admin.hexists(key, decode.name)))
            asked = asyncio.create_task(b.events("/generate", text="a", sampling_params=TEN))
            await until(lambda: bool(decode.running))
            admin.flushall()
            await until(lambda: bool(admin.hexists(key, decode.name)))  # told again
            assert b.router.registry.get(decode.name) is not None
            assert (await asked)[-2]["text"].endswith("w9")
            admin.close()

    with RedisServer() as redis:
        test()


@pytest.mark.parametrize("tokens", [-1, 1 << 80, True])
def test_what_another_router_says_wrongly_of_a_session_is_not_believed(tokens: int) -> None:
    heard: list[tuple[int, Warm]] = []
    config = DualPathConfig.load({"index": "redis://127.0.0.1:1"}).index_source()
    assert isinstance(config, RedisSource)
    shared = Shared(config.settings, "g", lambda _: None, lambda k, w: heard.append((k, w)))
    shared._hear(json.dumps([[1, "a", "b", 5], [2, "a", "b", tokens]]).encode())
    assert heard == [(1, Warm("a", "b", 5))]


async def raw(url: str, path: str, headers: bytes, body: bytes) -> bytes:
    """The first line of what a request with these very bytes is answered."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    writer.write(head + headers + b"\r\n\r\n" + body)
    line = await reader.readline()
    writer.close()
    return line


@asynchronous
async def test_headers_that_are_no_text_are_the_clients_mistake() -> None:
    async with bed(admin_key="key", engine_key="engine") as b:
        body = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'
        for name in (b"X-Request-Id", b"Authorization"):
            line = await raw(b.url, "/generate", name + b": \xe9\xff", body)
            assert line.split()[1] == b"400"
        assert not any(stub.seen for stub in b.stubs)  # nor with the router's own key
        line = await raw(b.url, "/generate", "X-Request-Id: é".encode(), body)
        assert line.split()[1] == b"200"
        line = await raw(b.url, "/engines", b"Authorization: Bearer \xe9\xff", b"{}")
        assert line.split()[1] == b"401"


@asynchronous
async def test_a_fault_within_a_stream_does_not_end_in_a_second_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(self: Any, stream: Any) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise ZeroDivisionError

    monkeypatch.setattr(Attempt, "chunks", breaks)
    async with bed() as b:
        body = {"stream": True, "text": "a"}
        with pytest.raises(aiohttp.ClientPayloadError):
            async with b.http.post(b.url + "/generate", json=body) as answer:
                await answer.read()
        await until(b.is_empty)


@asynchronous
async def test_a_large_body_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(forward, "parse", noted)
    async with bed() as b:
        assert (await b.generate("a"))[0] == 200
        assert (await b.generate("a " * 300_000))[0] == 200
        main = threading.main_thread().name
        assert [name == main for name in threads] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_two_engines_that_wait_for_each_other_are_not_waited_for(stream: bool) -> None:
    async with bed(2, 2, prefill_timeout_s=0.5) as b:
        for stub in b.stubs:
            stub.do.hang = True
        body: dict[str, Any] = {"text": "a", "sampling_params": TEN}
        asked: asyncio.Task[Any] = asyncio.create_task(
            b.events("/generate", **body) if stream else b.post("/generate", **body)
        )
        await until(lambda: sum(bool(stub.running) for stub in b.stubs) == 2)
        for stub in b.stubs:
            stub.do.hang = False  # whatever comes later
        told = await asked
        assert (told[-2] if stream else told[1])["text"].endswith("w9")
        assert [len(stub.seen) for stub in b.stubs] == [1, 1, 1, 1]  # neither was tried again
        await until(b.is_empty)
        await until(lambda: not any(stub.running for stub in b.stubs))
        late = 'dualpath_router_failures_total{failure="late",role="prefill"}'
        assert await b.metric(late) == 1


@asynchronous
async def test_a_long_answer_is_not_late() -> None:
    async with bed(prefill_timeout_s=0.2) as b:
        b.decode[0].do.token_s = 0.1
        assert (await b.generate(tokens=6))[0] == 200
        assert await b.metric("dualpath_router_failures_total") == 0


@asynchronous
async def test_who_waits_for_room_need_not_have_patience_for_engines() -> None:
    async with bed(engine_wait_s=0.0, queue_timeout_s=20.0) as b:
        b.decode[0].do.capacity = 4096
        b.decode[0].do.token_s = 0.5
        decode = b.router.registry.of("decode")[0]
        await until(lambda: decode.load is not None and decode.load.capacity_tokens == 4096)
        body = {"input_ids": list(range(3000)), "sampling_params": {"max_new_tokens": 1}}
        answers = await asyncio.gather(*(b.post("/generate", **body) for _ in range(2)))
        assert [status for status, _ in answers] == [200, 200]


@asynchronous
async def test_patience_for_engines_begins_when_the_last_one_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    registry = Registry()
    options = RouterOptions(engine_wait_s=8.0, queue_timeout_s=60.0)
    dispatcher = dispatch.Dispatcher(registry, ReadQueues(), options)
    for role in ("prefill", "decode"):
        registry.add(EngineSpec(f"http://{role}:1", role), "flags").heard_at = 0.0
    decode = registry.of("decode")[0]
    waiting = dispatch.Waiting(1, Request("a", 1), 0.0, asyncio.Future())
    clock.now = 20.0
    assert dispatcher._left_s(waiting) > 0
    registry.drain(decode)
    clock.now = 25.0
    assert dispatcher._left_s(waiting) == 3.0
    registry.drain(decode, False)
    clock.now = 55.0
    assert dispatcher._left_s(waiting) == 5.0  # of its 60


@asynchronous
async def test_aborts_of_an_engine_that_does_not_answer_keep_nothing_from_others() -> None:
    with stub_process("decode") as stopped:
        stopped.send(signal.SIGSTOP)
        async with bed(dead_after_s=60.0) as b:
            engine = Engine(EngineSpec(stopped.url, "decode"), "flags")
            aborter = b.router.aborter
            for i in range(40):
                aborter.abort(engine, [f"{i}"], again=False)
            await asyncio.sleep(0.05)
            aborter.abort(b.router.registry.of("decode")[0], ["mine"], again=False)
            await until(lambda: b.decode[0].aborts == ["mine"])
            assert len(aborter) >= 40  # none of the others has ended


@asynchronous
async def test_what_was_sent_is_not_kept_while_the_answer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone: list[int] = []

    class Tracked(bytes):
        def __del__(self) -> None:
            gone.append(len(self))

    def tracked(*given: Any) -> Bodies:
        made = bodies(*given)
        return Bodies(Tracked(made.prefill), Tracked(made.decode), made.rids)

    monkeypatch.setattr(attempt, "bodies", tracked)
    async with bed() as b:
        b.decode[0].do.token_s = 0.5
        body = {"text": "a" * 100_000, "stream": True}
        async with b.http.post(b.url + "/generate", json=body) as answer:
            await answer.content.readline()
            await until(lambda: len(gone) == 2)
            assert b.decode[0].running


@asynchronous
async def test_a_round_that_fails_fails_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bed() as b:

        def fails(*_: Any) -> Any:
            raise ValueError("a fault in scheduling")

        monkeypatch.setattr(dispatch, "place", fails)
        assert (await b.generate())[0] == 500
        monkeypatch.undo()
        assert (await b.generate())[0] == 200
        assert await b.is_empty()


@asynchronous
async def test_one_that_an_engine_failed_does_not_hold_up_others_while_the_rest_is_full() -> None:
    async with bed(1, 2, nodes=False) as b:
        full, good = sorted(b.decode, key=lambda stub: stub.name)
        full.do.capacity = good.do.capacity = 4096
        decodes = b.router.registry.of("decode")
        await until(lambda: all(e.load and e.load.capacity_tokens == 4096 for e in decodes))
        body = {"input_ids": list(range(3000)), "sampling_params": {"max_new_tokens": 1}}
        full.do.hang = True  # and the two are equal, so it is the first that takes it
        holds = asyncio.create_task(b.post("/generate", rid="holds", **body))
        await until(lambda: bool(full.running))
        good.do.fail_next = 1
        again = asyncio.create_task(b.post("/generate", **body))
        await until(lambda: len(b.router.dispatcher) == 1)
        assert (await b.post("/generate", **body))[0] == 200  # by the one that is good by now
        assert len(good.seen) == 2
        assert not again.done()
        full.do.hang = False
        await b.post("/abort_request", rid="holds")
        assert (await again)[0] == 200
        await holds
        assert len(full.seen) == 2
        await until(b.is_empty)
