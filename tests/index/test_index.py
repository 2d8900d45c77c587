"""Every index: what the model leaves out."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dualpath_sglang.index import Entry, Index, Record, passes
from dualpath_storage import NO_PARENT, Placement
from tests.index.records import FOREVER_S, INDEXER, KV, OTHER, records
from tests.support.blocks import chain, key

ONE = {KV.id_bytes: 1, INDEXER.id_bytes: 1, OTHER.id_bytes: 1}


def keys_of(index: Index) -> set[bytes]:
    return {entry.key for entry in index.entries()}


def test_an_entry_says_all_there_is_to_say(index: Index) -> None:
    a, b = chain("a", 2)
    index.publish(KV, records([a, b], segment=2**32 - 1, slot=7, generation=2**64 - 1), FOREVER_S)
    rows = {entry.key: entry for entry in index.entries(KV)}
    assert rows[b] == Entry(
        KV.unit,
        b,
        KV.id_bytes,
        Placement(2**32 - 1, 8, 2**64 - 1),
        rows[b].last_used_us,
        a,
    )
    assert rows[a].last_used_us > rows[b].last_used_us, "a parent is used later than its child"
    assert list(index.entries(OTHER)) == []


def test_what_stands_is_not_replaced(index: Index) -> None:
    first = Record(key("a"), NO_PARENT, Placement(1, 1, 1))
    second = Record(key("a"), NO_PARENT, Placement(2, 2, 2))
    assert index.publish(KV, [first, second], FOREVER_S) == [True, False] or index.lookup(
        KV, [key("a")]
    ) == [second.placement]
    (place,) = index.lookup(KV, [key("a")])
    assert index.publish(KV, [first, second], FOREVER_S) == [False, False]
    assert index.lookup(KV, [key("a")]) == [place]


def test_a_page_goes_with_all_its_pools(index: Index) -> None:
    keys = chain("a", 3)
    index.publish(KV, records(keys), FOREVER_S)
    index.publish(INDEXER, records(keys, segment=9), FOREVER_S)
    freed = index.evict(ONE, 1, FOREVER_S)
    assert {(row.geometry_id, row.slot.segment) for row in freed} == {
        (KV.id_bytes, 1),
        (INDEXER.id_bytes, 9),
    }
    assert index.prefix(KV, keys) == index.prefix(INDEXER, keys) == 2


def test_units_of_other_models_are_other_pages(index: Index) -> None:
    keys = chain("a", 3)
    index.publish(KV, records(keys), FOREVER_S)
    index.publish(OTHER, records(keys), FOREVER_S)
    index.clear(KV, FOREVER_S)
    assert index.prefix(KV, keys) == 0
    assert index.prefix(OTHER, keys) == 3


def test_eviction_goes_by_last_use_and_from_the_leaves(index: Index) -> None:
    trunk, left, right = chain("trunk", 2), chain("left", 3), chain("right", 2)
    index.publish(KV, records(trunk), FOREVER_S)
    index.publish(KV, records(left, parent=trunk[-1], slot=10), FOREVER_S)
    index.publish(KV, records(right, parent=trunk[-1], slot=20), FOREVER_S)
    index.touch(KV.unit, [*trunk, *left], FOREVER_S)
    gone = []
    before = keys_of(index)
    while before:
        index.evict(ONE, 1, FOREVER_S)
        after = keys_of(index)
        (one,) = before - after
        gone.append(one)
        before = after
    assert gone == [right[1], right[0], left[2], left[1], left[0], trunk[1], trunk[0]]


def test_a_parent_that_comes_late_is_found_to_be_one(index: Index) -> None:
    """As after a damaged page in the middle was taken out and stored again."""
    keys = chain("a", 5)
    index.publish(KV, records(keys), FOREVER_S)
    index.remove(KV, [(keys[2], 1)], FOREVER_S)
    index.publish(KV, [Record(keys[2], keys[1], Placement(1, 50, 2))], FOREVER_S)
    index.check()
    for left in (4, 3, 2):
        index.evict(ONE, 1, FOREVER_S)
        assert index.prefix(KV, keys) == left


def test_a_page_is_as_recent_as_the_child_it_lost(index: Index) -> None:
    old, new = chain("old", 2), chain("new", 1)
    index.publish(KV, records(old), FOREVER_S)
    index.publish(KV, records(new, slot=10), FOREVER_S)
    index.touch(KV.unit, [old[1]], FOREVER_S)
    index.remove(KV, [(old[1], 1)], FOREVER_S)
    index.evict(ONE, 1, FOREVER_S)
    assert keys_of(index) == {old[0]}


def test_the_chain_that_room_is_made_for_stays(index: Index) -> None:
    mine, other = chain("mine", 4), chain("other", 3)
    index.publish(KV, records(mine), FOREVER_S)
    index.publish(KV, records(other, slot=10), FOREVER_S)
    keep = (KV.unit, mine[-1])
    index.evict(ONE, 100, FOREVER_S, keep=keep)
    assert keys_of(index) == set(mine)
    assert index.evict(ONE, 100, FOREVER_S, keep=keep) == []
    assert index.evict(ONE, 100, FOREVER_S, keep=(KV.unit, key("absent"))) == []
    assert len(index.evict(ONE, 100, FOREVER_S)) == 4


def test_what_is_of_use_to_the_caller_goes_first_within_reason(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_MIN_PASSES", 3)
    for i in range(5):
        index.publish(KV, records([key("theirs", i)], segment=1, slot=i), FOREVER_S)
    index.publish(KV, records([key("mine")], segment=2), FOREVER_S)
    mine = {(KV.id_bytes, 2)}
    (freed,) = index.evict(ONE, 1, FOREVER_S, prefer=mine)
    assert freed.slot.slot == 0 and freed.slot.segment == 1, "theirs are much older"
    index.evict(ONE, 1, FOREVER_S)
    (freed,) = index.evict(ONE, 1, FOREVER_S, prefer=mine)
    assert freed.slot.segment == 2, "theirs are hardly older"
    (freed,) = index.evict(ONE, 1, FOREVER_S, prefer=mine)
    assert freed.slot.segment == 1, "better than nothing"


def test_what_was_passed_over_once_does_not_hide_what_follows(index: Index) -> None:
    for i, segment in enumerate([1, 1, 2, 2, 1, 2, 2]):
        index.publish(KV, records([key(i)], segment=segment, slot=i), FOREVER_S)
    freed = index.evict(ONE, 4, FOREVER_S, prefer={(KV.id_bytes, 2)})
    assert [row.slot.slot for row in freed] == [2, 3, 5, 6]


def test_what_is_promised_stays_and_all_that_it_descends_from(index: Index) -> None:
    mine, other = chain("mine", 4), chain("other", 3)
    index.publish(KV, records(mine), FOREVER_S)
    index.publish(OTHER, records(mine, slot=10), FOREVER_S)
    index.publish(KV, records(other, slot=20), FOREVER_S)
    promised = {KV.unit + mine[2]}
    assert len(index.evict(ONE, 100, FOREVER_S, promised=promised)) == 8
    assert index.prefix(KV, mine) == 3
    assert index.evict(ONE, 100, FOREVER_S, promised=promised) == []
    assert index.evict_segment(KV.id_bytes, 1, FOREVER_S, promised=promised) == []
    assert index.prefix(KV, mine) == 3
    assert index.wanted(KV) == []
    assert len(index.evict(ONE, 100, FOREVER_S)) == 3
    index.check()


def test_models_that_are_used_by_turns_go_by_turns(index: Index) -> None:
    for i in range(40):
        index.publish(KV, records([key(i)], slot=i), FOREVER_S)
        index.publish(OTHER, records([key(i)], slot=i), FOREVER_S)
    assert len(index.evict(ONE, 60, FOREVER_S)) == 60
    index.check()
    assert len(index.evict(ONE, 60, FOREVER_S)) == 20
    assert index.counts() == {}
    index.check()


def test_unknown_geometries_count_as_nothing(index: Index) -> None:
    index.publish(OTHER, records(chain("other", 3)), FOREVER_S)
    index.publish(KV, records(chain("kv", 3)), FOREVER_S)
    assert len(index.evict({KV.id_bytes: 10}, 20, FOREVER_S)) == 5
    assert len(keys_of(index)) == 1


def test_a_segment_goes_with_all_that_descends_from_it(index: Index) -> None:
    keys = chain("a", 6)
    for i, name in enumerate(keys):
        parent = keys[i - 1] if i else NO_PARENT
        index.publish(KV, records([name], parent=parent, segment=i), FOREVER_S)
    index.publish(INDEXER, records(keys), FOREVER_S)
    freed = index.evict_segment(KV.id_bytes, 2, FOREVER_S)
    assert len(freed) == 8
    assert index.prefix(KV, keys) == index.prefix(INDEXER, keys) == 2
    assert index.wanted(KV) == [2]
    assert index.wanted(INDEXER) == []
    index.forget_segments(KV.id_bytes, [2], FOREVER_S)
    assert index.wanted(KV) == []
    assert {row.slot.segment for row in index.freed(KV, range(10))} == {3, 4, 5}
    index.check()


def test_the_segments_of_a_chain_are_those_of_its_ancestors(index: Index) -> None:
    keys = chain("a", 5)
    for i, name in enumerate(keys):
        parent = keys[i - 1] if i else NO_PARENT
        index.publish(KV, records([name], parent=parent, segment=i), FOREVER_S)
    index.publish(INDEXER, records(keys[:2], segment=77), FOREVER_S)
    assert index.chain_segments(KV.unit, keys[3]) == {
        *((KV.id_bytes, i) for i in range(4)),
        (INDEXER.id_bytes, 77),
    }
    assert index.chain_segments(KV.unit, key("absent")) == set()


def test_freed_slots_wait_for_their_owner_until_they_are_used_again(index: Index) -> None:
    keys = chain("a", 3)
    index.publish(KV, records(keys), FOREVER_S)
    freed = index.remove(KV, [(keys[0], 1), (keys[1], 1)], FOREVER_S)
    assert index.freed(KV, [1]) == freed
    assert index.freed(KV, [2]) == index.freed(OTHER, [1]) == []
    index.publish(KV, records([key("new")], slot=0, generation=2), FOREVER_S)
    assert index.freed(KV, [1]) == freed[1:]
    index.forget_freed(freed, FOREVER_S)
    assert index.freed(KV, [1]) == []


def test_only_the_block_that_was_meant_is_removed(index: Index) -> None:
    index.publish(KV, records([key("a")], generation=5), FOREVER_S)
    assert index.remove(KV, [(key("a"), 4), (key("b"), 5)], FOREVER_S) == []
    assert index.remove(OTHER, [(key("a"), 5)], FOREVER_S) == []
    assert len(index.remove(KV, [(key("a"), 5)], FOREVER_S)) == 1


def test_large_batches_and_long_chains(index: Index) -> None:
    keys = chain("long", 16_384)
    assert all(index.publish(KV, records(keys), FOREVER_S))
    assert index.prefix(KV, keys) == 16_384
    assert None not in index.lookup(KV, keys)
    index.touch(KV.unit, keys, FOREVER_S)
    freed = index.evict({KV.id_bytes: 1}, 16_000, FOREVER_S)
    assert 4096 <= len(freed) <= 16_000
    assert index.prefix(KV, keys) == 16_384 - len(freed)
    assert len(index.clear(KV, FOREVER_S)) == 16_384 - len(freed)
    assert index.counts() == {}


def test_nothing_is_a_fine_batch(index: Index) -> None:
    assert index.lookup(KV, []) == []
    assert index.prefix(KV, []) == 0
    assert index.publish(KV, [], FOREVER_S) == []
    assert index.remove(KV, [], FOREVER_S) == []
    index.touch(KV.unit, [], FOREVER_S)
    assert index.evict({}, 0, FOREVER_S) == []
    index.forget_freed([], FOREVER_S)


# -- many users -------------------------------------------------------------------------------


def test_those_who_open_it_see_the_same(open_index: Callable[[], Index]) -> None:
    a, b = open_index(), open_index()
    a.publish(KV, records(chain("a", 3)), FOREVER_S)
    assert b.prefix(KV, chain("a", 3)) == 3
    b.publish(KV, records(chain("b", 3), slot=10), FOREVER_S)
    assert open_index().prefix(KV, chain("b", 3)) == 3


def test_threads_read_write_and_evict_beside_each_other(index: Index) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for i in range(30):
                keys = chain((seed, i), 10)
                index.publish(KV, records(keys, segment=seed, slot=10 * i), FOREVER_S)
                index.prefix(KV, keys)
                index.touch(KV.unit, keys, FOREVER_S)
                if i % 3 == 0:
                    index.evict(ONE, 5, FOREVER_S)
                if i % 10 == 0:
                    list(index.entries())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    index.check()


def test_a_walk_that_is_not_finished_holds_nothing(index: Index) -> None:
    index.publish(KV, records(chain("a", 10)), FOREVER_S)
    walk = index.entries()
    next(walk)
    walk.close()
    index.clear(KV, FOREVER_S)
