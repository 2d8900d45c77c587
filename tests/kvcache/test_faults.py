"""Every fault that a store can meet: never a wrong byte, never an exception, repaired by writing.

Each test damages a store in some way, under a running cache and between two runs, and then goes
through :func:`survive`. The controls at the end take the checks away and show that the same
damage would have been served.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.index import Record
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import BlockStore, Geometry, ReadStatus, Slot
from dualpath_storage import header as headers
from dualpath_storage.block_io import BlockIo
from dualpath_storage.ranges import check_header
from tests.kvcache.caches import (
    DROPPED,
    FAILED,
    MIB,
    PENDING,
    STORED,
    WrongBytesError,
    flip,
    killed,
    open_cache,
    place,
    read,
    rescan,
    segment,
    segment_file,
    used_bytes,
    write,
)
from tests.support import blocks
from tests.support.blocks import chain, key
from tests.support.index_choice import embedded
from tests.support.mounts import break_down, fill_up, needs_root, remount, small_disk

PAGES = 24
KEYS = chain("a", PAGES)
MIDDLE = PAGES // 2

Opened = Callable[..., KVCache]
Damage = Callable[[KVCache, Pool], "set[int] | None"]
"""Damages a store with KEYS in it; says which pages are to be missed, None where any may be."""


@contextlib.contextmanager
def no_upkeep(cache: KVCache) -> Iterator[None]:
    """Nothing happens by itself: what is damaged is met by the next call.

    And a transaction can never be under way, which a damaged index could end together with the
    test's process; tests/index/test_damage.py is about that.
    """
    with cache._upkeep.running:
        yield


def page_missing_in_the_middle(cache: KVCache, pool: Pool) -> set[int]:
    generation = place(cache, pool, KEYS[MIDDLE]).generation
    cache.index.remove(pool.geometry, [(KEYS[MIDDLE], generation)], 10)
    return {MIDDLE}


def truncated_segment(cache: KVCache, pool: Pool) -> set[int]:
    at = place(cache, pool, KEYS[MIDDLE])
    path = segment(cache, pool, KEYS[MIDDLE])
    os.truncate(path, at.slot * pool.geometry.slot_bytes + 5000)
    places = [place(cache, pool, k) for k in KEYS]
    return {i for i, p in enumerate(places) if p.segment == at.segment and p.slot >= at.slot}


def zeroed_segment(cache: KVCache, pool: Pool) -> set[int]:
    number = place(cache, pool, KEYS[MIDDLE]).segment
    path = segment(cache, pool, KEYS[MIDDLE])
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    return {i for i, k in enumerate(KEYS) if place(cache, pool, k).segment == number}


def flipped_byte_in_the_payload(cache: KVCache, pool: Pool) -> set[int]:
    flip(cache, pool, KEYS[MIDDLE], 4096 + pool.geometry.block_bytes // 2)
    return {MIDDLE}


def flipped_byte_in_the_header(cache: KVCache, pool: Pool) -> set[int]:
    flip(cache, pool, KEYS[MIDDLE], 40)
    return {MIDDLE}


def reused_slot_with_a_stale_entry(cache: KVCache, pool: Pool) -> set[int]:
    old = place(cache, pool, KEYS[MIDDLE])
    freed = cache.index.remove(pool.geometry, [(KEYS[MIDDLE], old.generation)], 10)
    pool.take_back(freed)
    assert write(pool, cache, [key("new")]) == [STORED]
    new = place(cache, pool, key("new"))
    assert (new.segment, new.slot) == (old.segment, old.slot)
    cache.index.publish(pool.geometry, [Record(KEYS[MIDDLE], KEYS[MIDDLE - 1], old)], 10)
    return {MIDDLE}


def index_deleted(cache: KVCache, pool: Pool) -> None:
    for path in cache.root.glob("index.lmdb*"):
        path.unlink()


def index_file_alone_deleted(cache: KVCache, pool: Pool) -> None:
    (cache.root / "index.lmdb").unlink()


def index_truncated(cache: KVCache, pool: Pool) -> None:
    os.truncate(cache.root / "index.lmdb", 4096)


def index_zeroed(cache: KVCache, pool: Pool) -> None:
    path = cache.root / "index.lmdb"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def index_full_of_garbage(cache: KVCache, pool: Pool) -> None:
    path = cache.root / "index.lmdb"
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(path.stat().st_size))


def index_that_points_to_other_places(cache: KVCache, pool: Pool) -> None:
    """Every entry is well-formed and wrong."""
    entries = list(cache.index.entries(pool.geometry))
    cache.index.clear(pool.geometry, 10)
    shifted = [*entries[1:], entries[0]]
    records = [Record(e.key, e.parent, s.placement) for e, s in zip(entries, shifted, strict=True)]
    cache.index.publish(pool.geometry, records, 10)


def index_that_points_nowhere(cache: KVCache, pool: Pool) -> None:
    entries = list(cache.index.entries(pool.geometry))
    cache.index.clear(pool.geometry, 10)
    rng = random.Random(1)
    for e in entries:
        spot = type(e.placement)(rng.getrandbits(32), rng.getrandbits(32), rng.getrandbits(64))
        cache.index.publish(pool.geometry, [Record(e.key, e.parent, spot)], 10)


def segments_removed(cache: KVCache, pool: Pool) -> None:
    for path in cache.root.glob("*/seg-*"):
        path.unlink()


def geometry_directory_removed(cache: KVCache, pool: Pool) -> None:
    shutil.rmtree(cache.root / pool.geometry.id)


def whole_root_removed(cache: KVCache, pool: Pool) -> None:
    shutil.rmtree(cache.root)


def description_removed(cache: KVCache, pool: Pool) -> set[int]:
    (cache.root / pool.geometry.id / "geometry.json").unlink()
    return set()


def description_damaged(cache: KVCache, pool: Pool) -> set[int]:
    (cache.root / pool.geometry.id / "geometry.json").write_bytes(b"\xff\xfe\x00{")
    return set()


def segments_full_of_garbage(cache: KVCache, pool: Pool) -> set[int]:
    for path in cache.root.glob("*/seg-*"):
        with path.open("r+b") as file:
            file.write(random.Random(1).randbytes(path.stat().st_size))
    return set(range(PAGES))


def segments_swapped(cache: KVCache, pool: Pool) -> set[int]:
    """Two whole files under each other's names."""
    a, b = sorted(cache.root.glob("*/seg-*"))[:2]
    held_a, held_b = a.read_bytes(), b.read_bytes()
    a.write_bytes(held_b)
    b.write_bytes(held_a)
    names = {int(a.name[4:], 16), int(b.name[4:], 16)}
    return {i for i, k in enumerate(KEYS) if place(cache, pool, k).segment in names}


