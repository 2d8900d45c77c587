"""What the child processes of the cache's tests do; imports little, is forked from a zygote."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dualpath_sglang.index import EmbeddedIndex, recovery
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import BlockStore, Geometry, StoreOptions
from dualpath_storage.segments import Segments
from tests.kvcache.caches import read, write
from tests.support.blocks import chain, geometry
from tests.support.index_choice import ON_REDIS, source

CRASH_CAPACITY = 1 << 20
CRASHED: list[Geometry] = [
    geometry("mha", layers=2),
    geometry("mla", model="tiny-mha", pool="indexer"),
]
"""Two pools of one model, whose blocks are small enough for many kills a second."""


def quick() -> None:
    """Without the child process that walks an index before it is opened."""
    recovery.sound = lambda *_: True  # type: ignore[assignment]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def small(root: str, capacity: int = CRASH_CAPACITY, **changes: Any) -> StoreOptions:
    return StoreOptions(
        Path(root), capacity, min_free_fraction=0, segment_bytes=1 << 17, io_threads=2, **changes
    )


# -- crashing ---------------------------------------------------------------------------------


def crash_writing(root: str, seed: int) -> None:
    """Write, read, evict and clear until killed; says so when it reads a wrong byte."""
    quick()
    rng = random.Random(seed)
    cache = KVCache(small(root, durability=rng.choice(["none", "fdatasync"])), index=source())
    pools = [cache.attach(of) for of in CRASHED]
    say("writing")
    for i in itertools.count():
        keys = chain((seed, i), rng.randrange(1, 12))
        cut = rng.randrange(len(keys) + 1)
        for pool in pools:
            write(pool, cache, keys[:cut])
            write(pool, cache, keys[cut:], parent=keys[cut - 1] if cut else None)
        past = chain((seed, rng.randrange(i + 1)), 5)
        try:
            read(rng.choice(pools), cache, past)
        except AssertionError as error:
            say("WRONG", error)
        if rng.random() < 0.2:
            cache.evict(rng.randrange(1 << 17))
        if rng.random() < 0.1:
            cache.maintain()
        if rng.random() < 0.02:
            cache.clear()


def crash_recovering(root: str, seed: int) -> None:
    """Open a store and die somewhere in what recovers it."""
    quick()
    rng = random.Random(seed)
    left = rng.randrange(1, 25)

    def step(real: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args, **kwargs)
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    def scan(real: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for row in real(*args, **kwargs):
                yield step(lambda row=row: row, False)()

        return call

    index = RedisIndex if ON_REDIS else EmbeddedIndex
    for owner, name in (
        (index, "publish"),
        (index, "forget_freed"),
        (index, "freed"),
        (BlockStore, "read"),
        (BlockStore, "invalidate"),
        (Segments, "own"),
        (Segments, "lock_orphans"),
        (Pool, "maintain"),
    ):
        setattr(owner, name, step(getattr(owner, name), rng.random() < 0.5))
    if rng.random() < 0.5:
        BlockStore.scan = scan(BlockStore.scan)  # type: ignore[method-assign]
    cache = KVCache(small(root), index=source())
    for of in CRASHED:
        cache.attach(of)
    cache.maintain()
    cache.close()


# -- hammering --------------------------------------------------------------------------------


class Hammer:
    """Threads that do everything at once to one store, far too small for what they write.

    Args:
        chains: chains that all of them know, of which a tenth fits.
    """

    def __init__(self, cache: KVCache, of: list[Geometry], chains: int, pages: int) -> None:
        self.cache = cache
        self.pools = [cache.attach(each) for each in of]
        self.chains = [chain(("hammer", i), pages) for i in range(chains)]
        self.wrong: list[str] = []
        self.counts = {"reads": 0, "hits": 0, "writes": 0}

    def run(self, threads: int, seconds: float, seed: int) -> None:
        """Returns when all threads have ended; says so when one does not."""
        end = time.monotonic() + seconds
        running = [
            threading.Thread(target=self._work, args=(seed + i, end), daemon=True)
            for i in range(threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(max(0.0, end - time.monotonic()) + 60)
            if thread.is_alive():
                self.wrong.append("a thread does not end")

    def _work(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                self._step(rng)
        except BaseException as error:
            self.wrong.append(repr(error))

    def _step(self, rng: random.Random) -> None:
        pool = rng.choice(self.pools)
        keys = rng.choice(self.chains)
        what = rng.random()
        if what < 0.35:
            run = self.cache.prefix(pool, keys)
            first = run // 8 * 8
            parent = keys[first - 1] if first else None
            write(pool, self.cache, keys[first : first + 16], parent)
            self.counts["writes"] += 1
        elif what < 0.75:
            part = keys[: rng.randrange(1, len(keys) + 1)]
            window = None
            if rng.random() < 0.4:
                layer = rng.randrange(pool.geometry.layers)
                window = (layer, rng.randrange(layer, pool.geometry.layers) + 1)
            hits = read(pool, self.cache, part, window)
            self.counts["reads"] += len(hits)
            self.counts["hits"] += sum(hits)
        elif what < 0.9:
            self.cache.lookup(pool, keys)
            self.cache.prefix(pool, keys)
        elif what < 0.97:
            self.cache.touch(pool, keys)
        elif what < 0.995:
            self.cache.evict(rng.randrange(8) * pool.geometry.slot_bytes)
        else:
            self.cache.maintain()


def hammer(root: str, capacity: int, seconds: float, seed: int) -> None:
    """One of several processes on one store."""
    quick()
    of = CRASHED
    with KVCache(small(root, capacity), index=source()) as cache:
        each = Hammer(cache, of, chains=hammer_chains(of, capacity), pages=32)
        each.run(4, seconds, seed)
        say(each.counts, cache.stats())
    assert not each.wrong, each.wrong[:3]


def hammer_until_killed(root: str, capacity: int, seed: int, index: str) -> None:
    """The same without end; most of them die by themselves while they take pages or files out."""
    quick()
    rng = random.Random(seed)
    kind = EmbeddedIndex if index == "embedded" else RedisIndex
    if rng.random() < 0.7:
        die_in(
            rng,
            rng.randrange(2, 60),
            [
                (kind, "evict"),
                (kind, "evict_segment"),
                (kind, "forget_freed"),
                (BlockStore, "invalidate"),
                (Segments, "drop"),
                (Pool, "give_up_empty"),
            ],
        )
    of = CRASHED
    with KVCache(small(root, capacity), index=source(index)) as cache:
        each = Hammer(cache, of, chains=hammer_chains(of, capacity), pages=32)
        for i in itertools.count():
            each.run(4, 0.25, seed + i)
            if each.wrong:
                say("WRONG", each.wrong[:3])
            say("hits", each.counts["hits"])


def die_in(rng: random.Random, calls: int, where: list[tuple[Any, str]]) -> None:
    """Be killed before or after one of these calls, after that many of them."""
    left = calls
    lock = threading.Lock()

    def dying(real: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                now = left <= 0
            if now and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args, **kwargs)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for owner, name in where:
        setattr(owner, name, dying(getattr(owner, name), rng.random() < 0.5))


def hammer_chains(of: list[Geometry], capacity: int) -> int:
    """Chains of 32 pages in all pools that make ten times a capacity."""
    return 10 * capacity // (32 * sum(each.slot_bytes for each in of)) + 1


# -- sharing the room -------------------------------------------------------------------------


def own_and_wait(root: str, capacity: int, model: str) -> None:
    """Fill a store with another model's blocks, then keep it open."""
    quick()
    of = geometry("mha", model=model, layers=2)
    with KVCache(small(root, capacity), index=source()) as cache:
        pool = cache.attach(of)
        fill_with(cache, pool, model)
        cache.maintain()
        say("full")
        while True:
            time.sleep(0.1)


def own_and_write(root: str, capacity: int, model: str) -> None:
    """Fill a store and go on writing and reading."""
    quick()
    of = geometry("mha", model=model, layers=2)
    with KVCache(small(root, capacity), index=source()) as cache:
        pool = cache.attach(of)
        fill_with(cache, pool, model)
        say("full")
        for i in itertools.count():
            write(pool, cache, chain((model, "more", i), 4))
            read(pool, cache, chain((model, "more", max(0, i - 3)), 4))
            time.sleep(0.005)


def fill_with(cache: KVCache, pool: Pool, name: str) -> None:
    for i in range(2 * cache.stats().capacity_bytes // pool.geometry.slot_bytes // 8):
        write(pool, cache, chain((name, i), 8))
