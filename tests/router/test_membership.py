"""Engines that join, leave and drain; several routers on one Redis; what is found in the index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.router.admin import AdminApi
from dualpath_sglang.router.trace import read, replay, same
from tests.router.bed import Bed, asynchronous, bed, until
from tests.router.stub import serving
from tests.support.redis_server import RedisServer

KEY = {"Authorization": "Bearer a-key"}


@asynchronous
async def test_an_engine_joins_drains_comes_back_and_leaves() -> None:
    async with bed(1, 1) as b, serving("prefill") as other:
        told = {"url": other.url, "role": "prefill", "bootstrap_port": other.port, "node": "n"}
        status, engine = await b.post("/engines", **told)
        assert (status, engine["source"], engine["state"]) == (200, "admin", "starting")
        found = b.router.registry.get(other.name)
        assert found is not None
        await until(lambda: found.ready)
        other.do.prefill_s = 0.3
        tasks = [asyncio.create_task(b.generate(f"{i}")) for i in range(6)]
        await until(lambda: bool(other.running))
        status, engine = await b.post(f"/engines/{other.name}/drain")
        assert engine["state"] == "draining"
        assert engine["own_requests"] >= 1
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 6
        count = len(other.seen)
        await asyncio.gather(*(b.generate(f"{i}") for i in range(6)))
        assert len(other.seen) == count
        assert found.own_requests == 0
        await b.post("/engines", **told)
        assert found.state == "ready"
        await asyncio.gather(*(b.generate(f"{i}") for i in range(6)))
        assert len(other.seen) > count
        async with b.http.delete(f"{b.url}/engines/{other.name}") as answer:
            assert answer.status == 200
        assert b.router.registry.get(other.name) is None
        assert (await b.generate())[0] == 200


@asynchronous
async def test_requests_of_an_engine_that_is_removed_are_placed_again() -> None:
    async with bed(2, 1) as b:
        b.prefill[0].do.hang = True
        tasks = [asyncio.create_task(b.generate(f"{i}")) for i in range(4)]
        await until(lambda: bool(b.prefill[0].running))
        async with b.http.delete(f"{b.url}/engines/{b.prefill[0].name}") as answer:
            assert answer.status == 200
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
        assert len(b.prefill[1].seen) == 4
        await until(b.is_empty)


@asynchronous
async def test_requests_go_on_when_the_node_of_an_engine_becomes_known() -> None:
    async with bed(1, 1, nodes=False) as b:
        b.decode[0].do.token_s = 0.1
        task = asyncio.create_task(b.generate())
        await until(lambda: bool(b.decode[0].running))
        engine = b.router.registry.get(b.decode[0].name)
        assert engine is not None
        port = engine.spec.bootstrap_port
        told = {"url": engine.spec.url, "role": "decode", "bootstrap_port": port}
        await b.post("/engines", **told, node="machine")
        assert b.router.registry.get(engine.name) is engine
        assert (engine.node, engine.state) == ("machine", "ready")
        assert (await task)[0] == 200
        assert len(b.decode[0].seen) == 1


@pytest.mark.parametrize("named", ["", "tiny"])
@asynchronous
async def test_a_server_of_another_model_gets_nothing(named: str) -> None:
    async with bed(1, 1, model=named) as b, serving("decode", model="large") as other:
        await b.post("/engines", url=other.url, role="decode")
        found = b.router.registry.get(other.name)
        assert found is not None
        await until(lambda: found.state == "other model")
        await asyncio.gather(*(b.generate(f"{i}") for i in range(6)))
        assert not other.seen
        assert len(b.decode[0].seen) == 6


@asynchronous
async def test_changes_need_the_key_where_there_is_one() -> None:
    async with bed(admin_key="a-key") as b:
        name = b.decode[0].name
        told = {"url": "http://127.0.0.1:9", "role": "decode"}
        for headers, wanted in (({}, 401), ({"Authorization": "Bearer b"}, 401), (KEY, 200)):
            asked: list[Any] = [
                b.http.post(b.url + "/engines", json=told, headers=headers),
                b.http.post(f"{b.url}/engines/{name}/drain", headers=headers),
                b.http.delete(f"{b.url}/engines/{name}", headers=headers),
            ]
            assert [(await each).status for each in asked] == [wanted] * 3
        assert (await b.get("/engines"))[0] == 200


@pytest.mark.parametrize(
    ("caller", "status"),
    [("127.0.0.1", 404), ("::1", 404), ("10.0.0.9", 403), ("2001:db8::1", 403), ("", 403)],
)
@asynchronous
async def test_without_a_key_only_this_machine_changes_engines(caller: str, status: int) -> None:
    async with bed() as b:
        api = AdminApi(b.router.registry, b.router.membership, b.router.options)
        transport = Mock()
        transport.get_extra_info = {"peername": (caller, 1)}.get
        request = make_mocked_request(
            "POST", "/engines/nobody/drain", match_info={"name": "nobody"}, transport=transport
        )
        assert (await api.drain(request)).status == status


@pytest.mark.parametrize(
    "body",
    ["{", "[]", "{}", '{"url": "x", "role": "decode"}', '{"url": "http://a:1", "role": "x"}'],
)
@asynchronous
async def test_what_is_no_engine_does_not_join(body: str) -> None:
    async with bed() as b:
        async with b.http.post(b.url + "/engines", data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"]
        assert (await b.post("/engines/nobody/drain"))[0] == 404
        async with b.http.delete(b.url + "/engines/nobody") as answer:
            assert answer.status == 404


# -- on one Redis -----------------------------------------------------------------------------


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


def settings(redis: RedisServer, root: Path) -> DualPathConfig:
    return DualPathConfig.load(
        {"index": f"redis://127.0.0.1:{redis.port}", "root": str(root), "index_timeout_s": 1}
    )


@contextlib.asynccontextmanager
async def two(redis: RedisServer, root: Path, **options: Any) -> AsyncIterator[tuple[Bed, Bed]]:
    """Two routers, the second without engines of its own but those of the first."""
    config = settings(redis, root)
    async with bed(2, 2, config=config, **options) as first:
        specs = first.router.options.engines
        async with bed(0, 0, config=config, extra=specs, **options) as second:
            yield first, second


def test_what_is_done_at_one_router_is_known_at_the_other(
    redis: RedisServer, tmp_path: Path
) -> None:
    @asynchronous
    async def test() -> None:
        async with two(redis, tmp_path) as (first, second), serving("decode") as other:
            await first.post("/engines", url=other.url, role="decode", node="x")
            await until(lambda: second.router.registry.get(other.name) is not None)
            name = first.prefill[0].name
            await first.post(f"/engines/{name}/drain")
            engine = second.router.registry.get(name)
            assert engine is not None
            await until(lambda: engine.state == "draining")
            await asyncio.gather(*(second.generate(f"{i}") for i in range(4)))
            assert not first.prefill[0].seen
            async with second.http.delete(f"{second.url}/engines/{other.name}") as answer:
                assert answer.status == 200
            await until(lambda: first.router.registry.get(other.name) is None)
            # A router that starts later knows it as well.
            config = settings(redis, tmp_path)
            specs = first.router.options.engines
            async with bed(0, 0, config=config, extra=specs) as third:
                found = third.router.registry.get(name)
                assert found is not None
                await until(lambda: found.state == "draining")

    test()


def test_a_session_returns_to_its_engines_through_another_router(
    redis: RedisServer, tmp_path: Path
) -> None:
    @asynchronous
    async def test() -> None:
        async with two(redis, tmp_path) as (first, second):
            messages = [{"role": "user", "content": "hello " * 50}]
            await first.post("/v1/chat/completions", messages=messages)
            await until(lambda: len(second.router.sessions) == 1)
            messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
            await second.post("/v1/chat/completions", messages=messages)
            assert sorted(len(stub.seen) for stub in first.stubs) == [0, 0, 2, 2]
            specs = first.router.options.engines
            config = settings(redis, tmp_path)
            async with bed(0, 0, config=config, extra=specs) as third:
                await until(lambda: len(third.router.sessions) >= 1)  # it hears the past

    test()


def test_load_that_another_router_makes_is_seen_in_the_engines_reports(
    redis: RedisServer, tmp_path: Path
) -> None:
    @asynchronous
    async def test() -> None:
        async with two(redis, tmp_path) as (first, second):
            for stub in first.decode:
                stub.do.token_s = 0.5
            busy = asyncio.create_task(first.generate(tokens=2))
            await until(lambda: any(stub.running for stub in first.decode))
            loaded = next(stub for stub in first.decode if stub.running)
            engine = second.router.registry.get(loaded.name)
            assert engine is not None
            await until(lambda: engine.foreign_requests == 1)
            await busy
            await until(lambda: engine.foreign_requests == 0)

    test()


def test_without_redis_a_router_goes_on_and_catches_up_later(
    redis: RedisServer, tmp_path: Path
) -> None:
    @asynchronous
    async def test() -> None:
        async with two(redis, tmp_path) as (first, second):
            await until(lambda: bool(first.router._shared and first.router._shared.answers))
            redis.kill()
            for i in range(4):
                assert (await first.generate(f"{i}"))[0] == 200
            name = first.prefill[0].name
            await first.post(f"/engines/{name}/drain")
            engine = first.router.registry.get(name)
            other = second.router.registry.get(name)
            assert engine is not None
            assert other is not None
            assert engine.state == "draining"
            await until(lambda: not first.router.index_answers())
            assert (await first.get("/health"))[1]["index_answers"] is False
            redis.start()
            await until(lambda: other.state == "draining")

    test()


def test_engines_and_read_queues_are_found_in_the_index(redis: RedisServer, tmp_path: Path) -> None:
    config = settings(redis, tmp_path)
    with KVCache(config.store_options(), index=config.index_source()) as cache:

        def report(name: str, ttl_s: float = 60.0, **fields: Any) -> None:
            cache.index.report(name, fields, ttl_s)

        @asynchronous
        async def test() -> None:
            async with bed(1, 0, config=config, nodes=False) as b, serving("decode") as decode:
                report("d", role="hicache", pd_role="decode", url=decode.url, host="machine-d")
                report("a", role="node", node_id="1", host="machine-d", address="h:1",
                       read_queue_tokens=77, read_queue_bytes=770, up_s=1)  # fmt: skip
                # Also says of which node the prefill server is, which the flag did not.
                report("p", pd_role="prefill", url=b.prefill[0].url, host="machine-p",
                       bootstrap_port=b.prefill[0].port)  # fmt: skip
                registry = b.router.registry
                await until(lambda: len(registry.ready("decode")) == 1)
                await until(lambda: [e.node for e in registry.ready("prefill")] == ["machine-p"])
                assert b.router.reads.queues() == {"machine-d": 77}
                assert [e.source for e in registry.ready("decode")] == ["index"]
                assert (await b.generate())[0] == 200
                assert "kv_hints" in decode.seen[0]
                # Its report is gone, but it answers: it stays.
                report("d", 0.001)
                await asyncio.sleep(1.2)
                assert len(registry.ready("decode")) == 1

        test()


# -- on record --------------------------------------------------------------------------------


@asynchronous
async def test_rounds_on_record_are_placed_alike_again(tmp_path: Path) -> None:
    record = tmp_path / "rounds"
    async with bed(2, 3, record=str(record), prefill_rate=100.0, read_rate=100.0) as b:
        for stub in b.stubs:
            stub.do.prefill_s = stub.do.token_s = 0.01
        for turn in range(3):
            await asyncio.gather(
                *(
                    b.post(
                        "/v1/chat/completions",
                        max_tokens=2,
                        messages=[{"role": "user", "content": f"{i} " * 40 * (i + 1)}] * (turn + 1),
                    )
                    for i in range(8)
                )
            )
        served = sum(len(stub.seen) for stub in b.decode)
    rounds = list(read(record))
    placed = [p for each in rounds for p in each.placements]
    assert len(placed) == served == 24
    assert any(p.warm_prefill for p in placed)
    assert len({p.prefill for p in placed}) == 2
    for each in rounds:
        assert same(each, replay(each))
    wrong = tuple(replace(p, decode="x") for p in rounds[0].placements)
    changed = replace(rounds[0], placements=wrong)
    assert wrong
    assert not same(changed, replay(changed))