FAULTS = [
    page_missing_in_the_middle,
    truncated_segment,
    zeroed_segment,
    flipped_byte_in_the_payload,
    flipped_byte_in_the_header,
    reused_slot_with_a_stale_entry,
    pytest.param(index_deleted, marks=embedded),
    pytest.param(index_file_alone_deleted, marks=embedded),
    pytest.param(index_truncated, marks=embedded),
    pytest.param(index_zeroed, marks=embedded),
    pytest.param(index_full_of_garbage, marks=embedded),
    index_that_points_to_other_places,
    index_that_points_nowhere,
    segments_removed,
    geometry_directory_removed,
    whole_root_removed,
    description_removed,
    description_damaged,
    segments_full_of_garbage,
    segments_swapped,
]


def small_segments(of: Geometry) -> dict[str, object]:
    """Options that spread KEYS over several segments."""
    return {"segment_bytes": 8 * of.slot_bytes, "capacity_bytes": 100 * of.slot_bytes}


def meet(cache: KVCache, pool: Pool, lost: set[int] | None) -> None:
    """No wrong byte, no exception, and what is missed is what was lost."""
    of = pool.geometry
    cache.lookup(pool, KEYS)
    cache.prefix(pool, KEYS)
    windows = [read(pool, cache, KEYS, (i, i + 1)) for i in range(of.layers)]
    good = read(pool, cache, KEYS)
    if lost is not None:
        assert {i for i, hit in enumerate(good) if not hit} == lost
        for window in windows:
            assert {i for i, hit in enumerate(window) if not hit} <= lost
    present = cache.lookup(pool, KEYS)
    assert [p for p, hit in zip(present, good, strict=True) if not hit and p] == [], (
        "what was found damaged is present no more"
    )


def survive(cache: KVCache, pool: Pool) -> None:
    """No wrong byte, no exception, and writing makes it whole."""
    of = pool.geometry
    cache.prefix(pool, KEYS)
    read(pool, cache, KEYS)
    for i in range(of.layers):
        read(pool, cache, KEYS, (i, i + 1))
    cache.maintain()
    settle(cache)
    results = write(pool, cache, KEYS)
    assert FAILED not in results and DROPPED not in results
    assert read(pool, cache, KEYS) == [True] * PAGES, "repaired by the next write"
    assert cache.prefix(pool, KEYS) == PAGES
    cache.maintain()
    assert set(KEYS) <= rescan(cache, of)
    assert used_bytes(cache.root) <= cache.stats().capacity_bytes


