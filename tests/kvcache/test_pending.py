"""Blocks that are written while the index does not answer: found once it does, wrong never."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import EmbeddedIndex, IndexUnavailableError
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import Geometry
from tests.kvcache.caches import (
    DROPPED,
    PENDING,
    PRESENT,
    STORED,
    killed,
    open_cache,
    read,
    rescan,
    write,
)
from tests.support.blocks import chain
from tests.support.index_choice import ON_REDIS, source

INDEX = RedisIndex if ON_REDIS else EmbeddedIndex
KEYS = chain("late", 6)
READS = ("lookup", "prefix", "present", "freed", "wanted", "entries")
WRITES = ("publish", "touch", "remove", "evict", "claim")


class Outage:
    """Makes calls of every index fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.names: set[str] = set()
        for name in (*READS, *WRITES):
            self._wrap(name, getattr(INDEX, name))

    def _wrap(self, name: str, original: Callable[..., object]) -> None:
        def call(index: object, *args: object, **kwargs: object) -> object:
            if name in self.names:
                raise IndexUnavailableError("an outage of the test")
            return original(index, *args, **kwargs)

        self._patch.setattr(INDEX, name, call)

    def begin(self, *names: str) -> None:
        self.names = set(names)

    def end(self) -> None:
        self.names = set()


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    monkeypatch.setattr("dualpath_sglang.upkeep.EVERY_S", 1000.0)  # only when it is asked
    return Outage(monkeypatch)


@pytest.fixture
def cache(outage: Outage, opened: Callable[..., KVCache]) -> Iterator[KVCache]:
    yield opened()
    outage.end()


@pytest.fixture
def pool(cache: KVCache, of: Geometry) -> Pool:
    found = cache.attach(of)
    assert write(found, cache, chain("early", 2)) == [STORED] * 2
    return found


ALL = (*READS, *WRITES)


@pytest.mark.parametrize("gone", [ALL, WRITES, ("publish",), ("lookup",), ("claim",)])
def test_what_is_written_during_an_outage_is_found_after_it(
    cache: KVCache, pool: Pool, outage: Outage, gone: tuple[str, ...]
) -> None:
    outage.begin(*gone)
    results = write(pool, cache, KEYS)
    needed = gone != ("claim",)  # a claim only saves work
    assert results == [PENDING if needed else STORED] * 6
    assert write(pool, cache, KEYS) == [PRESENT] * 6, "not twice"
    if needed:
        assert read(pool, cache, KEYS) == [False] * 6
    outage.end()
    cache.maintain()
    assert read(pool, cache, KEYS) == [True] * 6
    assert write(pool, cache, KEYS) == [PRESENT] * 6
    assert cache._writer.pending == 0
    cache.index.check()
    assert rescan(cache, pool.geometry) >= set(KEYS)


def test_there_is_room_for_so_many_only_and_the_rest_leaves_no_trace(
    cache: KVCache, pool: Pool, outage: Outage
) -> None:
    cache._writer._late._most = 4
    outage.begin(*ALL)
    assert write(pool, cache, KEYS) == [PENDING] * 4 + [DROPPED] * 2
    taken = len(pool.store.slots.taken())
    assert write(pool, cache, chain("more", 3)) == [DROPPED] * 3
    assert len(pool.store.slots.taken()) == taken
    outage.end()
    cache.maintain()
    assert read(pool, cache, KEYS) == [True] * 4 + [False] * 2


def test_who_publishes_first_wins_and_the_other_slot_is_free_again(
    cache: KVCache, pool: Pool, outage: Outage, root: Path
) -> None:
    outage.begin("publish")
    assert write(pool, cache, KEYS) == [PENDING] * 6
    outage.end()
    other = open_cache(root)
    others_pool = other.attach(pool.geometry)
    assert write(others_pool, other, KEYS) == [STORED] * 6
    taken = len(pool.store.slots.taken())
    cache.maintain()
    assert len(pool.store.slots.taken()) == taken - 6
    assert read(pool, cache, KEYS) == [True] * 6
    other.close()


def test_an_index_made_anew_meanwhile_has_found_them(
    cache: KVCache, pool: Pool, outage: Outage, root: Path
) -> None:
    outage.begin("publish")
    assert write(pool, cache, KEYS) == [PENDING] * 6
    outage.end()
    assert source().rebuild(root, cache.stores, timeout_s=60.0) == 8
    end = time.monotonic() + 30
    while cache._writer.pending or not all(read(pool, cache, KEYS)):
        assert time.monotonic() < end
        cache.maintain()
        time.sleep(0.1)
    index = cache.index
    places = {e.key: e.placement for e in index.entries(pool.geometry)}
    for key in KEYS:
        slot = (places[key].segment, places[key].slot)
        taken = {(s.segment, s.slot): g for s, g in pool.store.slots.taken().items()}
        assert taken[slot] == places[key].generation, "its slot is not given to anybody else"


def test_a_process_that_dies_meanwhile_leaves_them_to_the_next(
    cache: KVCache, pool: Pool, outage: Outage, opened: Callable[..., KVCache]
) -> None:
    outage.begin(*ALL)
    assert write(pool, cache, KEYS) == [PENDING] * 6
    killed(cache)
    outage.end()
    after = opened()
    found = after.attach(pool.geometry)
    assert read(found, after, KEYS) == [True] * 6


def test_blocks_whose_file_is_gone_are_not_published(
    cache: KVCache, pool: Pool, outage: Outage
) -> None:
    outage.begin("publish")
    assert write(pool, cache, KEYS) == [PENDING] * 6
    outage.end()
    for number in pool.store.slots.owned():
        (pool.store.directory / f"seg-{number:08x}").unlink()
    for _ in range(2):
        cache.maintain()
    assert read(pool, cache, KEYS) == [False] * 6
    assert write(pool, cache, KEYS) == [STORED] * 6
    assert read(pool, cache, KEYS) == [True] * 6
