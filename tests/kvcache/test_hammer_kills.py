"""Four processes at once on a store that is far too small, and one is killed every other second.

Also while they take pages and files out. Afterwards everything that is found is right, no slot is
lost, and every byte is accounted for. On both indexes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry
from tests.kvcache.caches import killed, read, segment_file, used_bytes, write
from tests.kvcache.processes import CRASHED, small
from tests.kvcache.test_hammer import CAPACITY, LONG_S, SHORT_S, Gauge
from tests.support.blocks import chain
from tests.support.index_choice import source
from tests.support.redis_server import RedisServer
from tests.support.zygote import Child, Zygote

SEGMENT = 1 << 17
PROCESSES = 4


KINDS = ["embedded", "redis"]


@pytest.fixture
def index(request: pytest.FixtureRequest) -> Iterator[str]:
    """The setting ``index`` of all processes."""
    if request.param == "embedded":
        yield "embedded"
        return
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return seed


def opened(root: Path, index: str) -> KVCache:
    cache = KVCache(small(str(root), CAPACITY), index=source(index))
    cache._upkeep.stop()
    return cache


def account(cache: KVCache) -> tuple[int, int]:
    """Blocks that are there and bytes in segments, after one pass of upkeep.

    All blocks read back right; each slot is free or has one block; no segment is nobody's.
    """
    for of in CRASHED:
        cache.attach(of)
    cache.maintain()
    cache.index.check()
    blocks = counted = 0
    for of in CRASHED:
        pool = cache.attach(of)
        entries = list(cache.index.entries(of))
        keys = [entry.key for entry in entries]
        assert read(pool, cache, keys) == [True] * len(keys)
        places = {(e.placement.segment, e.placement.slot) for e in entries}
        assert len(places) == len(entries)
        table = pool.store.slots
        assert {(slot.segment, slot.slot) for slot in table.taken()} == places
        # An empty file, left by a kill in the middle of making it, is removed after a minute.
        files = [(n, segment_file(cache.root, of, n)) for n in pool.store.files.numbers()]
        assert set(table.owned()) == {n for n, path in files if path.stat().st_size}
        counted += (len(entries) + table.free_count()) * of.slot_bytes
        counted += len(table.owned()) * (SEGMENT % of.slot_bytes)  # left at the end of each
        blocks += len(entries)
    used = used_bytes(cache.root)
    assert used == counted
    assert used <= CAPACITY
    return blocks, used


def under_kills(root: Path, seconds: float, seed: int, children: Zygote, index: str) -> None:
    rng = random.Random(seed)
    all_of_them: list[Child] = []
    kills = suicides = 0

    def another() -> Child:
        seed = rng.getrandbits(32)
        all_of_them.append(children.fork("hammer_until_killed", root, CAPACITY, seed, index))
        return all_of_them[-1]

    with Gauge(root) as gauge:
        running = [another() for _ in range(PROCESSES)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            victim = rng.randrange(PROCESSES)
            if running[victim].ended(rng.random()):
                suicides += 1
            assert running[victim].kill() == -9, running[victim].text()
            kills += 1
            running[victim] = another()
            for i, child in enumerate(running):
                if child.ended():
                    assert child.kill() == -9, child.text()
                    suicides += 1
                    running[i] = another()
        for child in running:
            child.kill()
    texts = [child.text() for child in all_of_them]
    hits = sum(int(line.split()[1]) for t in texts for line in t.splitlines()[-1:] if "hits" in t)
    print(f"{kills} kills, {suicides} in an eviction, {hits} hits, at most {gauge.most} bytes")
    assert not [text for text in texts if "WRONG" in text or "Error" in text]
    assert hits > 100
    assert kills > 5 and suicides > 0
    assert CAPACITY // 2 < gauge.most <= CAPACITY
    cache = opened(root, index)
    try:
        blocks, used = account(cache)
    finally:
        cache.close()
    print(f"{blocks} blocks in {used} bytes")
    assert blocks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", KINDS[1:], indirect=True)
def test_four_processes_and_kills(root: Path, seed: int, children: Zygote, index: str) -> None:
    under_kills(root, SHORT_S, seed, children, index)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", KINDS, indirect=True)
def test_four_processes_and_kills_for_a_minute(
    root: Path, seed: int, children: Zygote, index: str
) -> None:
    under_kills(root, LONG_S, seed, children, index)


@pytest.mark.parametrize("lost", ["slot", "block", "segment"])
def test_the_account_sees_what_is_lost(
    root: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: each of the three things that it looks for is found."""
    of: Geometry = CRASHED[0]
    with closing(opened(root, "embedded")) as cache:
        pool = cache.attach(of)
        write(pool, cache, chain("a", 8))
        account(cache)
        if lost == "slot":
            assert pool.store.slots.take(1, 7)
        elif lost == "block":
            (entry, *_) = cache.index.entries(of)
            cache.index.remove(of, [(entry.key, entry.placement.generation)], 5.0)
            monkeypatch.setattr(pool, "take_back", lambda _: None)
        else:
            other = opened(root, "embedded")
            write(other.attach(of), other, chain("b", 8))
        with pytest.raises(AssertionError):
            account(cache)
        if lost == "segment":
            killed(other)