def settle(cache: KVCache) -> None:
    """Do not wait for the pause between two attempts to open the index."""
    cache._keeper._retry_at = 0
    cache.maintain()


@pytest.mark.parametrize("damage", FAULTS, ids=lambda f: f.__name__)
def test_a_running_cache_survives(opened: Opened, of: Geometry, damage: Damage) -> None:
    cache = opened(**small_segments(of))
    pool = cache.attach(of)
    assert write(pool, cache, KEYS) == [STORED] * PAGES
    with no_upkeep(cache):
        lost = damage(cache, pool)
        meet(cache, pool, lost)
    survive(cache, pool)


@pytest.mark.parametrize("damage", FAULTS, ids=lambda f: f.__name__)
def test_upkeep_survives_what_no_call_has_met(opened: Opened, of: Geometry, damage: Damage) -> None:
    cache = opened(**small_segments(of))
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    with no_upkeep(cache):
        damage(cache, pool)
    cache.maintain()
    survive(cache, pool)


@pytest.mark.parametrize("damage", FAULTS, ids=lambda f: f.__name__)
def test_another_process_survives(opened: Opened, of: Geometry, damage: Damage) -> None:
    """The owner of the segments is alive beside the one that meets the damage."""
    owner = opened(**small_segments(of))
    write(owner.attach(of), owner, KEYS)
    cache = opened(**small_segments(of))
    pool = cache.attach(of)
    with no_upkeep(owner), no_upkeep(cache):
        lost = damage(owner, owner.attach(of))
    good = read(pool, cache, KEYS)
    if lost is not None:
        assert {i for i, hit in enumerate(good) if not hit} == lost
    for one in (owner, cache, owner, cache):
        settle(one)
    assert FAILED not in write(pool, cache, KEYS)
    assert read(pool, cache, KEYS) == [True] * PAGES
    assert read(owner.attach(of), owner, KEYS) == [True] * PAGES


@pytest.mark.parametrize("damage", FAULTS, ids=lambda f: f.__name__)
def test_the_next_run_survives(root: Path, opened: Opened, of: Geometry, damage: Damage) -> None:
    first = open_cache(root, **small_segments(of))
    write(first.attach(of), first, KEYS)
    with no_upkeep(first):
        lost = damage(first, first.attach(of))
        first._upkeep.stop()
    killed(first)
    cache = opened(**small_segments(of))
    pool = cache.attach(of)
    if damage.__name__.startswith("index_") and "points" not in damage.__name__:
        assert cache.prefix(pool, KEYS) == PAGES, "rebuilt from the store"
        lost = set()
    meet(cache, pool, lost)
    survive(cache, pool)


