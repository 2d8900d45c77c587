"""The cache when nothing goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.upkeep import Upkeep
from dualpath_storage import Geometry, StoreError, StoreOptions
from tests.kvcache.caches import (
    DROPPED,
    MIB,
    PRESENT,
    STORED,
    open_cache,
    options,
    place,
    read,
    rescan,
    write,
)
from tests.support import blocks
from tests.support.blocks import chain, geometry, key
from tests.support.index_choice import embedded

Opened = Callable[..., KVCache]


def test_what_was_written_is_found_and_read(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 20)
    assert cache.lookup(pool, keys) == read(pool, cache, keys) == [False] * 20
    assert cache.prefix(pool, keys) == 0
    assert write(pool, cache, keys) == [STORED] * 20
    assert cache.lookup(pool, keys) == read(pool, cache, keys) == [True] * 20
    assert cache.prefix(pool, [*keys, key("more")]) == 20
    assert write(pool, cache, keys) == [PRESENT] * 20


def test_it_is_all_there_after_a_restart(opened: Opened, of: Geometry) -> None:
    keys = chain("a", 20)
    first = opened()
    write(first.attach(of), first, keys)
    first.close()
    second = opened()
    pool = second.attach(of)
    assert second.prefix(pool, keys) == 20
    assert read(pool, second, keys) == [True] * 20


def test_every_window_of_layers(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 5)
    write(pool, cache, keys)
    for first in range(of.layers):
        for end in range(first + 1, of.layers + 1):
            assert read(pool, cache, keys, (first, end)) == [True] * 5


def test_blocks_that_are_partly_there_are_completed(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 9)
    write(pool, cache, keys[:3])
    write(pool, cache, keys[5:6], parent=keys[4])
    results = write(pool, cache, keys)
    assert results == [PRESENT] * 3 + [STORED] * 2 + [PRESENT] + [STORED] * 3
    assert read(pool, cache, keys) == [True] * 9


def test_a_key_twice_in_a_call_is_written_once(opened: Opened) -> None:
    cache = opened()
    pool = cache.attach(geometry())
    twice = [key("a"), key("a")]
    assert write(pool, cache, twice) == [STORED, PRESENT]
    assert read(pool, cache, twice) == [True, True]


def test_nothing_is_a_fine_batch(opened: Opened) -> None:
    cache = opened()
    pool = cache.attach(geometry())
    assert cache.lookup(pool, []) == cache.read(pool, [], []) == cache.write(pool, [], []) == []
    assert cache.prefix(pool, []) == 0
    cache.touch(pool, [])


def test_a_block_larger_than_anything_peers_can_take(opened: Opened) -> None:
    cache = opened(capacity_bytes=64 * MIB)
    pool = cache.attach(geometry("large"))
    assert write(pool, cache, chain("a", 3)) == [STORED] * 3
    assert read(pool, cache, chain("a", 3)) == [True] * 3
    assert read(pool, cache, chain("a", 3), (30, 31)) == [True] * 3


OTHERS = {
    "model": "other",
    "weights": "1",
    "pool": "indexer",
    "dtype": "float8_e4m3fn",
    "page_tokens": 32,
    "form": "another form",
    "shard": "tp1/2",
    "namespace": "tenant",
}


@pytest.mark.parametrize("field", OTHERS)
def test_nothing_is_shared_by_accident(opened: Opened, field: str) -> None:
    cache = opened()
    ours, theirs = cache.attach(geometry()), cache.attach(geometry(**{field: OTHERS[field]}))
    keys = chain("a", 3)
    write(ours, cache, keys)
    assert cache.prefix(theirs, keys) == 0
    assert read(theirs, cache, keys) == [False] * 3
    write(theirs, cache, keys)
    assert read(theirs, cache, keys) == read(ours, cache, keys) == [True] * 3


def test_two_caches_on_one_root_share_their_blocks(opened: Opened, of: Geometry) -> None:
    a, b = opened(), opened()
    pool_a, pool_b = a.attach(of), b.attach(of)
    write(pool_a, a, chain("a", 5))
    write(pool_b, b, chain("b", 5))
    both = [*chain("a", 5), *chain("b", 5)]
    assert read(pool_a, a, both) == read(pool_b, b, both) == [True] * 10
    assert write(pool_b, b, chain("a", 5)) == [PRESENT] * 5


@embedded  # in Redis the second finds it claimed
def test_the_last_writer_of_the_same_block_finds_it_present(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked before either wrote: one block stays, and its bytes are right."""
    a, b = opened(), opened()
    of = geometry()
    pool_a, pool_b = a.attach(of), b.attach(of)
    keys = chain("a", 4)
    real = b.index.publish

    def late(*args: object) -> list[bool]:
        assert write(pool_a, a, keys) == [STORED] * 4
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(b.index, "publish", late)
    assert write(pool_b, b, keys) == [PRESENT] * 4
    monkeypatch.undo()
    assert read(pool_b, b, keys) == [True] * 4
    b.maintain()
    assert write(pool_b, b, chain("b", 4)) == [STORED] * 4
    assert rescan(a, of) == {*keys, *chain("b", 4)}


def test_threads_that_write_the_same_chain_store_it_once(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 30)
    results: list[object] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(30)
        results.extend(write(pool, cache, keys))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(STORED) == 30
    assert results.count(PRESENT) == 7 * 30
    assert read(pool, cache, keys) == [True] * 30


