"""Two servers on one store, with the index in Redis: they share pages, and serve without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.server import Answer, Server, hicache_flags, random_tokens
from tests.support.streaming import PAGE_TOKENS, SETTINGS, StreamingServer, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
OTHER = random_tokens(500, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS


@dataclass
class Fleet:
    """One server in streaming mode and one in HiCache mode, on one store and one Redis."""

    redis: RedisServer
    streaming: StreamingServer
    hicache: Server
    cold: dict[str, Answer]

    def hit(self, server: Server, prompt: list[int]) -> int:
        """Tokens from storage of a prompt that is nowhere else; the answer is the right one."""
        server.flush()
        answer = server.generate(prompt)
        name = "prompt" if prompt == PROMPT else "other"
        assert answer.tokens == self.cold[name].tokens
        return answer.cached.storage

    def until_hit(self, server: Server, prompt: list[int]) -> None:
        wait_for(lambda: self.hit(server, prompt) >= WHOLE - PAGE_TOKENS, 60.0)


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("deepseek_v2", marks=pytest.mark.slow)]
)
def fleet(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp(request.param)
    with RedisServer() as redis:
        # Two servers keep both cores busy: it is not the deadline that is tested here.
        index = {"index": redis.url, "index_timeout_s": 0.5}
        own = {**SETTINGS, **index, "root": str(folder / "a" / "store")}
        flags = hicache_flags("dualpath", {**own, "prefetch_threshold": PAGE_TOKENS})
        with (
            StreamingServer(model(request.param), folder / "a", settings=index) as a,
            Server(model(request.param), flags, log=folder / "b.log") as b,
        ):
            cold = {"prompt": a.uncached(PROMPT), "other": a.uncached(OTHER)}
            yield Fleet(redis, a, b, cold)
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
