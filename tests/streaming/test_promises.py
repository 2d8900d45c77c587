"""What was promised to a request stays until it is released."""

from __future__ import annotations

from dualpath_sglang.promises import MAX_PROMISES, Promises
from tests.streaming.bed import Bed, chain, geometry


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_promise_ends_when_it_is_released_replaced_or_old() -> None:
    clock = Clock()
    promises = Promises(clock)
    promises.give("a", b"1", 10.0)
    promises.give("b", b"1", 20.0)
    promises.release("b")
    assert promises.held() == {b"1"}
    promises.give("a", b"2", 10.0)
    assert promises.held() == {b"2"}
    promises.release("nobody")
    clock.now = 10.0
    assert promises.held() == frozenset()


def test_promises_that_nobody_releases_are_bounded() -> None:
    promises = Promises()
    for i in range(MAX_PROMISES + 5):
        promises.give(str(i), str(i).encode(), 1000.0)
    assert len(promises.held()) == MAX_PROMISES and b"0" not in promises.held()


def test_eviction_passes_over_the_promised_page_and_its_ancestors(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    shared, left, right = chain(1, 4), chain(2, 4), chain(3, 4)
    bed.write(pool, [*shared, *left])
    bed.write(pool, [*shared, *right])
    bed.cache.promise("r", pool, left[1])
    bed.cache.evict(1 << 40)
    assert bed.cache.lookup(pool, [*shared, *left]) == [True] * 6 + [False] * 2
    assert bed.cache.prefix(pool, right) == 0


def test_a_promise_covers_all_pools_of_the_page(bed: Bed) -> None:
    kv, window = bed.cache.attach(geometry("kv")), bed.cache.attach(geometry("swa"))
    keys = chain(1, 5)
    bed.write(kv, keys)
    bed.write(window, keys[3:])
    bed.cache.promise("r", kv, keys[4])
    bed.cache.evict(1 << 40)
    assert bed.cache.prefix(kv, keys) == 5 and bed.cache.prefix(window, keys[3:]) == 2


def test_room_is_still_made_beside_what_is_promised(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    promised, other = chain(1, 3), chain(2, 3)
    bed.write(pool, promised)
    bed.write(pool, other)  # used later than the promised one
    bed.cache.promise("r", pool, promised[-1])
    assert bed.cache.evict(2 * pool.geometry.slot_bytes) == 2
    assert bed.cache.prefix(pool, promised) == 3 and bed.cache.prefix(pool, other) == 1


def test_a_segment_with_a_promised_page_is_not_reclaimed_for_another_pool(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    keys = chain(1, 3)
    bed.write(pool, keys)
    place = bed.cache.locate(pool, keys[:1])[0]
    assert place is not None
    index, geometry_id = bed.cache.index, pool.geometry.id_bytes
    promised = {pool.geometry.unit + keys[2]}
    assert index.evict_segment(geometry_id, place.segment, 1.0, promised=promised) == []
    assert bed.cache.prefix(pool, keys) == 3
    assert len(index.evict_segment(geometry_id, place.segment, 1.0)) == 3


def test_clear_asks_nobody(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    bed.write(pool, chain(1, 3))
    bed.cache.promise("r", pool, chain(1, 3)[-1])
    assert bed.cache.clear() == 3