def test_damage_is_counted_by_kind(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    flipped_byte_in_the_payload(cache, pool)
    flip(cache, pool, KEYS[0], 50)
    reads = read(pool, cache, [*KEYS, key("absent")])
    assert reads.count(False) == 3
    stats = cache.stats()
    assert stats.misses == {"checksum": 1, "header": 1, "absent": 1}
    assert (stats.hit_blocks, stats.repaired_blocks) == (PAGES - 2, 2)


def test_a_write_does_not_take_a_damaged_page_for_present_for_ever(
    opened: Opened, of: Geometry
) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    for _ in range(5):
        flipped_byte_in_the_payload(cache, pool)
        assert not read(pool, cache, KEYS)[MIDDLE]
        assert write(pool, cache, KEYS)[MIDDLE] is STORED
        assert read(pool, cache, KEYS) == [True] * PAGES


def test_damaged_slots_are_used_again_and_bad_places_are_not(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    spot = place(cache, pool, KEYS[MIDDLE])
    flipped_byte_in_the_payload(cache, pool)
    read(pool, cache, KEYS)
    write(pool, cache, KEYS)
    assert place(cache, pool, KEYS[MIDDLE]).slot == spot.slot

    real = BlockStore._try_read

    def bad_sector(self: BlockStore, arena: Any, items: Sequence[Any], window: Any) -> Any:
        if any(item.placement.slot == spot.slot for item in items):
            return [ReadStatus.IO_ERROR] * len(items)
        return real(self, arena, items, window)

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "_try_read", bad_sector)
        good = read(pool, cache, KEYS)
        assert {i for i, hit in enumerate(good) if not hit} == {MIDDLE}
        cache.maintain()
        assert write(pool, cache, KEYS)[MIDDLE] is STORED
        assert place(cache, pool, KEYS[MIDDLE]).slot != spot.slot
        cache.evict(1 << 40)
        cache.maintain()
        write(pool, cache, chain("more", 60))
        places = [place(cache, pool, k) for k in chain("more", 60)]
        assert (spot.segment, spot.slot) not in {(p.segment, p.slot) for p in places}
        assert Slot(spot.segment, spot.slot) in pool.store.slots.taken()


def test_a_refusal_of_the_system_costs_no_block(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    with monkeypatch.context() as patch:
        refuse = [ReadStatus.UNAVAILABLE]
        patch.setattr(BlockStore, "_try_read", lambda self, arena, items, _: refuse * len(items))
        assert read(pool, cache, KEYS) == [False] * PAGES
    assert cache.stats().misses == {"unavailable": PAGES}
    assert read(pool, cache, KEYS) == [True] * PAGES


# -- file systems that refuse to be written ---------------------------------------------------


@needs_root
def test_a_mount_that_turns_read_only_under_a_running_cache(tmp_path: Path, of: Geometry) -> None:
    with small_disk(tmp_path, 64 * MIB) as disk:
        cache = open_cache(disk / "store", capacity_bytes=16 * MIB)
        pool = cache.attach(of)
        write(pool, cache, KEYS)
        break_down(disk)
        for _ in range(2):
            assert read(pool, cache, KEYS) == [True] * PAGES, "what is there can be read"
            results = write(pool, cache, chain("new", 5))
            assert set(results) == {DROPPED}
            assert cache.lookup(pool, chain("new", 5)) == [False] * 5
            assert cache.evict(of.slot_bytes) == 0
            cache.maintain()
        assert cache.clear() == 0
        cache.close()


@needs_root
@pytest.mark.parametrize("how", ["mounted read-only", "broken down"])
def test_a_store_on_a_read_only_mount_is_read(tmp_path: Path, of: Geometry, how: str) -> None:
    with small_disk(tmp_path, 64 * MIB) as disk:
        with open_cache(disk / "store", capacity_bytes=16 * MIB) as cache:
            pool = cache.attach(of)
            write(pool, cache, KEYS)
            flipped_byte_in_the_payload(cache, pool)
        if how == "mounted read-only":
            remount(disk, "ro")
        else:
            break_down(disk)
        for changes in ({}, {"read_only": True}):
            with open_cache(disk / "store", capacity_bytes=16 * MIB, **changes) as cache:
                pool = cache.attach(of)
                good = read(pool, cache, KEYS)
                assert {i for i, hit in enumerate(good) if not hit} == {MIDDLE}
                assert read(pool, cache, KEYS, (0, 1)).count(True) >= PAGES - 1
                assert set(write(pool, cache, KEYS)) == {DROPPED}
                assert cache.options.read_only
                cache.maintain()


@needs_root
def test_a_store_that_was_read_only_is_written_again(tmp_path: Path, of: Geometry) -> None:
    with small_disk(tmp_path, 64 * MIB) as disk:
        with open_cache(disk / "store", capacity_bytes=16 * MIB) as cache:
            write(cache.attach(of), cache, KEYS)
        remount(disk, "ro")
        with open_cache(disk / "store", capacity_bytes=16 * MIB) as cache:
            assert read(cache.attach(of), cache, KEYS) == [True] * PAGES
        remount(disk, "rw")
        with open_cache(disk / "store", capacity_bytes=16 * MIB) as cache:
            pool = cache.attach(of)
            assert write(pool, cache, chain("new", 5)) == [STORED] * 5
            assert read(pool, cache, [*KEYS, *chain("new", 5)]) == [True] * (PAGES + 5)


# -- disks that are full ----------------------------------------------------------------------


@needs_root
def test_a_disk_smaller_than_the_capacity_fills_and_evicts(tmp_path: Path, of: Geometry) -> None:
    with small_disk(tmp_path, 32 * MIB) as disk:
        cache = open_cache(disk / "store", capacity_bytes=1 << 40, segment_bytes=MIB)
        pool = cache.attach(of)
        batch = max(1, 2 * MIB // of.slot_bytes)
        for i in range(24):
            results = write(pool, cache, chain(i, batch))
            assert FAILED not in results
            stored = [k for k, r in zip(chain(i, batch), results, strict=True) if r is STORED]
            assert read(pool, cache, stored) == [True] * len(stored)
        assert cache.stats().evicted_blocks > 0
        assert read(pool, cache, chain(23, batch)).count(True) > 0
        for i in range(24):
            read(pool, cache, chain(i, batch))
        cache.close()


@needs_root
def test_a_disk_that_others_fill_up(tmp_path: Path, of: Geometry) -> None:
    """Neither a segment nor a page of the index can be added."""
    with small_disk(tmp_path, 32 * MIB) as disk:
        cache = open_cache(disk / "store", capacity_bytes=1 << 40, segment_bytes=MIB)
        pool = cache.attach(of)
        write(pool, cache, KEYS)
        ballast = fill_up(disk)
        free_slots = pool.store.slots.free_count()
        for i in range(60):
            results = write(pool, cache, chain(i, 20))
            assert FAILED not in results
            good = read(pool, cache, chain(i, 20))
            for result, hit in zip(results, good, strict=True):
                assert hit or result in (DROPPED, PENDING)
            cache.maintain()
        read(pool, cache, KEYS)
        assert free_slots or not cache.stats().written_blocks > PAGES
        ballast.unlink()
        settle(cache)
        assert FAILED not in write(pool, cache, KEYS)
        assert read(pool, cache, KEYS) == [True] * PAGES
        assert write(pool, cache, chain("new", 5)) == [STORED] * 5
        cache.close()
        with open_cache(disk / "store", capacity_bytes=1 << 40) as again:
            assert read(again.attach(of), again, KEYS) == [True] * PAGES


@needs_root
def test_a_full_disk_without_preallocation(
    tmp_path: Path, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files cannot be reserved, the write itself meets the end of the disk."""
    monkeypatch.setattr("dualpath_storage.backends.posix._allocate", os.ftruncate)
    with small_disk(tmp_path, 32 * MIB) as disk:
        cache = open_cache(disk / "store", capacity_bytes=1 << 40, segment_bytes=4 * MIB)
        pool = cache.attach(of)
        write(pool, cache, KEYS)
        ballast = fill_up(disk, leave_bytes=10 * of.slot_bytes + 2 * MIB)
        for i in range(8):
            results = write(pool, cache, chain(i, 50))
            assert FAILED not in results
            good = read(pool, cache, chain(i, 50))
            assert not [1 for r, hit in zip(results, good, strict=True) if hit and r is DROPPED]
        assert read(pool, cache, KEYS).count(True) >= 0
        ballast.unlink()
        settle(cache)
        assert FAILED not in write(pool, cache, KEYS)
        assert read(pool, cache, KEYS) == [True] * PAGES
        cache.close()


@needs_root
def test_a_new_store_on_a_full_disk(tmp_path: Path, of: Geometry) -> None:
    with small_disk(tmp_path, 32 * MIB) as disk:
        (disk / "store").mkdir()
        ballast = fill_up(disk)
        cache = open_cache(disk / "store", capacity_bytes=16 * MIB)
        pool = cache.attach(of)
        assert set(write(pool, cache, KEYS)) == {DROPPED}
        assert read(pool, cache, KEYS) == [False] * PAGES
        ballast.unlink()
        settle(cache)
        pool = cache.attach(of)
        assert write(pool, cache, KEYS) == [STORED] * PAGES
        assert read(pool, cache, KEYS) == [True] * PAGES
        cache.close()


# -- controls ---------------------------------------------------------------------------------

VISIBLE: list[Damage] = [
    zeroed_segment,
    flipped_byte_in_the_payload,
    reused_slot_with_a_stale_entry,
    index_that_points_to_other_places,
    segments_full_of_garbage,
    segments_swapped,
]


@pytest.mark.parametrize("damage", VISIBLE, ids=lambda f: f.__name__)
def test_without_the_checks_the_damage_would_be_served(
    opened: Opened, of: Geometry, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(**small_segments(of))
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    damage(cache, pool)
    monkeypatch.setattr(
        BlockIo,
        "_check",
        lambda self, page, item, block, got: (
            ReadStatus.OK if got >= 4096 + of.block_bytes else ReadStatus.SHORT
        ),
    )
    with pytest.raises(WrongBytesError):
        read(pool, cache, KEYS)


def test_without_the_check_of_the_key_a_reused_slot_would_be_served(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums alone do not keep it out: the other block is whole."""
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    reused_slot_with_a_stale_entry(cache, pool)

    def forgetful(page: memoryview, *names: Any) -> Any:
        found = headers.decode(page)
        return check_header(page, *names) if found is None else found

    monkeypatch.setattr("dualpath_storage.block_io.check_header", forgetful)
    with pytest.raises(WrongBytesError):
        read(pool, cache, KEYS)


def test_the_harness_sees_a_wrong_byte(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    wrong = blocks.filled(of, key("something else"))
    cache.write(pool, [key("a")], [wrong])
    with pytest.raises(WrongBytesError):
        read(pool, cache, [key("a")])


def test_segment_files_are_where_the_tests_look_for_them(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    number = place(cache, pool, KEYS[0]).segment
    assert segment_file(cache.root, of, number).exists()