def test_a_reader_only_reads(opened: Opened, root: Path, of: Geometry) -> None:
    writer = opened()
    write(writer.attach(of), writer, chain("a", 5))
    writer.maintain()
    reader = opened(read_only=True)
    pool = reader.attach(of)
    assert read(pool, reader, chain("a", 5)) == [True] * 5
    assert write(pool, reader, chain("b", 2)) == [DROPPED] * 2
    reader.touch(pool, chain("a", 5))
    reader.maintain()
    assert reader.evict(1 << 30) == 0
    assert reader.clear() == 0
    assert writer.prefix(writer.attach(of), chain("a", 5)) == 5


def test_a_pool_that_may_not_write_drops(opened: Opened, of: Geometry) -> None:
    """As on the ranks that do not hold a replicated pool's bytes for the others."""
    cache = opened()
    pool = cache.attach(of, writer=False)
    assert write(pool, cache, chain("a", 2)) == [DROPPED] * 2
    assert not (cache.root / of.id).exists()
    assert cache.attach(of, writer=True) is pool
    assert write(pool, cache, chain("a", 2)) == [STORED] * 2


def test_durable_writes(opened: Opened, of: Geometry) -> None:
    cache = opened(durability="fdatasync")
    pool = cache.attach(of)
    assert write(pool, cache, chain("a", 5)) == [STORED] * 5
    assert read(pool, cache, chain("a", 5)) == [True] * 5


def test_buffered_files(opened: Opened, of: Geometry) -> None:
    cache = opened(direct_io="off")
    pool = cache.attach(of)
    write(pool, cache, chain("a", 5))
    assert read(pool, cache, chain("a", 5)) == [True] * 5


def test_no_time_is_no_time_not_the_default(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 64)
    memory = [blocks.filled(of, k) for k in keys]
    assert set(cache.write(pool, keys, memory, timeout_s=-1.0)) <= {DROPPED}
    write(pool, cache, keys)
    missed = cache.read(pool, keys, [blocks.blank(of) for _ in keys], timeout_s=-1.0)
    assert not all(missed)
    assert cache.stats().misses["timeout"] >= 1
    assert read(pool, cache, keys) == [True] * 64, "what was only late is not removed"


def test_the_counters_add_up(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 10)
    write(pool, cache, keys)
    write(pool, cache, keys)
    read(pool, cache, [*keys, key("absent")])
    cache.prefix(pool, [*keys, key("absent")])
    stats = cache.stats()
    assert (stats.written_blocks, stats.present_blocks, stats.hit_blocks) == (10, 10, 10)
    assert stats.written_bytes == stats.read_bytes == 10 * of.block_bytes
    assert stats.misses == {"absent": 2}
    assert 0 < stats.used_bytes <= stats.capacity_bytes == 8 * MIB
    assert (stats.dropped_blocks, stats.failed_blocks, stats.repaired_blocks) == (0, 0, 0)


def test_after_its_end_it_misses(root: Path, of: Geometry) -> None:
    cache = open_cache(root)
    pool = cache.attach(of)
    write(pool, cache, chain("a", 2))
    cache.close()
    cache.close()
    assert cache.lookup(pool, chain("a", 2)) == [False] * 2
    assert cache.read(pool, chain("a", 2), [blocks.blank(of)] * 2) == [False] * 2
    assert write(pool, cache, chain("b", 1)) == [DROPPED]
    with pytest.raises(IndexUnavailableError):
        _ = cache.index


def test_it_leaves_no_thread_behind(root: Path) -> None:
    before = set(threading.enumerate())
    with open_cache(root) as cache:
        cache.attach(geometry())
    left = set(threading.enumerate()) - before
    assert not left


def test_a_root_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for root in (file, file / "below"):
        with pytest.raises(StoreError, match=r"^The store's root .* .*\.$"):
            KVCache(options(root))
    with pytest.raises(StoreError, match=r"is not a directory"):
        KVCache(options(tmp_path / "none", read_only=True))


def test_the_same_memory_again_and_again(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    keys = chain("a", 10)
    write(pool, cache, keys)
    pieces = blocks.blank(of)
    for name in keys * 3:
        assert cache.read(pool, [name], [pieces]) == [True]
        assert blocks.holds(of, name, pieces)


def test_upkeep_goes_by_itself(opened: Opened, of: Geometry) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, chain("a", 4))
    cache.evict(1 << 30)
    end = time.monotonic() + 60
    while rescan(cache, of) and time.monotonic() < end:
        time.sleep(0.05)
    assert rescan(cache, of) == set()


def test_a_failing_upkeep_goes_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[float] = []

    def fail(self: Upkeep) -> None:
        calls.append(time.monotonic())
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Upkeep, "run", fail)
        patch.setattr("dualpath_sglang.upkeep.EVERY_S", 0.01)
        opened()
        end = time.monotonic() + 60
        while len(calls) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert len(calls) >= 3
    assert "a bug" in caplog.text


def test_use_is_written_down_by_upkeep(opened: Opened) -> None:
    cache = opened()
    pool = cache.attach(geometry())
    old, new = chain("old", 2), chain("new", 2)
    write(pool, cache, old)
    write(pool, cache, new)
    read(pool, cache, old)
    cache.maintain()
    cache.evict(2 * pool.geometry.slot_bytes)
    assert cache.prefix(pool, old) == 2
    assert cache.prefix(pool, new) == 0


def test_a_generation_is_never_used_twice(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1000)  # a clock that stands still
    cache = opened()
    pool = cache.attach(geometry())
    write(pool, cache, chain("a", 1))
    write(pool, cache, chain("b", 1))
    generations = {place(cache, pool, k).generation for k in (*chain("a", 1), *chain("b", 1))}
    assert len(generations) == 2


def test_options_are_what_they_were(root: Path) -> None:
    given = StoreOptions(root, capacity_bytes=MIB)
    with KVCache(given) as cache:
        assert cache.options is given
