"""Segments on a mount that keeps locks to each machine, as 3FS does: the index says whose they are.

Two caches of this process stand for two machines. The mount is a double: its locks keep nobody out.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index.owners import Owner
from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage.segments import Segments
from tests.kvcache.caches import (
    DROPPED,
    PENDING,
    STORED,
    killed,
    options,
    read,
    segment_file,
    used_bytes,
    write,
)
from tests.support.blocks import chain, geometry
from tests.support.redis_server import RedisServer

OF = geometry("mha")
KEYS = chain("a", 12)
SHORT_S = 1.0


@pytest.fixture(autouse=True)
def _locks_that_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_storage.backends.posix.fcntl.flock", lambda *_: None)
    monkeypatch.setattr("dualpath_sglang.pool._KEEP_EVERY_S", 0.0)
    monkeypatch.setattr("dualpath_sglang.pool._ADOPT_EVERY_S", 0.0)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody has had the time to say that he is there."""
    monkeypatch.setattr("dualpath_sglang.index.redis.ownership.SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def node(server: RedisServer, root: Path) -> Iterator[Callable[..., KVCache]]:
    """`node(machine, lease_s=..., **options)`: a cache that does its upkeep only when asked."""
    caches: list[KVCache] = []

    def make(machine: str, lease_s: float = 600.0, **changes: object) -> KVCache:
        source = RedisSource(RedisSettings.parse(server.url), lookup_timeout_s=5.0)
        source.owner = Owner(machine.encode().ljust(16), lease_s)
        caches.append(KVCache(options(root, **changes), index=source))
        caches[-1]._upkeep.stop()
        caches[-1].maintain()
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def owned(cache: KVCache) -> set[int]:
    return set(cache.attach(OF).store.slots.owned())


def adopt(cache: KVCache) -> set[int]:
    pool = cache.attach(OF)
    pool.adopt(cache.index, time.monotonic() + 10.0, now=True)
    return set(pool.store.slots.owned())


def stored(cache: KVCache, keys: list[bytes] = KEYS) -> Pool:
    pool = cache.attach(OF)
    assert write(pool, cache, keys) == [STORED] * len(keys)
    return pool


def test_nobody_takes_what_a_living_node_owns(node: Callable[..., KVCache], settled: None) -> None:
    a, b = node("one"), node("two")
    stored(a)
    assert adopt(b) == set()
    stored(b, chain("b", 3))
    assert owned(a) and owned(b) and owned(a).isdisjoint(owned(b))
    a.maintain()
    assert len(owned(a)) == 1, "and it keeps it"


def test_on_one_machine_the_lock_alone_tells(node: Callable[..., KVCache], settled: None) -> None:
    """Control: without what the index knows, the locks of this mount would let anybody in."""
    a, b = node("one"), node("one")
    stored(a)
    assert adopt(b) == owned(a)


def test_a_node_that_closed_its_store_leaves_it_to_others_at_once(
    node: Callable[..., KVCache],
) -> None:
    a = node("one")
    stored(a)
    numbers = owned(a)
    a.close()
    b = node("two")
    assert owned(b) == numbers
    assert read(b.attach(OF), b, KEYS) == [True] * 12


def test_a_dead_node_is_followed_once_its_lease_is_over(
    node: Callable[..., KVCache], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    a, b = node("one", SHORT_S), node("two", SHORT_S)
    pool = stored(a, chain("published", 3))
    with monkeypatch.context() as patch:
        patch.setattr(a.index, "publish", die)
        with pytest.raises(Killed):
            write(pool, a, KEYS)
    numbers = owned(a)
    killed(a)
    assert adopt(b) == set()
    time.sleep(SHORT_S)
    b.maintain()
    assert adopt(b) == numbers
    assert read(b.attach(OF), b, [*chain("published", 3), *KEYS]) == [True] * 15, "nothing is lost"


def test_a_node_that_slept_through_its_lease_writes_no_more_and_gives_way(
    node: Callable[..., KVCache], settled: None
) -> None:
    a, b = node("one", SHORT_S), node("two", SHORT_S)
    pool = stored(a)
    numbers = owned(a)
    time.sleep(SHORT_S)
    assert write(pool, a, chain("late", 3)) == [DROPPED] * 3, "others may have it by now"
    b.maintain()
    assert adopt(b) == numbers
    assert write(b.attach(OF), b, chain("b", 3)) == [STORED] * 3
    a.maintain()
    assert owned(a) == set()
    assert write(pool, a, chain("again", 3)) == [STORED] * 3
    for cache in (a, b):
        cache.index.check()
        keys = [*KEYS, *chain("b", 3), *chain("again", 3)]
        assert read(cache.attach(OF), cache, keys) == [True] * 18


def test_a_node_that_only_slept_goes_on(node: Callable[..., KVCache]) -> None:
    a = node("one", SHORT_S)
    pool = stored(a)
    numbers = owned(a)
    time.sleep(SHORT_S)
    a.maintain()
    assert owned(a) == numbers
    assert write(pool, a, chain("late", 3)) == [STORED] * 3


def test_after_redis_lost_everything_the_living_have_time_to_say_so(
    node: Callable[..., KVCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, dead = node("one"), node("two"), node("three")
    stored(a)
    stored(dead, chain("dead", 3))
    numbers = owned(dead)
    killed(dead)
    with server.admin() as admin:
        admin.flushall()
    for cache in (b, a):  # find out, and fill the index again
        end = time.monotonic() + 30.0
        cache.maintain()
        while cache._keeper.index is None:
            assert time.monotonic() < end
            time.sleep(0.1)
            cache.maintain()
    assert adopt(b) == set()
    a.maintain()
    monkeypatch.setattr("dualpath_sglang.index.redis.ownership.SETTLE_S", 0.0)
    assert adopt(b) == numbers, "of the dead one alone"
    assert len(owned(a)) == 1


def test_who_lost_contact_for_a_while_does_not_judge_others(
    node: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.index.redis.ownership.SETTLE_S", 1.0)
    monkeypatch.setattr("dualpath_sglang.index.redis.ownership._GAP_S", 0.5)
    a, b = node("one", SHORT_S), node("two", SHORT_S)
    stored(a)
    killed(a)
    time.sleep(1.5)
    assert adopt(b) == set(), "it has not been in touch itself"
    end = time.monotonic() + 30.0
    while not adopt(b):
        assert time.monotonic() < end
        b.maintain()
        time.sleep(0.1)


def test_the_room_of_a_living_node_is_asked_for_not_taken(
    node: Callable[..., KVCache], root: Path, settled: None
) -> None:
    small = {"capacity_bytes": 4 * 16 * OF.slot_bytes, "segment_bytes": 16 * OF.slot_bytes}
    a, b = node("one", **small), node("two", **small)
    for i in range(8):
        write(a.attach(OF), a, chain(i, 8))
    before = owned(a)
    assert len(before) == 4
    write(b.attach(OF), b, KEYS)
    paths = [segment_file(root, OF, number) for number in before]
    assert all(path.exists() for path in paths)
    a.maintain()
    assert sum(path.exists() for path in paths) == 3, "its owner gives it up"
    assert write(b.attach(OF), b, KEYS) == [STORED] * 12
    assert used_bytes(root) <= a.options.capacity_bytes  # type: ignore[operator]


def test_no_segment_is_made_that_nobody_could_be_told_of(
    node: Callable[..., KVCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("one")
    told: list[int] = []
    real = Segments.add

    def add(self: Segments, timeout_s: float, note: Callable[[int], bool] = lambda _: True) -> bool:
        def noted(number: int) -> bool:
            told.append(number)
            assert not segment_file(a.root, OF, number).exists()
            return note(number)

        return real(self, timeout_s, noted)

    monkeypatch.setattr(Segments, "add", add)
    stored(a)
    assert owned(a) == set(told)
    owners = a.index.ownership.owners(5.0)
    assert {number for _, number in owners} == set(told)
    (owner,) = owners.values()
    assert owner.name == a._source.owner.name
    assert 0 <= owner.silent_s < 60


def test_what_an_owner_without_contact_wrote_is_its_own_when_redis_is_back(
    node: Callable[..., KVCache], server: RedisServer, settled: None
) -> None:
    a, b = node("one"), node("two")
    pool = stored(a, chain("early", 3))
    server.stop()
    try:
        assert write(pool, a, KEYS) == [PENDING] * 12
    finally:
        server.cont()
    end = time.monotonic() + 30.0
    while not all(read(b.attach(OF), b, KEYS)):
        assert time.monotonic() < end
        a.maintain()
        b.maintain()
        time.sleep(0.1)
    assert adopt(b) == set()
    assert write(pool, a, chain("more", 3)) == [STORED] * 3


def test_an_owner_without_a_lease_is_always_sure() -> None:
    owner = Owner(lease_s=2.0)
    assert owner.sure
    owner.renewed(time.monotonic())
    assert owner.sure
    owner.renewed(time.monotonic() - 1.5)
    assert not owner.sure


def test_a_gone_owner_is_vacated_by_hand(node: Callable[..., KVCache], settled: None) -> None:
    a, b = node("one"), node("two")
    stored(a)
    numbers = owned(a)
    killed(a)
    assert adopt(b) == set()
    ownership = b.index.ownership
    assert ownership.vacate("nobody:1:x", 5.0) == 0
    assert ownership.vacate(a._source.owner.name, 5.0) == len(numbers)
    assert {(o.name, o.silent_s) for o in ownership.owners(5.0).values()} == {("", math.inf)}
    assert adopt(b) == numbers


def test_the_double_is_of_the_locks(root: Path) -> None:
    """Control: these files could be locked twice."""
    root.mkdir()
    with (root / "x").open("w") as a, (root / "x").open("w") as b:
        fcntl.flock(a, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_owners_are_asked_in_batches(node: Callable[..., KVCache], settled: None) -> None:
    a, b = node("one"), node("two")
    index = a.index
    assert isinstance(index, RedisIndex)
    many = list(range(3000))
    assert index.ownership.keep(OF.id_bytes, many, 5.0) == [True] * 3000
    assert b.index.ownership.may_take(OF.id_bytes, many, 5.0) == [False] * 3000
    index.ownership.give_up(OF.id_bytes, many[:2000], 5.0)
    assert b.index.ownership.may_take(OF.id_bytes, many, 5.0) == [True] * 2000 + [False] * 1000
    index.forget_segments(OF.id_bytes, many, 5.0)
    assert index.ownership.owners(5.0) == {}
