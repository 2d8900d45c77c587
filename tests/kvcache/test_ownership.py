"""Segments on a mount that keeps locks to each machine, as 3FS does: the index says whose they are.

Two caches of this process stand for two machines. The mount is a double: its locks keep nobody out,
nor do those of the allocation and of the opening.
"""

from __future__ import annotations

import errno
import fcntl
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.owners import Owner, machine_id
from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_sglang.index.redis.ownership import RedisOwnership
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from tests.kvcache.caches import (
    DROPPED,
    FAILED,
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
from tests.support.toxic_proxy import Toxic, ToxicProxy

OF = geometry("mha")
KEYS = chain("a", 12)
LEASE_S = 600.0


@pytest.fixture(autouse=True)
def _locks_that_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_storage.backends.posix.fcntl.flock", lambda *_: None)
    monkeypatch.setattr("dualpath_sglang.tenure._KEEP_EVERY_S", 0.0)
    monkeypatch.setattr("dualpath_sglang.tenure._ADOPT_EVERY_S", 0.0)


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
    """`node(machine, url=..., **options)`: a cache that does its upkeep only when asked."""
    caches: list[KVCache] = []

    def make(machine: str, url: str = server.url, **changes: object) -> KVCache:
        source = RedisSource(RedisSettings.parse(url), lookup_timeout_s=0.5)
        source.owner = Owner(machine.encode().ljust(16), f"{machine}:1:x", LEASE_S)
        caches.append(KVCache(options(root, **changes), index=source))
        caches[-1]._upkeep.stop()
        caches[-1].maintain()
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def sleeps(*caches: KVCache) -> None:
    """These have not said a word for longer than a lease, and are to find out for themselves."""
    for cache in caches:
        source = cache._source
        assert isinstance(source, RedisSource) and source.owner is not None
        silent_since = int(1000 * (time.time() - LEASE_S - 1))
        with redis.Redis(port=source.settings.hosts[0][1]) as admin:
            for alive in admin.keys("dualpath:*:alive"):
                me = source.owner.machine + source.owner.name.encode()
                if admin.hexists(alive, me):
                    admin.hset(alive, me, silent_since.to_bytes(8, "big"))
        for pool in cache._attached():
            pool.tenure._sure_until = 0.0


def watches(cache: KVCache) -> None:
    """It has been in touch, and seen what is nobody's, for longer than a lease."""
    ownership = cache.index.ownership
    assert isinstance(ownership, RedisOwnership)
    since, last = ownership._contact
    ownership._contact = (since - LEASE_S - 1, last)
    ownership._unclaimed = {n: t - LEASE_S - 1 for n, t in ownership._unclaimed.items()}


def owned(cache: KVCache) -> set[int]:
    pool = cache._pools.get(OF.id)
    return set() if pool is None else set(pool.store.slots.owned())


def adopt(cache: KVCache) -> set[int]:
    """What it owns, once it has taken what it may."""
    cache.attach(OF)
    return owned(cache)


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
    assert adopt(b) == numbers
    assert read(b.attach(OF), b, KEYS) == [True] * 12


def test_a_dead_node_is_followed_once_its_lease_is_over(
    node: Callable[..., KVCache], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    a, b = node("one"), node("two")
    pool = stored(a, chain("published", 3))
    with monkeypatch.context() as patch:
        patch.setattr(a.index, "publish", die)
        with pytest.raises(Killed):
            write(pool, a, KEYS)
    numbers = owned(a)
    killed(a)
    assert adopt(b) == set()
    sleeps(a)
    b.maintain()
    assert adopt(b) == numbers
    assert read(b.attach(OF), b, [*chain("published", 3), *KEYS]) == [True] * 15, "nothing is lost"


def lost_to_another(node: Callable[..., KVCache]) -> tuple[KVCache, KVCache, set[int]]:
    """Two nodes, of which the first slept until the second had taken its segment and stored."""
    a, b = node("one"), node("two")
    stored(a)
    numbers = owned(a)
    sleeps(a)
    b.maintain()
    assert adopt(b) == numbers
    stored(b, chain("b", 12))
    return a, b, numbers


def test_a_node_that_slept_through_its_lease_writes_no_more_and_gives_way(
    node: Callable[..., KVCache], settled: None
) -> None:
    a, b, _ = lost_to_another(node)
    pool = a.attach(OF)
    assert write(pool, a, chain("late", 3)) == [DROPPED] * 3
    a.maintain()
    assert owned(a) == set()
    assert write(pool, a, chain("again", 3)) == [STORED] * 3
    for cache in (a, b):
        cache.index.check()
        keys = [*KEYS, *chain("b", 12), *chain("again", 3)]
        assert read(cache.attach(OF), cache, keys) == [True] * 27


class Fails:
    """Makes the next calls that renew a lease fail."""

    def __init__(self, patch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        real = RedisOwnership.keep

        def keep(ownership: RedisOwnership, *arguments: Any) -> list[bool]:
            self.left -= 1
            if self.left >= 0:
                raise IndexUnavailableError("not now")
            return real(ownership, *arguments)

        patch.setattr(RedisOwnership, "keep", keep)


@pytest.mark.parametrize("waking", ["upkeep", "upkeep that fails first", "clear", "evict", "close"])
def test_whatever_a_woken_node_does_first_harms_nobody(
    node: Callable[..., KVCache], settled: None, monkeypatch: pytest.MonkeyPatch, waking: str
) -> None:
    """Its freed slots are another's blocks by now, and its empty segment another's file."""
    a, b = node("one"), node("two")
    pool = stored(a)
    a.evict(20 * OF.slot_bytes)  # its slots are to be blanked, its segment is empty
    pool.retire(next(iter(owned(a))))
    sleeps(a)
    b.maintain()
    adopt(b)
    stored(b, chain("b", 12))
    fails = Fails(monkeypatch, 1 if "fails" in waking else 0)
    for _ in range(3):
        if waking == "clear":
            a.clear(units=[b"nothing's"])
        elif waking == "evict":
            a.evict(0)
        elif waking == "close":
            a.close()
            break
        a.maintain()
    assert fails.left < 0 or waking in ("clear", "evict", "close")
    assert read(b.attach(OF), b, chain("b", 12)) == [True] * 12
    b.maintain()
    assert read(b.attach(OF), b, chain("b", 12)) == [True] * 12
    b.index.check()


def test_a_clear_after_waking_leaves_the_files_of_others(
    node: Callable[..., KVCache], settled: None, root: Path
) -> None:
    a, b, numbers = lost_to_another(node)
    a.clear()
    assert owned(a) == set()
    assert all(segment_file(root, OF, number).exists() for number in numbers)
    stored(b, chain("after", 12))
    a.maintain()
    assert read(b.attach(OF), b, chain("after", 12)) == [True] * 12


def test_an_empty_segment_that_is_anothers_by_now_is_not_removed(
    node: Callable[..., KVCache], settled: None, root: Path
) -> None:
    a, b = node("one"), node("two")
    pool = stored(a)
    (number,) = owned(a)
    a.evict(20 * OF.slot_bytes)
    sleeps(a)
    b.maintain()
    assert adopt(b) == {number}
    stored(b, chain("b", 12))
    assert pool.give_up_empty(a.index, 5.0) == 0
    assert segment_file(root, OF, number).exists()
    assert read(b.attach(OF), b, chain("b", 12)) == [True] * 12


def test_one_pool_that_was_kept_does_not_vouch_for_another(
    node: Callable[..., KVCache], settled: None
) -> None:
    side = geometry("mla", model=OF.model, pool="indexer")
    a, b = node("one"), node("two")
    stored(a)
    other = a.attach(side)
    assert write(other, a, KEYS) == [STORED] * 12
    sleeps(a)
    b.maintain()
    b.attach(side)
    assert b.attach(side).store.slots.owned()
    a.attach(OF).tenure.keep(a.index)
    assert a.attach(OF).tenure.sure
    assert write(other, a, chain("late", 3)) == [DROPPED] * 3


def test_a_node_that_owns_nothing_any_more_stores_again(node: Callable[..., KVCache]) -> None:
    a = node("one")
    stored(a)
    a.clear()
    assert owned(a) == set()
    sleeps(a)
    a.maintain()
    stored(a, chain("later", 3))


def test_a_node_that_only_slept_goes_on(node: Callable[..., KVCache]) -> None:
    a = node("one")
    pool = stored(a)
    numbers = owned(a)
    sleeps(a)
    a.maintain()
    assert owned(a) == numbers
    assert write(pool, a, chain("late", 3)) == [STORED] * 3


def test_after_redis_lost_everything_the_living_have_a_lease_to_say_so(
    node: Callable[..., KVCache], server: RedisServer, settled: None
) -> None:
    a, b, dead = (node(name) for name in ("one", "two", "three"))
    stored(a)
    stored(dead, chain("dead", 3))
    numbers = owned(dead)
    killed(dead)
    with server.admin() as admin:
        admin.flushall()
    assert adopt(b) == set(), "before it has noticed"
    for cache in (b, a):  # find out, and fill the index again
        end = time.monotonic() + 30.0
        cache.maintain()
        while cache._keeper.index is None:
            assert time.monotonic() < end
            time.sleep(0.1)
            cache.maintain()
    a.maintain()
    b.maintain()
    assert adopt(b) == set()
    watches(b)
    assert adopt(b) == numbers, "of the dead one alone"
    assert len(owned(a)) == 1
    assert read(b.attach(OF), b, [*KEYS, *chain("dead", 3)]) == [True] * 15


def test_a_segment_of_which_redis_lost_the_last_word_is_not_taken(
    node: Callable[..., KVCache], server: RedisServer, settled: None
) -> None:
    """As after a failover to a replica that lagged."""
    a, b = node("one"), node("two")
    stored(a)
    with server.admin() as admin:
        for owners in admin.keys("dualpath:*:owners"):
            admin.delete(owners)
    assert adopt(b) == set()
    a.maintain()
    assert adopt(b) == set()
    assert write(a.attach(OF), a, chain("more", 3)) == [STORED] * 3


def test_what_a_node_alone_without_redis_makes_is_its_own(
    node: Callable[..., KVCache], server: RedisServer, settled: None
) -> None:
    with ToxicProxy(server.port) as proxy:
        a, b = node("one", url=proxy.url), node("two")
        pool = a.attach(OF)
        proxy.set(Toxic.REFUSED)
        assert write(pool, a, KEYS) == [PENDING] * 12
        assert len(owned(a)) == 1
        assert adopt(b) == set()
        b.maintain()
        assert adopt(b) == set()
        proxy.set(Toxic.NONE)
        end = time.monotonic() + 30.0
        while not all(read(b.attach(OF), b, KEYS)):
            assert time.monotonic() < end
            a.maintain()
            time.sleep(0.1)
        assert adopt(b) == set()
        a.close()


def test_what_it_made_alone_it_trusts_for_a_lease(
    node: Callable[..., KVCache], server: RedisServer
) -> None:
    with ToxicProxy(server.port) as proxy:
        a = node("one", url=proxy.url)
        pool = a.attach(OF)
        proxy.set(Toxic.REFUSED)
        assert write(pool, a, KEYS) == [PENDING] * 12
        left_s = pool.tenure._sure_until - time.monotonic()
        assert 0 < left_s <= Owner(b"").trusted_s < LEASE_S
        pool.tenure._sure_until = 0.0
        assert write(pool, a, chain("late", 3)) == [DROPPED] * 3
        a.close()


def test_a_segment_that_cannot_be_made_is_nobodys(
    node: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "quota")

    a = node("one")
    pool = a.attach(OF)
    monkeypatch.setattr("dualpath_storage.backends.posix.PosixBackend.create", full)
    for i in range(5):
        assert write(pool, a, chain(i, 2)) == [DROPPED] * 2
    assert a.index.ownership.owners(5.0) == {}


def test_owners_of_files_that_are_gone_are_forgotten(
    node: Callable[..., KVCache], root: Path
) -> None:
    a = node("one")
    stored(a)
    (number,) = owned(a)
    a.close()
    segment_file(root, OF, number).unlink()
    b = node("two")
    assert len(b.index.ownership.owners(5.0)) == 1
    b.attach(OF)
    assert b.index.ownership.owners(5.0) == {}


def test_a_redis_that_hangs_keeps_nobody_from_the_allocation(
    node: Callable[..., KVCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("one")
    pool = a.attach(OF)
    real = RedisOwnership.keep

    def keep(ownership: RedisOwnership, *arguments: Any) -> list[bool]:
        server.stop()
        try:
            return real(ownership, *arguments)
        finally:
            server.cont()

    monkeypatch.setattr(RedisOwnership, "keep", keep)
    began = time.monotonic()
    assert FAILED not in write(pool, a, KEYS)
    assert time.monotonic() - began < 8.0


def test_who_lost_contact_for_a_while_does_not_judge_others(node: Callable[..., KVCache]) -> None:
    a, b = node("one"), node("two")
    stored(a)
    numbers = owned(a)
    killed(a)
    sleeps(a)
    assert adopt(b) == set(), "it has been in touch for a moment only"
    ownership = b.index.ownership
    assert isinstance(ownership, RedisOwnership)
    ownership._contact = (-math.inf, time.monotonic() - 60.0)
    assert adopt(b) == set(), "it has not been in touch lately"
    b.maintain()
    assert adopt(b) == set(), "only again"
    watches(b)
    assert adopt(b) == numbers


def test_the_room_of_a_living_node_is_asked_for_not_taken(
    node: Callable[..., KVCache], root: Path, settled: None
) -> None:
    capacity = 4 * 16 * OF.slot_bytes
    small = {"capacity_bytes": capacity, "segment_bytes": 16 * OF.slot_bytes}
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
    assert used_bytes(root) <= capacity


def test_others_are_told_of_a_segment_before_it_is_made(
    node: Callable[..., KVCache], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("one")
    told: list[int] = []
    real = RedisOwnership.keep

    def keep(
        ownership: RedisOwnership, name: bytes, numbers: Sequence[int], timeout_s: float
    ) -> list[bool]:
        new = set(numbers) - set(told)
        assert not any(segment_file(root, OF, number).exists() for number in new)
        told.extend(new)
        return real(ownership, name, numbers, timeout_s)

    monkeypatch.setattr(RedisOwnership, "keep", keep)
    stored(a)
    assert owned(a) == set(told)
    owners = a.index.ownership.owners(5.0)
    assert {number for _, number in owners} == set(told)
    (owner,) = owners.values()
    assert (owner.name, owner.node) == ("one:1:x", "one:1")
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


def test_who_is_gone_for_good_is_inherited_by_hand(
    node: Callable[..., KVCache], settled: None
) -> None:
    a, b = node("one"), node("two")
    stored(a)
    numbers = owned(a)
    killed(a)
    assert adopt(b) == set()
    ownership = b.index.ownership
    assert ownership.inherit("nobody:1:x", 0.0, 5.0) == []
    assert ownership.inherit("one:1:x", 60.0, 5.0) is None, "it was heard of just now"
    time.sleep(0.1)
    assert ownership.inherit("one:1:x", 0.05, 5.0) == [(OF.id_bytes, *numbers)]
    assert {owner.name for owner in ownership.owners(5.0).values()} == {"two:1:x"}
    assert adopt(b) == numbers


def test_a_mount_is_part_of_the_machine(root: Path) -> None:
    root.mkdir()
    assert machine_id(root) == machine_id(root) != machine_id(Path("/proc"))
    assert machine_id(root / "none") != machine_id(root / "none")


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
