"""Room: who goes first, who shares it, and that nobody takes more than there is."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import BlockStore, Geometry, WriteStatus
from tests.kvcache.caches import (
    DROPPED,
    MIB,
    PRESENT,
    STORED,
    killed,
    open_cache,
    read,
    rescan,
    segment,
    used_bytes,
    write,
)
from tests.support.blocks import chain, geometry, key
from tests.support.index_choice import embedded, remove_index
from tests.support.zygote import Child, Zygote

Opened = Callable[..., KVCache]
OF = geometry("mha", layers=2)
SLOT = OF.slot_bytes
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_sglang.evictor._RECLAIM_EVERY_S", 0.1)


def room_for(blocks: int, of: Geometry = OF) -> dict[str, object]:
    """Options of a store that holds that many blocks, in segments of 8."""
    return {"capacity_bytes": blocks * of.slot_bytes, "segment_bytes": 8 * of.slot_bytes}


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def child(children: Zygote, *call: object) -> Iterator[Child]:
    running = children.fork(*call)  # type: ignore[arg-type]
    running.until("full")
    try:
        yield running
    finally:
        if not running.ended():
            running.kill()


# -- order ------------------------------------------------------------------------------------


def test_the_capacity_is_never_exceeded(opened: Opened, of: Geometry) -> None:
    cache = opened(**room_for(40, of))
    pool = cache.attach(of)
    for i in range(40):
        assert write(pool, cache, chain(i, 8)) == [STORED] * 8
        assert used_bytes(cache.root) <= 40 * of.slot_bytes
    assert cache.stats().evicted_blocks == 40 * 8 - 40
    assert cache.stats().dropped_blocks == 0


def test_the_least_recently_used_goes_first(opened: Opened) -> None:
    cache = opened(**room_for(40))
    pool = cache.attach(OF)
    for i in range(5):
        write(pool, cache, chain(i, 8))
    read(pool, cache, chain(0, 8))
    cache.maintain()
    write(pool, cache, chain(5, 8))
    write(pool, cache, chain(6, 8))
    assert [cache.prefix(pool, chain(i, 8)) for i in range(7)] == [8, 0, 0, 8, 8, 8, 8]


def test_a_page_never_goes_before_its_children(opened: Opened) -> None:
    cache = opened(**room_for(40))
    pool = cache.attach(OF)
    trunk = chain("trunk", 6)
    write(pool, cache, trunk)
    for i in range(30):
        write(pool, cache, chain(i, 5), parent=trunk[-1])
        entries = {e.key: e.parent for e in cache.index.entries(OF)}
        orphans = [k for k, parent in entries.items() if any(parent) and parent not in entries]
        assert not orphans
    assert cache.prefix(pool, trunk) == 6


def test_all_pools_of_a_page_go_together(opened: Opened) -> None:
    side = geometry("mla", model=OF.model, pool="indexer")
    cache = opened(capacity_bytes=60 * (SLOT + side.slot_bytes), segment_bytes=8 * SLOT)
    kv, indexer = cache.attach(OF), cache.attach(side)
    dropped: set[bytes] = set()
    for i in range(40):
        keys = chain(i, 6)
        for pool in (kv, indexer):
            results = write(pool, cache, keys)
            dropped |= {k for k, r in zip(keys, results, strict=True) if r is DROPPED}
        in_kv = {e.key for e in cache.index.entries(OF)}
        in_indexer = {e.key for e in cache.index.entries(side)}
        assert (in_kv ^ in_indexer) <= dropped
    assert cache.stats().evicted_blocks > 0
    assert len(in_kv & in_indexer) > 30


def test_evicting_by_hand(opened: Opened) -> None:
    cache = opened(**room_for(40))
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 20))
    assert cache.evict(0) == 0
    assert cache.evict(5 * SLOT) == 5
    assert cache.evict(5 * SLOT - 1) == 5
    assert cache.prefix(pool, chain("a", 20)) == 10
    assert cache.evict(1 << 40) == 10
    assert write(pool, cache, chain("a", 20)) == [STORED] * 20


def test_freed_slots_are_used_again(opened: Opened) -> None:
    cache = opened(**room_for(16))
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 16))
    files = sorted(cache.root.glob("*/seg-*"))
    for i in range(20):
        assert write(pool, cache, chain(i, 16)) == [STORED] * 16
        cache.maintain()
    assert sorted(cache.root.glob("*/seg-*")) == files
    assert rescan(cache, OF) == set(chain(19, 16))


def test_slots_that_another_process_freed_are_used_at_once(opened: Opened) -> None:
    owner, other_one = opened(**room_for(16)), opened(**room_for(16))
    pool = owner.attach(OF)
    with owner._upkeep.running:  # not only when upkeep comes round
        write(pool, owner, chain("a", 16))
        assert other_one.evict(6 * SLOT) == 6
        assert write(pool, owner, chain("b", 6)) == [STORED] * 6
    assert owner.stats().evicted_blocks == 0
    assert owner.prefix(pool, chain("a", 16)) == 10


# -- chains longer than the room --------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 16, 200])
def test_a_chain_longer_than_the_capacity_keeps_its_head(opened: Opened, batch: int) -> None:
    cache = opened(**room_for(40))
    pool = cache.attach(OF)
    keys = chain("long", 100)
    for i in range(0, 100, batch):
        parent = keys[i - 1] if i else None
        assert set(write(pool, cache, keys[i : i + batch], parent)) <= {STORED, DROPPED}
    assert cache.prefix(pool, keys) == 40
    evicted = cache.stats().evicted_blocks
    for _ in range(3):  # the engine offers it again at every turn
        for i in range(0, 100, batch):
            write(pool, cache, keys[i : i + batch], keys[i - 1] if i else None)
    assert cache.prefix(pool, keys) == 40
    assert read(pool, cache, keys) == [True] * 40 + [False] * 60
    assert cache.stats().evicted_blocks == evicted == 0, "no thrashing"


def test_a_long_chain_takes_the_place_of_older_ones(opened: Opened) -> None:
    cache = opened(**room_for(40))
    pool = cache.attach(OF)
    for i in range(5):
        write(pool, cache, chain(i, 8))
    keys = chain("long", 100)
    for i in range(0, 100, 10):
        write(pool, cache, keys[i : i + 10], keys[i - 1] if i else None)
    assert cache.prefix(pool, keys) == 40
    assert cache.stats().evicted_blocks == 40


def test_a_long_chain_of_two_pools_keeps_its_head_in_both(opened: Opened) -> None:
    side = geometry("mha", model=OF.model, layers=2, pool="indexer")
    cache = opened(**room_for(80))
    kv, indexer = cache.attach(OF), cache.attach(side)
    keys = chain("long", 200)
    for _ in range(2):
        for i in range(0, 200, 8):
            for pool in (kv, indexer):
                write(pool, cache, keys[i : i + 8], keys[i - 1] if i else None)
    both = min(cache.prefix(kv, keys), cache.prefix(indexer, keys))
    assert both >= 32
    assert cache.prefix(kv, keys) == cache.lookup(kv, keys).count(True), "nothing behind a hole"
    assert cache.prefix(indexer, keys) == cache.lookup(indexer, keys).count(True)


def test_nothing_is_evicted_for_pages_whose_prefix_is_gone(opened: Opened) -> None:
    cache = opened(**room_for(16))
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 16))
    assert write(pool, cache, chain("b", 4), parent=key("absent")) == [DROPPED] * 4
    assert cache.prefix(pool, chain("a", 16)) == 16
    cache.evict(6 * SLOT)
    assert write(pool, cache, chain("b", 4), parent=key("absent")) == [STORED] * 4, "free slots"


def test_room_for_a_hole_is_not_made_of_what_leads_to_it(opened: Opened) -> None:
    cache = opened(**room_for(16))
    pool = cache.attach(OF)
    keys = chain("a", 16)
    write(pool, cache, keys)
    (spot,) = cache.index.lookup(OF, [keys[4]])
    assert spot is not None
    cache.index.remove(OF, [(keys[4], spot.generation)], 10)  # its slot comes back at upkeep
    results = write(pool, cache, keys)
    assert results[4] is STORED
    assert cache.prefix(pool, keys) >= 15


def test_a_block_larger_than_the_capacity_is_dropped(opened: Opened) -> None:
    cache = opened(capacity_bytes=SLOT - 1)
    pool = cache.attach(OF)
    assert write(pool, cache, chain("a", 2)) == [DROPPED] * 2
    assert used_bytes(cache.root) == 0


def test_no_more_than_there_is_time_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(**room_for(16))
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 16))
    real = cache.index.evict

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(0.3)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(cache.index, "evict", slow)
    memory = [[memoryview(bytearray(8192))] * 2 for _ in range(8)]
    cache.write(pool, chain("b", 8), memory, timeout_s=0.1)
    assert cache.stats().evicted_blocks <= 8


# -- several models and processes -------------------------------------------------------------


def other(name: str) -> Geometry:
    return geometry("mha", model=name, layers=2)


def writes_until_room(cache: KVCache, pool: Pool, keys: list[bytes]) -> bool:
    """Offer a chain, as an engine does again and again, until all of it is stored."""
    return eventually(lambda: set(write(pool, cache, keys)) <= {STORED, PRESENT})


def test_a_model_gets_room_from_one_that_is_gone(root: Path, opened: Opened) -> None:
    with open_cache(root, **room_for(40)) as before:
        old = before.attach(other("old"))
        for i in range(5):
            write(old, before, chain(i, 8))
    cache = opened(**room_for(40))
    pool = cache.attach(other("new"))
    assert writes_until_room(cache, pool, chain("a", 30))
    assert read(pool, cache, chain("a", 30)) == [True] * 30
    assert used_bytes(root) <= 40 * SLOT
    left = [cache.prefix(cache.attach(other("old")), chain(i, 8)) for i in range(5)]
    assert left == sorted(left), "the least recently used ones made room"


def test_a_model_gets_room_from_empty_segments_of_one_that_is_gone(
    root: Path, opened: Opened
) -> None:
    before = open_cache(root, **room_for(40))
    before._upkeep.stop()  # no upkeep that would give them up
    write(before.attach(other("old")), before, chain("a", 40))
    before.evict(1 << 40)
    killed(before)
    assert used_bytes(root) == 40 * SLOT
    cache = opened(**room_for(40))
    pool = cache.attach(other("new"))
    assert writes_until_room(cache, pool, chain("b", 30))


def test_pools_of_one_process_give_each_other_room(opened: Opened) -> None:
    cache = opened(**room_for(40))
    first, second = cache.attach(other("first")), cache.attach(other("second"))
    for i in range(5):
        write(first, cache, chain(i, 8))
    assert writes_until_room(cache, second, chain("b", 30))
    assert writes_until_room(cache, first, chain("c", 30))
    assert used_bytes(cache.root) <= 40 * SLOT


@pytest.mark.parametrize("what", ["own_and_wait", "own_and_write"])
@pytest.mark.parametrize("model", ["other", OF.model])
def test_a_process_gets_room_from_another_that_is_alive(
    root: Path, opened: Opened, children: Zygote, what: str, model: str
) -> None:
    """Of the same model, too: several engines may share a store."""
    with child(children, what, root, 40 * SLOT, model) as holder:
        assert used_bytes(root) > 30 * SLOT
        cache = opened(capacity_bytes=40 * SLOT, segment_bytes=1 << 17)
        pool = cache.attach(OF)
        assert writes_until_room(cache, pool, chain("mine", 12))
        assert read(pool, cache, chain("mine", 12)) == [True] * 12
        assert used_bytes(root) <= 40 * SLOT
        assert not holder.ended(), holder.text()


def test_a_process_gets_room_from_one_that_is_killed(
    root: Path, opened: Opened, children: Zygote
) -> None:
    with child(children, "own_and_write", root, 40 * SLOT, "other") as holder:
        cache = opened(capacity_bytes=40 * SLOT, segment_bytes=1 << 17)
        pool = cache.attach(OF)
        holder.kill()
        assert writes_until_room(cache, pool, chain("mine", 20))
        assert used_bytes(root) <= 40 * SLOT


def test_the_blocks_of_a_killed_process_can_be_evicted_by_the_next(
    root: Path, opened: Opened, children: Zygote
) -> None:
    with child(children, "own_and_write", root, 40 * SLOT, OF.model) as holder:
        holder.kill()
    cache = opened(capacity_bytes=40 * SLOT, segment_bytes=1 << 17)
    pool = cache.attach(OF)
    for i in range(10):
        assert write(pool, cache, chain(("mine", i), 8)) == [STORED] * 8
    assert used_bytes(root) <= 40 * SLOT


@embedded
def test_segments_that_come_and_go_leave_nothing_in_the_index(opened: Opened) -> None:
    cache = opened(**room_for(24))
    pools = [cache.attach(other(name)) for name in ("a", "b")]
    for i in range(6):
        assert writes_until_room(cache, pools[i % 2], chain(i, 16))
        cache._evictor._reclaim_after.clear()
    cache.maintain()
    on_disk = {int(p.name[4:], 16) for p in cache.root.glob("*/seg-*")}
    for pool in pools:
        assert cache.index.freed(pool.geometry, range(0)) == []
        assert set(cache.index.wanted(pool.geometry)) <= on_disk
    with cache.index._env.read() as txn:  # type: ignore[attr-defined]
        rows = txn.stat(cache.index._freed)["entries"]  # type: ignore[attr-defined]
    assert rows <= 24


def test_a_segment_others_want_is_given_up_even_while_it_is_written(opened: Opened) -> None:
    cache = opened(**room_for(24))
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 24))
    wanted = cache.index.lookup(OF, chain("a", 1))[0]
    assert wanted is not None
    file = segment(cache, pool, chain("a", 1)[0])
    cache.index.evict_segment(OF.id_bytes, wanted.segment, 10)
    slots = pool.store.slots
    slots.free(next(s for s in slots.taken() if s.segment == wanted.segment), 0, dirty=True)
    cache.maintain()
    assert not file.exists()
    assert cache.index.wanted(OF) == []


# -- capacities that change -------------------------------------------------------------------


def test_a_smaller_capacity_is_kept_after_a_restart(root: Path, opened: Opened) -> None:
    with open_cache(root, **room_for(80)) as before:
        pool = before.attach(OF)
        for i in range(10):
            write(pool, before, chain(i, 8))
    cache = opened(**room_for(24))
    pool = cache.attach(OF)
    assert used_bytes(root) == 80 * SLOT
    write(pool, cache, chain("new", 4))
    assert eventually(lambda: used_bytes(root) <= 24 * SLOT)
    left = [cache.prefix(pool, chain(i, 8)) for i in range(1, 10)]
    assert left == sorted(left)
    assert read(pool, cache, chain("new", 4)) == [True] * 4


def test_a_smaller_capacity_is_no_matter_for_who_only_looks(root: Path, opened: Opened) -> None:
    with open_cache(root, **room_for(80)) as before:
        pool = before.attach(OF)
        for i in range(10):
            write(pool, before, chain(i, 8))
    cache = opened(**room_for(24))
    pool = cache.attach(OF)
    for i in range(10):
        read(pool, cache, chain(i, 8))
    cache.maintain()
    assert used_bytes(root) == 80 * SLOT


def test_what_others_take_of_the_free_share_is_given_back(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(**room_for(80))
    pool = cache.attach(OF)
    for i in range(10):
        write(pool, cache, chain(i, 8))
    excess = [20 * SLOT]
    monkeypatch.setattr(cache._space, "excess_bytes", lambda: excess[0])
    cache.maintain()
    excess[0] = 0
    assert 50 * SLOT <= used_bytes(cache.root) <= 60 * SLOT
    assert cache.prefix(pool, chain(9, 8)) == 8


# -- clearing ---------------------------------------------------------------------------------


def test_clearing_touches_its_own_units_only(opened: Opened) -> None:
    cache = opened(**room_for(200))
    kept = [geometry("mha", layers=2, **c) for c in ({"namespace": "b"}, {"model": "other"})]
    gone = [OF, geometry("mla", model=OF.model, pool="indexer")]
    pools = {of: cache.attach(of) for of in [*kept, *gone]}
    for pool in pools.values():
        write(pool, cache, chain("a", 10))
    assert cache.clear(units={OF.unit}) == 20
    for of, pool in pools.items():
        assert cache.prefix(pool, chain("a", 10)) == (10 if of in kept else 0)
    assert cache.clear(namespace="b") == 10
    assert cache.clear(namespace="b") == 0
    assert cache.prefix(pools[kept[1]], chain("a", 10)) == 10
    assert cache.clear() == 10
    assert used_bytes(cache.root) == 0, "the room is given back"
    assert write(pools[OF], cache, chain("a", 10)) == [STORED] * 10


def test_what_was_cleared_does_not_come_back(root: Path, opened: Opened) -> None:
    """Neither from segments without an owner, nor with the index rebuilt from the store."""
    with open_cache(root, **room_for(40)) as before:
        write(before.attach(OF), before, chain("a", 20))
    cache = opened(**room_for(40))
    assert cache.clear(namespace="default") == 20
    assert used_bytes(root) == 0
    cache.close()
    remove_index(root)
    again = opened(**room_for(40))
    assert again.prefix(again.attach(OF), chain("a", 20)) == 0


def test_clearing_beside_a_living_owner(root: Path, opened: Opened) -> None:
    owner, tool = opened(**room_for(40)), opened(**room_for(40))
    pool = owner.attach(OF)
    write(pool, owner, chain("a", 20))
    assert tool.clear() == 20
    assert owner.prefix(pool, chain("a", 20)) == 0
    owner.maintain()
    assert rescan(owner, OF) == set()
    assert write(pool, owner, chain("a", 20)) == [STORED] * 20
    assert read(pool, owner, chain("a", 20)) == [True] * 20


def test_clearing_an_empty_or_unreadable_store(root: Path, opened: Opened) -> None:
    cache = opened()
    assert cache.clear() == 0
    cache.attach(OF)
    (root / OF.id / "geometry.json").write_bytes(b"\xff")
    assert cache.clear() == 0
    shutil.rmtree(root)
    assert cache.clear() == 0


def test_a_store_of_default_capacity_takes_a_share_of_the_disk(opened: Opened) -> None:
    cache = opened(capacity_bytes=None)
    assert cache.stats().capacity_bytes > 100 * MIB
    pool = cache.attach(OF)
    assert write(pool, cache, chain("a", 2)) == [STORED] * 2


def test_nothing_is_evicted_for_a_store_that_cannot_be_written(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(capacity_bytes=MIB)
    pool = cache.attach(geometry("mha"))
    for i in range(40):
        write(pool, cache, chain(i, 4))
    before = cache.index.counts()
    evicted = cache.stats().evicted_blocks
    assert evicted, "it is full"
    monkeypatch.setattr(
        BlockStore, "write", lambda self, items, deadline: [WriteStatus.READ_ONLY] * len(items)
    )
    write(pool, cache, chain("first", 4))  # makes room once, and is refused
    after_one = cache.stats().evicted_blocks
    for i in range(10):
        assert write(pool, cache, chain(f"more {i}", 4)) == [DROPPED] * 4
    assert cache.stats().evicted_blocks == after_one
    assert sum(cache.index.counts().values()) >= sum(before.values()) - (after_one - evicted)
