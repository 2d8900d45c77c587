"""Processes that are killed at any moment, also while they recover from an earlier death."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry, StoreOptions
from tests.kvcache.caches import WrongBytesError, killed, read, used_bytes, write
from tests.kvcache.processes import CRASH_CAPACITY, CRASHED, small
from tests.support import blocks
from tests.support.blocks import chain
from tests.support.index_choice import remove_index, source
from tests.support.zygote import Zygote

KILLS = 200


def one_segment(root: Path) -> KVCache:
    """A cache whose first blocks all lie in the same file, in order."""
    half = CRASH_CAPACITY // 2
    return KVCache(
        StoreOptions(root, CRASH_CAPACITY, min_free_fraction=0, segment_bytes=half), index=source()
    )


def reopened(root: Path) -> KVCache:
    """The store as the next process finds it, with what the dead ones left settled."""
    cache = KVCache(small(str(root)), index=source())
    for of in CRASHED:
        cache.attach(of)
    return cache


def whole(cache: KVCache) -> dict[Geometry, set[bytes]]:
    """Check everything that a store promises; the blocks in it.

    All that the index calls present verifies byte for byte, no two blocks share a slot, a rescan
    finds the same set, nothing is larger than the capacity.
    """
    index = cache.index
    index.check()
    found = {}
    for of in CRASHED:
        pool = cache.attach(of)
        entries = list(index.entries(of))
        keys = [entry.key for entry in entries]
        assert read(pool, cache, keys) == [True] * len(keys)
        assert len({(e.placement.segment, e.placement.slot) for e in entries}) == len(entries)
        scanned = {
            (header.key, slot.segment, slot.slot)
            for store in cache.stores()
            if store.geometry == of
            for slot, header in store.scan()
        }
        indexed = {(e.key, e.placement.segment, e.placement.slot) for e in entries}
        assert scanned == indexed
        taken = set(pool.store.slots.taken())
        assert {(s.segment, s.slot) for s in taken} == {(seg, n) for _, seg, n in indexed}
        found[of] = set(keys)
    assert used_bytes(cache.root) <= CRASH_CAPACITY
    return found


def rebuilt(root: Path) -> dict[Geometry, set[bytes]]:
    """What a new index holds that is made from the store alone."""
    remove_index(root)
    cache = reopened(root)
    try:
        return whole(cache)
    finally:
        killed(cache)


@pytest.mark.timeout(600)
def test_a_store_is_whole_after_every_kill(
    root: Path, children: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.upkeep.EVERY_S", 3600)
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    evicted = blocks_seen = recoveries = rebuilds = 0
    for i in range(KILLS):
        kind = rng.random()
        if kind < 0.25:
            recoveries += 1
            child = children.fork("crash_recovering", root, rng.getrandbits(32))
            child.ended(rng.choice([0.5, rng.random() * 0.03]))
        else:
            child = children.fork("crash_writing", root, rng.getrandbits(32))
            if rng.random() < 0.85:
                child.until("writing")
                child.ended(rng.random() ** 2 * 0.4)
            else:
                child.ended(rng.random() * 0.03)
        status = child.kill()
        assert status in (-9, 0), child.text()
        assert "WRONG" not in child.text()
        if i % 10 == 5:  # killed while it rebuilds the index
            remove_index(root)
            child = children.fork("crash_recovering", root, rng.getrandbits(32))
            child.ended(rng.random() * 0.03)
            child.kill()
        if rng.random() < 0.2:
            continue  # a second death before anybody has looked
        cache = reopened(root)
        try:
            found = whole(cache)
        finally:
            cache.close() if rng.random() < 0.3 else killed(cache)
        blocks_seen += sum(map(len, found.values()))
        evicted += used_bytes(root) == CRASH_CAPACITY // (1 << 17) * (1 << 17)
        if i % 10 == 9:
            rebuilds += 1
            assert rebuilt(root) == found
    print(f"{KILLS} kills, {recoveries} in recovery, {blocks_seen} blocks verified, {evicted} full")
    assert blocks_seen > 1000
    assert evicted > 10, "the store was full often enough for slots to be reused"


def test_a_torn_block_is_found_out(root: Path, of: Geometry) -> None:
    """Control: what the checks above look for can happen, and they see it."""
    cache = one_segment(root)
    pool = cache.attach(of)
    write(pool, cache, chain("a", 4))
    (spot,) = cache.index.lookup(of, chain("a", 1))
    assert spot is not None
    path = next(root.glob("*/seg-*"))
    offset = spot.slot * of.slot_bytes + 4096
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(blocks.content(of, chain("b", 1)[0])[: of.block_bytes // 2])
    assert read(pool, cache, chain("a", 4)) == [False, True, True, True]
    cache.close()


def test_whole_blocks_that_were_not_published_are_adopted_and_torn_ones_blanked(
    root: Path, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    first = one_segment(root)
    pool = first.attach(of)
    write(pool, first, chain("published", 3))
    with monkeypatch.context() as patch:
        patch.setattr(first.index, "publish", die)
        with pytest.raises(Killed):
            write(pool, first, chain("whole", 3))
    path = next(root.glob("*/seg-*"))
    with path.open("r+b") as file:  # the last of the three is torn
        file.seek(5 * of.slot_bytes + 4096 + of.block_bytes // 2)
        file.write(b"torn")
    killed(first)
    second = one_segment(root)
    pool = second.attach(of)
    assert read(pool, second, chain("published", 3)) == [True] * 3
    assert read(pool, second, chain("whole", 3)) == [True, True, False]
    parents = {e.key: e.parent for e in second.index.entries(of)}
    assert parents[chain("whole", 2)[1]] == chain("whole", 1)[0]
    stored = {header.key for store in second.stores() for _, header in store.scan()}
    assert stored == {*chain("published", 3), *chain("whole", 2)}
    second.close()


def test_evicted_blocks_do_not_come_back_after_a_kill(root: Path, of: Geometry) -> None:
    first = one_segment(root)
    first._upkeep.stop()
    pool = first.attach(of)
    write(pool, first, chain("a", 6))
    first.evict(3 * of.slot_bytes)
    killed(first)
    second = one_segment(root)
    pool = second.attach(of)
    assert second.prefix(pool, chain("a", 6)) == 3
    assert {h.key for s in second.stores() for _, h in s.scan()} == set(chain("a", 3))
    second.close()


def test_adoption_that_cannot_reach_the_index_gives_the_segments_back(
    root: Path, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = one_segment(root)
    write(first.attach(of), first, chain("a", 6))
    first.close()

    def fail(*_: object, **__: object) -> None:
        raise IndexUnavailableError("not now")

    second = one_segment(root)
    with monkeypatch.context() as patch:
        patch.setattr(second.index, "forget_freed", fail)
        pool = second.attach(of)
        assert pool.store.slots.owned() == []
    third = one_segment(root)
    pool = third.attach(of)
    assert len(pool.store.slots.owned()) == 1
    assert read(pool, third, chain("a", 6)) == [True] * 6
    second.close()
    third.close()


def test_the_checks_see_a_block_that_the_index_alone_knows(root: Path) -> None:
    """Control of the kill test: a header blanked behind the index's back is noticed."""
    cache = reopened(root)
    pool = cache.attach(CRASHED[0])
    write(pool, cache, chain("a", 3))
    (spot,) = cache.index.lookup(CRASHED[0], chain("a", 1))
    assert spot is not None
    whole(cache)
    path = cache.root / CRASHED[0].id / f"seg-{spot.segment:08x}"
    with path.open("r+b") as file:
        file.seek(spot.slot * CRASHED[0].slot_bytes)
        file.write(bytes(4096))
    with pytest.raises(AssertionError):
        whole(cache)
    cache.close()


def test_the_checks_see_wrong_bytes(root: Path) -> None:
    cache = reopened(root)
    pool = cache.attach(CRASHED[0])
    cache.write(pool, chain("a", 1), [blocks.filled(CRASHED[0], b"x" * 32)])
    with pytest.raises(WrongBytesError):
        whole(cache)
    cache.close()
