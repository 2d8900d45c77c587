"""A pool's slots, the index and the headers on disk: all three agree, whatever fails between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import Entry, IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import BlockStore, Slot
from dualpath_storage.scanner import Scanner
from tests.kvcache.caches import (
    DROPPED,
    FAILED,
    PENDING,
    STORED,
    killed,
    open_cache,
    place,
    read,
    rescan,
    write,
)
from tests.support.blocks import chain, geometry
from tests.support.index_choice import remove_index

Opened = Callable[..., KVCache]
OF = geometry("mha", layers=2)
ROOM: dict[str, object] = {
    "capacity_bytes": 16 * OF.slot_bytes,
    "segment_bytes": 16 * OF.slot_bytes,
}


def agree(cache: KVCache, pool: Pool) -> None:
    """Slots taken, blocks indexed and headers on disk are the same."""
    entries = list(cache.index.entries(OF))
    indexed = {Slot(e.placement.segment, e.placement.slot): e.placement.generation for e in entries}
    assert pool.store.slots.taken() == indexed
    assert rescan(cache, OF) == {e.key for e in entries}
    assert cache.index.freed(OF, pool.store.slots.owned()) == []
    assert not pool.store.slots.dirty()
    assert pool.store.slots.free_count() + len(entries) == 16


def blank(cache: KVCache, pool: Pool, key: bytes) -> None:
    spot = place(cache, pool, key)
    path = next(cache.root.glob(f"{OF.id}/seg-*"))
    with path.open("r+b") as file:
        file.seek(spot.slot * OF.slot_bytes)
        file.write(bytes(4096))


def renew(cache: KVCache) -> None:
    """Notice the lost index and open what another process has made."""
    cache.lookup(cache.attach(OF), chain("a", 1))
    cache._keeper._retry_at = 0
    cache.maintain()


@pytest.fixture
def cache(opened: Opened) -> KVCache:
    cache = opened(**ROOM)
    cache._upkeep.stop()  # upkeep only when a test says so
    return cache


def test_they_agree_after_anything_ordinary(cache: KVCache) -> None:
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 10))
    agree(cache, pool)
    cache.evict(3 * OF.slot_bytes)
    cache.maintain()
    agree(cache, pool)
    write(pool, cache, chain("b", 12))
    cache.maintain()
    agree(cache, pool)
    cache.clear()
    cache.maintain()
    assert rescan(cache, OF) == set()


def test_slots_that_a_rebuilt_index_does_not_know_are_free_again(
    cache: KVCache, opened: Opened, root: Path
) -> None:
    pool = cache.attach(OF)
    keys = chain("a", 16)
    write(pool, cache, keys)
    blank(cache, pool, keys[3])
    blank(cache, pool, keys[7])
    remove_index(root)
    opened(**ROOM)  # rebuilds
    renew(cache)
    cache.maintain()
    agree(cache, pool)
    assert pool.store.slots.free_count() == 2


def test_blocks_that_a_rebuild_brought_back_are_gone_again(
    cache: KVCache, opened: Opened, root: Path
) -> None:
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 16))
    cache.evict(5 * OF.slot_bytes)  # their headers still stand
    remove_index(root)
    tool = opened(**ROOM)
    assert tool.prefix(tool.attach(OF, writer=False), chain("a", 16)) == 16
    renew(cache)
    cache.maintain()
    agree(cache, pool)
    assert cache.prefix(pool, chain("a", 16)) == 11
    assert write(pool, cache, chain("b", 5)) == [STORED] * 5


def test_a_write_that_is_under_way_during_a_rebuild_loses_no_slot(
    cache: KVCache, opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 4))
    real = BlockStore.write

    def write_and_lose_the_index(self: BlockStore, *args: object) -> object:
        statuses = real(self, *args)  # type: ignore[arg-type]
        remove_index(root)
        opened(**ROOM)
        renew(cache)
        return statuses

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "write", write_and_lose_the_index)
        results = write(pool, cache, chain("b", 6))
    assert set(results) <= {STORED, PENDING, DROPPED}
    cache.maintain()
    agree(cache, pool)
    assert FAILED not in write(pool, cache, chain("b", 6))
    assert read(pool, cache, [*chain("a", 4), *chain("b", 6)]) == [True] * 10


def test_what_could_not_be_published_for_want_of_room_is_blanked(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cache.attach(OF)
    write(pool, cache, chain("a", 4))

    def fail(*_: object, **__: object) -> None:
        raise IndexUnavailableError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(cache.index, "publish", fail)
        patch.setattr(cache._writer._late, "_most", 0)
        assert write(pool, cache, chain("b", 6)) == [DROPPED] * 6
    assert rescan(cache, OF) == {*chain("a", 4), *chain("b", 6)}
    cache.maintain()
    agree(cache, pool)


def test_what_is_evicted_while_a_segment_is_adopted_is_free(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_cache(root, **ROOM)
    write(first.attach(OF), first, chain("a", 16))
    killed(first)
    heir, other = opened(**ROOM), opened(**ROOM)
    real = heir.index.entries

    def entries(*args: object) -> Iterator[Entry]:
        yield from real(*args)  # type: ignore[arg-type]
        other.evict(3 * OF.slot_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(heir.index, "entries", entries)
        pool = heir.attach(OF)
    heir.maintain()
    agree(heir, pool)
    assert pool.store.slots.free_count() == 3


def test_what_cannot_be_blanked_at_adoption_is_blanked_later(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_cache(root, **ROOM)
    first._upkeep.stop()
    write(first.attach(OF), first, chain("a", 16))
    first.evict(4 * OF.slot_bytes)
    killed(first)
    cache = opened(**ROOM)
    with cache._upkeep.running, monkeypatch.context() as patch:
        patch.setattr(BlockStore, "invalidate", lambda *_: [])
        pool = cache.attach(OF)
        assert len(pool.store.slots.dirty()) == 4
    cache.maintain()
    agree(cache, pool)
    assert cache.prefix(pool, chain("a", 16)) == 12


def test_headers_that_cannot_be_read_at_adoption_are_not_trusted(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_cache(root, **ROOM)
    write(first.attach(OF), first, chain("a", 8))
    killed(first)
    cache = opened(**ROOM)
    cache.index.forget_freed(cache.index.clear(OF, 10), 10)
    with cache._upkeep.running, monkeypatch.context() as patch:
        patch.setattr(Scanner, "_scan_batch", lambda *_: {})
        pool = cache.attach(OF)
    agree(cache, pool)
    assert rescan(cache, OF) == set()
