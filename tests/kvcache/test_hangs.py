"""A store that does not answer: who waits for it waits, everybody else misses at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry
from dualpath_storage.backends.posix import PosixFile
from tests.kvcache.caches import DROPPED, FAILED, PENDING, PRESENT, STORED, read, write
from tests.support.blocks import chain

Opened = Callable[..., KVCache]
LIMIT_S = 0.3
AT_ONCE_S = 20.0
"""Far above any limit here and far below the time that the store hangs."""
KEYS = chain("a", 8)


class Hang:
    """Lets reads or writes of segments block until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.begun = threading.Event()
        self.release()
        for name in ("read", "write"):
            monkeypatch.setattr(PosixFile, name, self._wrap(name))

    def _wrap(self, name: str) -> Callable[[PosixFile, Sequence[memoryview], int], int]:
        real = getattr(PosixFile, name)
        event = self.reads if name == "read" else self.writes

        def call(file: PosixFile, buffers: Sequence[memoryview], offset: int) -> int:
            if not event.is_set():
                self.begun.set()
                event.wait(120)
            return int(real(file, buffers, offset))

        return call

    def release(self) -> None:
        self.reads.set()
        self.writes.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    yield hang
    hang.release()


@pytest.fixture
def cache(opened: Opened, hang: Hang) -> KVCache:
    return opened(read_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S, io_threads=2)


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def quickly(call: Callable[[], object]) -> object:
    began = time.monotonic()
    answer = call()
    assert time.monotonic() - began < AT_ONCE_S
    return answer


