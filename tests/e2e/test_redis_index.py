"""Two servers on one store, with the index in Redis: they share pages, and serve without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.server import Answer, Server, hicache_flags, random_tokens
from tests.support.streaming import PAGE_TOKENS, SETTINGS, StreamingServer, wait_for
from tests.support.toxic_proxy import Toxic, ToxicProxy

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
OTHER = random_tokens(500, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS


RECOVERY_S = 30.0


@dataclass
class Fleet:
    """One server in streaming mode and one in HiCache mode, on one store and one Redis."""

    redis: RedisServer
    proxy: ToxicProxy
    streaming: StreamingServer
    hicache: Server
    cold: dict[tuple[int, ...], Answer]

    def hit(self, server: Server, prompt: list[int]) -> int:
        """Tokens from storage of a prompt that is nowhere else; the answer is the right one."""
        server.flush()
        answer = server.generate(prompt)
        assert answer.tokens == self.cold[tuple(prompt)].tokens
        return answer.cached.storage

    def until_hit(self, server: Server, prompt: list[int], timeout_s: float = 60.0) -> None:
        wait_for(lambda: self.hit(server, prompt) >= WHOLE - PAGE_TOKENS, timeout_s)


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("deepseek_v2", marks=pytest.mark.slow)]
)
def fleet(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp(request.param)
    with RedisServer() as redis, ToxicProxy(redis.port) as proxy:
        # Two servers keep both cores busy: it is not the deadline that is tested here.
        index = {"index": proxy.url, "index_timeout_s": 0.5}
        own = {**SETTINGS, **index, "root": str(folder / "a" / "store")}
        flags = hicache_flags("dualpath", {**own, "prefetch_threshold": PAGE_TOKENS})
        with (
            StreamingServer(model(request.param), folder / "a", settings=index) as a,
            Server(model(request.param), flags, log=folder / "b.log") as b,
        ):
            cold = {tuple(prompt): a.uncached(prompt) for prompt in (PROMPT, OTHER)}
            yield Fleet(redis, proxy, a, b, cold)
            assert a.alive
            assert b.alive


def test_what_one_server_stored_the_other_restores(fleet: Fleet) -> None:
    fleet.streaming.generate(PROMPT, 1)
    fleet.until_hit(fleet.hicache, PROMPT)
    fleet.hicache.generate(OTHER, 1)
    fleet.until_hit(fleet.streaming, OTHER)


def test_without_redis_they_serve_and_afterwards_they_find_all(fleet: Fleet) -> None:
    fleet.until_hit(fleet.streaming, PROMPT)
    fleet.redis.kill()
    for server in (fleet.streaming, fleet.hicache):
        assert fleet.hit(server, PROMPT) == 0
        assert fleet.hit(server, OTHER) == 0
    fleet.redis.start()  # with nothing in it: filled again from the store
    for server in (fleet.streaming, fleet.hicache):
        fleet.until_hit(server, PROMPT)
        fleet.until_hit(server, OTHER)


def test_an_emptied_redis_is_noticed(fleet: Fleet) -> None:
    fleet.until_hit(fleet.streaming, PROMPT)
    with fleet.redis.admin() as admin:
        admin.flushall()
    for server in (fleet.hicache, fleet.streaming):
        fleet.until_hit(server, PROMPT)


@contextlib.contextmanager
def toxic(fleet: Fleet, kind: Toxic) -> Iterator[None]:
    fleet.proxy.set(kind)
    yield
    fleet.proxy.set(Toxic.NONE)


@contextlib.contextmanager
def stopped(fleet: Fleet) -> Iterator[None]:
    fleet.redis.stop()
    yield
    fleet.redis.cont()


@contextlib.contextmanager
def emptied(fleet: Fleet) -> Iterator[None]:
    with fleet.redis.admin() as admin:
        admin.flushall()
    yield


@contextlib.contextmanager
def full(fleet: Fleet) -> Iterator[None]:
    with fleet.redis.admin() as admin:
        admin.config_set("maxmemory", 1)
        yield
        admin.config_set("maxmemory", 0)


@contextlib.contextmanager
def read_only(fleet: Fleet) -> Iterator[None]:
    """As after a failover that left the master behind as a replica."""
    with fleet.redis.admin() as admin:
        admin.replicaof("127.0.0.1", "1")
        yield
        admin.replicaof("NO", "ONE")


@contextlib.contextmanager
def nothing(fleet: Fleet) -> Iterator[None]:
    del fleet
    yield


Fault = Callable[[Fleet], contextlib.AbstractContextManager[None]]
AWAY = (Toxic.SLOW, Toxic.CUT, Toxic.SILENT, Toxic.TRICKLE, Toxic.REFUSED)
FAULTS: dict[str, Fault] = {
    **{kind.value: (lambda fleet, kind=kind: toxic(fleet, kind)) for kind in AWAY},
    "stopped": stopped,
    "emptied": emptied,
    "full": full,
    "read-only": read_only,
    "none": nothing,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
def test_whatever_befalls_redis_every_answer_is_right_and_all_is_found_again(
    fleet: Fleet, name: str
) -> None:
    """With pages that are stored meanwhile: they are found by the other server afterwards."""
    servers = (fleet.streaming, fleet.hicache)
    for server in servers:
        fleet.until_hit(server, PROMPT)
    fleet.proxy.latency_s = 0.7  # longer than the deadline that this test has
    new = {server: random_tokens(500, seed=hash((name, i))) for i, server in enumerate(servers)}
    hits = []
    with FAULTS[name](fleet):
        for server in servers:
            answer = server.generate(new[server])
            fleet.cold[tuple(new[server])] = answer
            for _ in range(3):
                hits += [fleet.hit(server, PROMPT), fleet.hit(server, OTHER)]
    if name in ("none", "full", "read-only"):  # reading goes on
        assert all(hits)
    elif name != "emptied":
        assert not any(hits[-2:])
    for server, other in (servers, servers[::-1]):
        for prompt in (PROMPT, OTHER, new[other]):
            fleet.until_hit(server, prompt, RECOVERY_S)
