"""Lookups that never keep their thread: from memory, from the index in time, or not yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dualpath_sglang import lookups
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.lookups import Need, PrefixLookups, windows_of
from dualpath_sglang.pool import Pool
from tests.linker.conftest import chain, geometry, put

KEYS = chain(10)


@pytest.fixture
def prefixes(cache: KVCache, pool: Pool) -> Iterator[PrefixLookups]:
    found = PrefixLookups(cache, [Need(pool)], wait_s=10.0)
    yield found
    found.close()


def ask(prefixes: PrefixLookups, rid: str, keys: Sequence[str], **windows: int) -> list[int] | None:
    prefixes.begin_round()
    answer = prefixes.restorable(rid, keys, windows)
    return None if answer is None else list(answer)


def test_every_length_of_the_stored_prefix(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups
) -> None:
    put(cache, pool, KEYS[:6])
    assert ask(prefixes, "a", KEYS) == [1, 2, 3, 4, 5, 6]
    assert ask(prefixes, "b", chain(3, seed=9)) == []
    assert ask(prefixes, "c", []) == []


def test_a_page_missing_from_the_middle_ends_the_prefix(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups
) -> None:
    put(cache, pool, KEYS[:3])
    put(cache, pool, KEYS[4:], parent=KEYS[3])
    assert ask(prefixes, "a", KEYS) == [1, 2, 3]


def test_repeated_questions_are_answered_from_memory(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, pool, KEYS[:6])
    ask(prefixes, "a", KEYS)
    monkeypatch.setattr(cache, "locate", None)  # nobody may ask any more
    assert ask(prefixes, "a", KEYS) == [1, 2, 3, 4, 5, 6]
    assert ask(prefixes, "b", KEYS) == [1, 2, 3, 4, 5, 6]  # another request, the same pages
    assert ask(prefixes, "c", KEYS[:4]) == [1, 2, 3, 4]
    assert prefixes.sources == {"index": 1, "request": 1, "pages": 2}


def test_a_request_of_the_same_name_with_other_tokens_is_looked_up(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups
) -> None:
    put(cache, pool, KEYS)
    assert ask(prefixes, "a", KEYS) == list(range(1, 11))
    assert ask(prefixes, "a", chain(10, seed=9)) == []


def test_a_miss_ends_with_our_own_write(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups
) -> None:
    assert ask(prefixes, "a", KEYS) == []
    put(cache, pool, KEYS[:4])
    prefixes.written(KEYS[:4])
    assert ask(prefixes, "a", KEYS) == [1, 2, 3, 4]


def test_a_miss_ends_by_itself(cache: KVCache, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MISSING_S", 0.05)
    prefixes = PrefixLookups(cache, [Need(pool)], wait_s=10.0)
    assert ask(prefixes, "a", KEYS) == []
    put(cache, pool, KEYS)
    time.sleep(0.1)
    assert ask(prefixes, "a", KEYS) == list(range(1, 11))
    prefixes.close()


def test_evicted_pages_are_forgotten(cache: KVCache, pool: Pool, prefixes: PrefixLookups) -> None:
    put(cache, pool, KEYS)
    ask(prefixes, "a", KEYS)
    prefixes.forget("a")
    assert cache.evict(1 << 30) == 10
    assert ask(prefixes, "b", KEYS) == []


def test_what_was_answered_is_not_evicted_until_the_request_is_forgotten(
    cache: KVCache, pool: Pool, prefixes: PrefixLookups
) -> None:
    put(cache, pool, KEYS)
    ask(prefixes, "a", KEYS[:7])
    assert cache.evict(1 << 30) == 3
    prefixes.forget("a")
    assert cache.evict(1 << 30) == 7


def test_doubt_asks_the_index_again(cache: KVCache, pool: Pool, prefixes: PrefixLookups) -> None:
    put(cache, pool, KEYS)
    ask(prefixes, "a", KEYS)
    cache.clear()
    prefixes.doubt("a")
    assert ask(prefixes, "a", KEYS) == []


def test_side_pools_decide_at_the_end_of_a_prefix(cache: KVCache, pool: Pool) -> None:
    window, state = (cache.attach(geometry(name)) for name in ("swa", "mamba"))
    needs = [Need(pool), Need(window, "swa"), Need(state, "mamba")]
    prefixes = PrefixLookups(cache, needs, wait_s=10.0)
    put(cache, pool, KEYS[:8])
    put(cache, window, KEYS[2:7])
    put(cache, state, [KEYS[5]])
    put(cache, state, [KEYS[7]])
    # The window of three pages is there at the ends of 5..7, a state at the ends of 6 and 8.
    assert ask(prefixes, "a", KEYS, swa=3, mamba=1) == [6]
    prefixes.close()


class SlowIndex:
    """Holds every lookup until it is let go."""

    def __init__(self, cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.asked: list[int] = []
        """Keys of each call."""
        original = cache.locate

        def locate(pool: Pool, keys: Sequence[bytes]) -> Any:
            assert self.go.wait(10.0)
            self.asked.append(len(keys))
            return original(pool, keys)

        monkeypatch.setattr(cache, "locate", locate)


def test_a_slow_index_leaves_the_question_open_and_is_not_asked_twice(
    cache: KVCache, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, pool, KEYS)
    slow = SlowIndex(cache, monkeypatch)
    prefixes = PrefixLookups(cache, [Need(pool)], wait_s=0.01)
    assert ask(prefixes, "a", KEYS) is None
    assert ask(prefixes, "a", KEYS) is None
    slow.go.set()
    answer = None
    while answer is None:
        answer = ask(prefixes, "a", KEYS)
    assert answer == list(range(1, 11))
    assert prefixes.sources == {"index": 1}
    prefixes.close()


def test_an_index_that_does_not_answer_is_a_miss(
    cache: KVCache, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "PATIENCE_S", 0.05)
    monkeypatch.setattr(lookups, "STUCK_S", 0.05)
    put(cache, pool, KEYS)
    slow = SlowIndex(cache, monkeypatch)
    prefixes = PrefixLookups(cache, [Need(pool)], wait_s=0.01)
    while (answer := ask(prefixes, "a", KEYS)) is None:
        pass
    assert answer == []
    assert ask(prefixes, "b", chain(5, seed=3)) == []  # and others do not even wait
    slow.go.set()
    prefixes.close()


def test_all_questions_of_a_round_share_its_wait(
    cache: KVCache, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowIndex(cache, monkeypatch)
    prefixes = PrefixLookups(cache, [Need(pool)], wait_s=0.05)
    prefixes.begin_round()
    assert prefixes.restorable("a", KEYS) is None
    monkeypatch.setattr(threading.Event, "wait", None)  # nobody may wait any more
    for i in range(5):
        assert prefixes.restorable(f"b{i}", chain(3, seed=i)) is None
    monkeypatch.undo()
    slow.go.set()
    prefixes.close()


def test_a_long_chain_is_looked_up_in_turns_with_others(
    cache: KVCache, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = chain(3000), chain(3, seed=5)
    put(cache, pool, long)
    slow = SlowIndex(cache, monkeypatch)
    monkeypatch.setattr(lookups, "PATIENCE_S", 60.0)
    prefixes = PrefixLookups(cache, [Need(pool)], wait_s=0.0)
    assert ask(prefixes, "long", long) is None
    assert ask(prefixes, "short", short) is None
    slow.go.set()
    while (answer := ask(prefixes, "long", long)) is None:
        time.sleep(0.005)  # lets the other thread run
    assert answer == list(range(1, 3001))
    assert slow.asked.index(3) == 1  # after one slice of the long one
    prefixes.close()


def test_windows_are_complete_or_reach_to_the_start() -> None:
    present = [True, False, True, True, True, False]
    assert windows_of(present, 2) == [True, False, False, True, True, False]
    assert windows_of(present, 1) == present