def test_a_hung_read_makes_others_miss_and_ends_when_the_store_answers(
    cache: KVCache, of: Geometry, hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    hang.reads.clear()
    thread, results = in_background(lambda: read(pool, cache, KEYS))
    hang.begun.wait(60)
    assert cache.lookup(pool, KEYS) == [True] * 8, "not yet: it may only be slow"
    time.sleep(2 * LIMIT_S)
    for _ in range(5):
        assert quickly(lambda: cache.lookup(pool, KEYS)) == [False] * 8
        assert quickly(lambda: cache.prefix(pool, KEYS)) == 0
        assert quickly(lambda: read(pool, cache, KEYS)) == [False] * 8
        assert quickly(lambda: write(pool, cache, chain("b", 3))) == [DROPPED] * 3
        assert quickly(lambda: cache.evict(1 << 30)) == 0
        assert quickly(lambda: cache.clear()) == 0
        quickly(cache.maintain)
    assert caplog.text.count("does not answer") == 1, "a line a change, not a line a call"
    assert thread.is_alive(), "its memory is still the kernel's"
    assert cache.stats().misses["index"] >= 5 * 24
    hang.release()
    thread.join(60)
    assert results, "the call that waited has ended"
    assert read(pool, cache, KEYS) == [True] * 8, "as if nothing had been"
    assert write(pool, cache, chain("b", 3)) == [STORED] * 3
    assert cache.prefix(pool, KEYS) == 8


def test_a_read_beside_a_hung_one_ends_at_its_own_deadline(
    cache: KVCache, of: Geometry, hang: Hang
) -> None:
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    hang.reads.clear()
    hung = [in_background(lambda: read(pool, cache, KEYS[:1])) for _ in range(2)]
    hang.begun.wait(60)
    while None in cache._readers._since:  # until both workers hang
        time.sleep(0.01)
    assert quickly(lambda: cache.read(pool, KEYS, [[]] * 8, timeout_s=0.05)) == [False] * 8
    assert cache.stats().misses["timeout"] == 8
    hang.release()
    for thread, _ in hung:
        thread.join(60)


def test_a_hung_write_is_not_stored_until_it_is(cache: KVCache, of: Geometry, hang: Hang) -> None:
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    hang.writes.clear()
    thread, results = in_background(lambda: write(pool, cache, chain("b", 8)))
    hang.begun.wait(60)
    assert cache.lookup(pool, chain("b", 8)) == [False] * 8
    time.sleep(2 * LIMIT_S)
    assert quickly(lambda: cache.lookup(pool, KEYS)) == [False] * 8
    assert quickly(lambda: write(pool, cache, chain("b", 8))) == [DROPPED] * 8
    hang.release()
    thread.join(60)
    (outcome,) = results
    assert isinstance(outcome, list)
    for key, result in zip(chain("b", 8), outcome, strict=True):
        assert cache.lookup(pool, [key]) == [result is STORED]
    assert FAILED not in write(pool, cache, chain("b", 8))
    assert read(pool, cache, [*KEYS, *chain("b", 8)]) == [True] * 16


def test_two_writers_of_a_key_do_not_wait_for_each_other(
    cache: KVCache, of: Geometry, hang: Hang
) -> None:
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    hang.writes.clear()
    thread, _ = in_background(lambda: write(pool, cache, chain("b", 4)))
    hang.begun.wait(60)
    assert quickly(lambda: write(pool, cache, chain("b", 4))) == [PRESENT] * 4
    hang.release()
    thread.join(60)


def test_a_cache_can_be_closed_while_the_store_hangs(
    opened: Opened, of: Geometry, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_storage.workers.Workers.close.__defaults__", (0.2,))
    cache = opened(read_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S, io_threads=2)
    pool = cache.attach(of)
    write(pool, cache, KEYS)
    hang.reads.clear()
    thread, _ = in_background(lambda: read(pool, cache, KEYS))
    hang.begun.wait(60)
    quickly(cache.close)
    hang.release()
    thread.join(60)
    again = opened()
    assert read(again.attach(of), again, KEYS) == [True] * 8


def test_an_index_that_does_not_answer_is_a_miss(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()
    pool = cache.attach(of)
    write(pool, cache, KEYS)

    def unavailable(*_: object, **__: object) -> object:
        raise IndexUnavailableError("not now")

    names = ("lookup", "prefix", "publish", "remove", "touch", "evict", "clear", "freed")
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(cache.index, name, unavailable)
        assert cache.lookup(pool, KEYS) == [False] * 8
        assert cache.prefix(pool, KEYS) == 0
        assert read(pool, cache, KEYS) == [False] * 8
        assert write(pool, cache, chain("b", 2)) == [PENDING] * 2
        assert cache.evict(1) == cache.clear() == 0
        cache.maintain()
    assert cache.stats().misses == {"index": 24}
    assert read(pool, cache, KEYS) == [True] * 8
    cache.maintain()
    assert write(pool, cache, chain("b", 2)) == [PRESENT] * 2
    assert read(pool, cache, chain("b", 2)) == [True] * 2


@pytest.mark.parametrize("name", ["publish", "evict", "present", "wanted"])
def test_no_slot_leaks_when_the_index_fails_in_the_middle_of_a_write(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cache = opened(segment_bytes=16 * of.slot_bytes, capacity_bytes=16 * of.slot_bytes)
    pool = cache.attach(of)
    write(pool, cache, chain("a", 10))

    def unavailable(*_: object, **__: object) -> object:
        raise IndexUnavailableError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(cache.index, name, unavailable)
        for i in range(5):
            write(pool, cache, chain(i, 12), parent=chain("a", 10)[-1])
            cache.maintain()
    cache.maintain()
    slots = pool.store.slots
    assert slots.free_count() + len(list(cache.index.entries(of))) == 16
    assert write(pool, cache, chain("new", 16)) == [STORED] * 16


def test_no_slot_leaks_when_upkeep_fails_half_way(
    opened: Opened, of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(segment_bytes=16 * of.slot_bytes, capacity_bytes=16 * of.slot_bytes)
    pool = cache.attach(of)

    def fail(*_: object, **__: object) -> object:
        raise IndexUnavailableError("not now")

    for name in ("forget_freed", "freed", "touch"):
        write(pool, cache, chain(name, 16))
        with monkeypatch.context() as patch:
            patch.setattr(cache.index, name, fail)
            cache.evict(8 * of.slot_bytes)
            cache.maintain()
        cache.maintain()
        assert pool.store.slots.free_count() == 16 - len(list(cache.index.entries(of)))
    with monkeypatch.context() as patch:
        patch.setattr(pool.store, "invalidate", lambda *_: [])
        cache.evict(4 * of.slot_bytes)
        cache.maintain()
    assert pool.store.slots.dirty()
    cache.maintain()
    assert not pool.store.slots.dirty()
    assert write(pool, cache, chain("new", 16)) == [STORED] * 16
    assert read(pool, cache, chain("new", 16)) == [True] * 16
