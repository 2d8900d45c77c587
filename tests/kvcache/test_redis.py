"""The cache on an index in Redis: shared by caches as by nodes, away, and emptied."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.report import Node
from dualpath_storage import Geometry, StoreError
from tests.kvcache.caches import PENDING, PRESENT, STORED, killed, options, read, rescan, write
from tests.support.blocks import chain
from tests.support.redis_server import RedisServer

KEYS = chain("a", 12)
RECOVERY_S = 30.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def node(server: RedisServer, root: Path) -> Iterator[Callable[..., KVCache]]:
    """`node(**options)`: a cache of another node on the same store and Redis."""
    caches: list[KVCache] = []

    def make(**changes: object) -> KVCache:
        source = RedisSource(RedisSettings.parse(server.url), lookup_timeout_s=1.0)
        caches.append(KVCache(options(root, **changes), index=source))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def until_hit(cache: KVCache, of: Geometry, keys: list[bytes]) -> None:
    pool = cache.attach(of)
    end = time.monotonic() + RECOVERY_S
    while not all(read(pool, cache, keys)):
        assert time.monotonic() < end, "not complete again in time"
        time.sleep(0.1)


def test_what_one_node_stored_another_reads(node: Callable[..., KVCache], of: Geometry) -> None:
    a, b = node(), node()
    assert write(a.attach(of), a, KEYS) == [STORED] * 12
    pool = b.attach(of)
    assert b.prefix(pool, [*KEYS, *chain("b", 1)]) == 12
    assert read(pool, b, KEYS) == [True] * 12
    assert write(pool, b, KEYS) == [PRESENT] * 12
    assert write(pool, b, chain("b", 3)) == [STORED] * 3
    assert read(a.attach(of), a, chain("b", 3)) == [True] * 3


def test_a_block_that_another_node_is_writing_is_not_written_twice(
    node: Callable[..., KVCache], of: Geometry
) -> None:
    a, b = node(), node()
    b.index.claim(of, KEYS[:4], "another node", 1.0)
    pool = a.attach(of)
    assert write(pool, a, KEYS) == [PRESENT] * 4 + [STORED] * 8
    assert len(pool.store.slots.taken()) == 8
    end = time.monotonic() + RECOVERY_S
    while write(pool, a, KEYS[:4]) != [STORED] * 4:  # the claimant has died
        assert time.monotonic() < end
        time.sleep(0.1)
    assert read(pool, a, KEYS) == [True] * 12


def test_a_node_that_was_killed_leaves_its_segments_to_others(
    node: Callable[..., KVCache], of: Geometry
) -> None:
    a = node()
    write(a.attach(of), a, KEYS)
    killed(a)
    b = node()
    pool = b.attach(of)
    assert read(pool, b, KEYS) == [True] * 12
    assert len(pool.store.slots.taken()) == 12, "they are its own now"


def test_nodes_evict_from_one_order_of_use(node: Callable[..., KVCache], of: Geometry) -> None:
    a, b = node(capacity_bytes=1 << 20), node(capacity_bytes=1 << 20)
    for i in range(40):
        cache = (a, b)[i % 2]
        write(cache.attach(of), cache, chain(i, 6))
        read(cache.attach(of), cache, chain(i, 6))
    for cache in (a, b):
        cache.maintain()
        assert cache.stats().used_bytes <= 1 << 20
        index = cache.index
        index.check()
        keys = [entry.key for entry in index.entries(of)]
        assert keys
        assert read(cache.attach(of), cache, keys) == [True] * len(keys)


def test_an_emptied_redis_is_filled_again_from_the_store(
    node: Callable[..., KVCache], server: RedisServer, of: Geometry
) -> None:
    a, b = node(), node()
    write(a.attach(of), a, KEYS)
    write(b.attach(of), b, chain("b", 5))
    with server.admin() as admin:
        admin.flushall()
    for cache in (a, b):
        until_hit(cache, of, [*KEYS, *chain("b", 5)])
    assert rescan(a, of) == {*KEYS, *chain("b", 5)}
    for cache in (a, b):
        assert write(cache.attach(of), cache, KEYS) == [PRESENT] * 12
    a.index.check()


def test_while_redis_is_away_blocks_are_kept_and_published_when_it_is_back(
    node: Callable[..., KVCache], server: RedisServer, of: Geometry
) -> None:
    cache = node()
    pool = cache.attach(of)
    write(pool, cache, chain("early", 3))
    server.kill()
    began = time.monotonic()
    assert read(pool, cache, chain("early", 3)) == [False] * 3
    assert write(pool, cache, KEYS) == [PENDING] * 12
    assert write(pool, cache, KEYS) == [PRESENT] * 12
    assert time.monotonic() - began < 10.0
    server.start()  # with nothing in it
    until_hit(cache, of, [*chain("early", 3), *KEYS])
    assert write(pool, cache, KEYS) == [PRESENT] * 12
    cache.index.check()


def test_a_cache_that_finds_no_redis_serves_misses_until_there_is_one(
    node: Callable[..., KVCache], server: RedisServer, of: Geometry
) -> None:
    a = node()
    write(a.attach(of), a, KEYS)
    server.kill()
    b = node()
    assert read(b.attach(of), b, KEYS) == [False] * 12
    server.start()
    until_hit(b, of, KEYS)


def test_a_redis_that_would_throw_the_index_away_is_refused_with_a_sentence(
    node: Callable[..., KVCache], server: RedisServer
) -> None:
    with server.admin() as admin:
        admin.config_set("maxmemory", "100mb")
        admin.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match="noeviction"):
        node()
    with server.admin() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
    assert node().index.counts() == {}


def test_nodes_tell_each_other_who_they_are(
    node: Callable[..., KVCache], server: RedisServer, root: Path, of: Geometry
) -> None:
    source = RedisSource(RedisSettings.parse(server.url), lookup_timeout_s=1.0)
    silent = node()
    with KVCache(options(root), index=source, node=Node("streaming", 3)) as cache:
        write(cache.attach(of), cache, KEYS)
        cache.maintain()
        (report,) = silent.index.nodes().values()
        assert (report["role"], report["rank"], report["pid"]) == ("streaming", 3, os.getpid())
        end = time.monotonic() + RECOVERY_S
        while report["segments"] != 1:
            assert time.monotonic() < end
            time.sleep(0.2)
            (report,) = silent.index.nodes().values()
        environment = {**os.environ, "DUALPATH_INDEX": server.url, "DUALPATH_INDEX_TIMEOUT_S": "1"}
        command = [sys.executable, "-m", "dualpath_sglang.cli", "status", "--root", str(root)]
        shown = subprocess.run(
            [*command, "--json"], env=environment, capture_output=True, text=True, check=True
        )
        found = json.loads(shown.stdout)
        assert list(found["nodes"]) == list(silent.index.nodes())
        assert found["index"]["kind"] == "redis"
        assert found["geometries"][0]["blocks"] == 12
        table = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert f"{socket.gethostname()}:{os.getpid()}" in table.stdout
        with subprocess.Popen(
            [*command, "--watch", "0.2"], env=environment, stdout=subprocess.PIPE, text=True
        ) as live:
            assert live.stdout is not None
            seen = 0
            for line in live.stdout:
                seen += line.startswith("blocks    12")
                if seen == 2:
                    write(cache.attach(of), cache, chain("more", 3))
                if line.startswith("blocks    15"):
                    break
            live.terminate()  # SIGINT is ignored in what a shell runs in the background
            assert live.wait(30) == -signal.SIGTERM


def test_a_node_tells_what_it_is_about_to_read(
    node: Callable[..., KVCache], of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = node()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    seen: list[tuple[int, int]] = []
    real = RedisIndex.lookup

    def lookup(index: RedisIndex, geometry: Geometry, keys: Sequence[bytes]) -> list[Any]:
        seen.append((cache.read_queue.bytes, cache.read_queue.tokens))
        return real(index, geometry, keys)

    monkeypatch.setattr(RedisIndex, "lookup", lookup)
    read(pool, cache, KEYS)
    read(pool, cache, KEYS[:4], (1, 2))
    assert seen == [
        (12 * of.block_bytes, 12 * of.page_tokens),
        (4 * of.layer_bytes, 4 * of.page_tokens),
    ]
    assert (cache.read_queue.bytes, cache.read_queue.tokens) == (0, 0)


def test_what_was_just_found_is_not_asked_for_again(
    node: Callable[..., KVCache], of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.pool._KNOWN_S", 0.5)
    a, b = node(), node()
    write(a.attach(of), a, KEYS[:8])
    asked: list[int] = []
    real = RedisIndex.prefix

    def prefix(index: RedisIndex, geometry: Geometry, keys: Sequence[bytes]) -> int:
        asked.append(len(keys))
        return real(index, geometry, keys)

    monkeypatch.setattr(RedisIndex, "prefix", prefix)
    pool = b.attach(of)
    assert [b.prefix(pool, KEYS[:n]) for n in (8, 8, 5)] == [8, 8, 5]
    assert asked == [8]
    assert b.prefix(pool, KEYS) == 8
    write(a.attach(of), a, KEYS[8:], parent=KEYS[7])
    assert b.prefix(pool, KEYS) == 12, "what was missing is asked for each time"
    assert asked == [8, 4, 4]
    b.evict(3 * of.slot_bytes)
    assert b.prefix(pool, KEYS) == 9, "its own evictions it knows at once"
    a.evict(3 * of.slot_bytes)
    end = time.monotonic() + RECOVERY_S
    while b.prefix(pool, KEYS) != 6:
        assert time.monotonic() < end, "and those of others soon"
        time.sleep(0.05)
