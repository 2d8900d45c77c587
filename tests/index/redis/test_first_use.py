"""A model's first blocks: whoever publishes them, beside whom, and whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dualpath_sglang.index import IndexDamagedError
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_storage import Geometry
from tests.index.records import FOREVER_S, INDEXER, KV, records
from tests.support.blocks import chain, geometry
from tests.support.redis_server import RedisServer


def publish_at_once(index: RedisIndex, of: Geometry, threads: int) -> list[BaseException]:
    """Each thread publishes a chain of its own; what went wrong."""
    start = threading.Barrier(threads)
    failures: list[BaseException] = []

    def publish(thread: int) -> None:
        start.wait(FOREVER_S)
        try:
            index.publish(of, records(chain(thread, 3), slot=3 * thread), FOREVER_S)
            index.upkeep()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=publish, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return failures


def test_threads_that_publish_the_first_blocks_at_once_lose_nothing(index: RedisIndex) -> None:
    for turn in range(20):
        of = geometry("mha", model=f"new {turn}")
        assert publish_at_once(index, of, 8) == []
        assert [index.prefix(of, chain(i, 3)) for i in range(8)] == [3] * 8
    index.check()


def test_who_knows_an_older_index_leaves_nothing_in_the_new_one(
    server: RedisServer, open_at: Callable[..., RedisIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, tool = open_at(server.url), open_at(server.url)
    old.publish(KV, records(chain("a", 2)), FOREVER_S)
    real = old._access.client.call
    calls = 0

    def call(*args: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        replies = real(*args)
        if calls == 2:  # publish found no geometry, the token was right; now it is begun anew
            tool.start_over()
        return replies

    monkeypatch.setattr(old._access.client, "call", call)
    with pytest.raises(IndexDamagedError):
        old.publish(INDEXER, records(chain("b", 2)), FOREVER_S)
    assert calls >= 3, "it went on after that"
    new = open_at(server.url)
    new.upkeep()
    assert new.counts() == {}
    new.publish(KV, records(chain("c", 2)), FOREVER_S)
    new.upkeep()
    new.check()
