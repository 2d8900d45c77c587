"""A Redis that answers, but not as it should: emptied, full, read-only, set up wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dualpath_sglang.index import IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.redis.faults import RedisMisconfiguredError
from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import FOREVER_S, INDEXER, KV, OTHER, records
from tests.support.blocks import chain, key
from tests.support.redis_server import RedisServer, wait_for

ONE = {KV.id_bytes: 1}
KEYS = chain("known", 10)

CALLS: list[Callable[[RedisIndex], object]] = [
    lambda index: index.upkeep(),
    lambda index: index.lookup(KV, KEYS),
    lambda index: index.prefix(KV, KEYS),
    lambda index: index.present(KV.unit, KEYS[0]),
    lambda index: index.publish(KV, records([key("new")], slot=100), FOREVER_S),
    lambda index: index.publish(INDEXER, records([key("new")], slot=100), FOREVER_S),
    lambda index: index.touch(KV.unit, KEYS, FOREVER_S),
    lambda index: index.remove(KV, [(KEYS[0], 1)], FOREVER_S),
    lambda index: index.clear(KV, FOREVER_S),
    lambda index: index.set_filled(),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_flushed_server_is_noticed(
    server: RedisServer,
    index: RedisIndex,
    open_at: Callable[..., RedisIndex],
    call: Callable[[RedisIndex], object],
) -> None:
    index.publish(KV, records(KEYS), FOREVER_S)
    index.set_filled()
    with server.admin() as admin:
        admin.flushall()
    with pytest.raises(IndexDamagedError):
        call(index)
    again = open_at(server.url)
    assert again.token != index.token
    assert not again.filled()
    assert again.prefix(KV, KEYS) == 0
    assert all(again.publish(KV, records(KEYS), FOREVER_S))


@pytest.mark.parametrize("call", CALLS)
def test_who_knows_the_old_index_does_no_harm_to_the_new(
    server: RedisServer,
    index: RedisIndex,
    open_at: Callable[..., RedisIndex],
    call: Callable[[RedisIndex], object],
) -> None:
    index.publish(KV, records(KEYS), FOREVER_S)
    with server.admin() as admin:
        admin.flushall()
    again = open_at(server.url)
    again.publish(KV, records(KEYS, segment=7), FOREVER_S)
    with pytest.raises(IndexDamagedError):
        call(index)
    assert {p.segment for p in again.lookup(KV, KEYS) if p is not None} == {7}
    assert again.counts() == {KV.id_bytes: len(KEYS)}
    again.check()


def test_an_index_is_begun_anew_for_everybody(
    server: RedisServer, index: RedisIndex, open_at: Callable[..., RedisIndex]
) -> None:
    other = open_at(server.url)
    index.publish(KV, records(KEYS), FOREVER_S)
    index.publish(OTHER, records(KEYS), FOREVER_S)
    index.set_filled()
    assert other.filled()
    index.start_over()
    for old in (index, other):
        with pytest.raises(IndexDamagedError):
            old.upkeep()
    new = open_at(server.url)
    assert not new.filled()
    new.publish(KV, records([key("new")]), FOREVER_S)
    assert new.counts() == {KV.id_bytes: 1}
    assert new.prefix(OTHER, KEYS) == 0
    assert list(new.entries()) == list(new.entries(KV))
    new.check()


def test_a_part_that_is_gone_is_noticed(
    server: RedisServer, index: RedisIndex, open_at: Callable[..., RedisIndex]
) -> None:
    """As when one server of a cluster comes back empty."""
    other, stranger = open_at(server.url), open_at(server.url)
    index.publish(KV, records(KEYS), FOREVER_S)
    index.publish(OTHER, records(KEYS), FOREVER_S)
    with server.admin() as admin:
        admin.delete(*admin.scan_iter(f"dualpath:{{*:{KV.unit.hex()}}}:*"))
    with pytest.raises(IndexDamagedError, match="is gone"):
        index.prefix(KV, KEYS)
    with pytest.raises(IndexDamagedError):
        other.upkeep()
    with pytest.raises(IndexDamagedError):
        stranger.publish(KV, records(KEYS), FOREVER_S)
    assert not open_at(server.url).filled()


def test_a_stranger_notices_a_missing_part_as_he_writes(
    server: RedisServer, index: RedisIndex, open_at: Callable[..., RedisIndex]
) -> None:
    index.publish(KV, records(KEYS), FOREVER_S)
    with server.admin() as admin:
        admin.delete(*admin.scan_iter(f"dualpath:{{*:{KV.unit.hex()}}}:*"))
    stranger = open_at(server.url)
    with pytest.raises(IndexDamagedError, match="is gone"):
        stranger.publish(KV, records(KEYS), FOREVER_S)


def test_stores_that_share_a_server_know_nothing_of_each_other(
    server: RedisServer, index: RedisIndex, open_at: Callable[..., RedisIndex]
) -> None:
    other = open_at(server.url, "f" * 16)
    index.publish(KV, records(KEYS), FOREVER_S)
    assert other.prefix(KV, KEYS) == 0
    assert other.evict(ONE, 5, FOREVER_S) == []
    assert list(other.entries()) == []
    other.start_over()
    index.upkeep()
    assert index.prefix(KV, KEYS) == len(KEYS)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_format_of_another_version_is_refused(
    server: RedisServer, index: RedisIndex, open_at: Callable[..., RedisIndex], read_only: bool
) -> None:
    with server.admin() as admin:
        admin.hset(index._access.key("index"), "format", "2")
    with pytest.raises(IndexUnavailableError, match="format that this version cannot read"):
        open_at(server.url, read_only=read_only)


def test_a_reader_begins_nothing_and_writes_nothing(
    server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    with pytest.raises(IndexUnavailableError, match="no index"):
        open_at(server.url, read_only=True)
    with server.admin() as admin:
        assert admin.dbsize() == 0
    open_at(server.url).publish(KV, records(KEYS), FOREVER_S)
    reader = open_at(server.url, read_only=True)
    assert reader.prefix(KV, KEYS) == len(KEYS)
    reader.upkeep()
    calls: list[Callable[[], object]] = [
        lambda: reader.publish(KV, records([key("new")]), FOREVER_S),
        lambda: reader.touch(KV.unit, KEYS, FOREVER_S),
        lambda: reader.remove(KV, [(KEYS[0], 1)], FOREVER_S),
        lambda: reader.evict(ONE, 1, FOREVER_S),
        lambda: reader.evict_segment(KV.id_bytes, 1, FOREVER_S),
        lambda: reader.forget_segments(KV.id_bytes, [1], FOREVER_S),
        lambda: reader.forget_freed([], FOREVER_S),
        lambda: reader.clear(KV, FOREVER_S),
        lambda: reader.drop_segments(KV, [1], FOREVER_S),
        lambda: reader.start_over(),
        lambda: reader.set_filled(),
    ]
    for call in calls:
        with pytest.raises(IndexUnavailableError, match="reading only"):
            call()
    with server.admin() as admin:
        admin.flushall()
    with pytest.raises(IndexDamagedError):
        reader.lookup(KV, KEYS)
    with server.admin() as admin:
        assert admin.dbsize() == 0


def test_a_full_server_still_answers_and_room_can_be_made(
    open_at: Callable[..., RedisIndex],
) -> None:
    with RedisServer(["maxmemory-policy noeviction"]) as server:
        index = open_at(server.url)
        with server.admin() as admin:
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (1 << 20))
        published = 0
        with pytest.raises(IndexUnavailableError, match="is full and refuses writes"):
            for i in range(100):
                keys = chain(i, 256)
                index.publish(KV, records(keys, slot=256 * i), FOREVER_S)
                published += 1
        assert published > 3
        assert index.prefix(KV, chain(0, 256)) == 256
        index.check()
        freed = index.evict(ONE, 1500, FOREVER_S)
        assert len(freed) == 1500
        index.forget_freed(freed, FOREVER_S)
        assert all(index.publish(KV, records(chain("new", 64), segment=9), FOREVER_S))
        index.check()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("min-replicas-to-write", "1", "too few replicas"),
        ("replicaof", "127.0.0.1 1", "is a replica"),
    ],
)
def test_a_server_that_refuses_writes_is_still_read(
    open_at: Callable[..., RedisIndex], name: str, value: str, complaint: str
) -> None:
    with RedisServer() as server, server.admin() as admin:
        index = open_at(server.url)
        index.publish(KV, records(KEYS), FOREVER_S)
        new = records([key("new")], slot=100)
        if name == "replicaof":
            admin.replicaof("127.0.0.1", 1)
        else:
            admin.config_set(name, value)
        for _ in range(5):
            with pytest.raises(IndexUnavailableError, match=complaint) as error:
                index.publish(KV, new, FOREVER_S)
            assert not isinstance(error.value, IndexDamagedError)
            assert index.prefix(KV, KEYS) == len(KEYS)
        if name == "replicaof":
            admin.replicaof("NO", "ONE")
        else:
            admin.config_set(name, "0")
        assert index.publish(KV, new, FOREVER_S) == [True]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_would_throw_parts_away_is_refused(
    open_at: Callable[..., RedisIndex], policy: str
) -> None:
    with RedisServer([f"maxmemory-policy {policy}"]) as server, server.admin() as admin:
        index = open_at(server.url)  # without a limit nothing is thrown away
        index.publish(KV, records(KEYS), FOREVER_S)
        admin.config_set("maxmemory", "64mb")
        with pytest.raises(RedisMisconfiguredError, match=f"is {policy}, and must be noeviction"):
            open_at(server.url)
        admin.config_set("maxmemory-policy", "noeviction")
        assert open_at(server.url).prefix(KV, KEYS) == len(KEYS)


def test_scripts_that_the_server_forgot_are_sent_again(
    server: RedisServer, index: RedisIndex
) -> None:
    index.publish(KV, records(KEYS), FOREVER_S)
    with server.admin() as admin:
        admin.script_flush()
        keys = chain("long", 3000)
        assert all(index.publish(KV, records(keys, slot=100), FOREVER_S))
        admin.script_flush()
        assert index.prefix(KV, keys) == 3000
        wait_for(
            lambda: admin.info("errorstats").get("errorstat_NOSCRIPT"), what="a forgotten script"
        )
    index.check()


def test_a_cluster_must_be_called_one(
    server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    alone = RedisServer(["cluster-enabled yes"])
    with alone, pytest.raises(IndexUnavailableError, match="cluster that is down"):
        open_at(alone.url)
    with pytest.raises(IndexUnavailableError, match="does not say who has the keys"):
        open_at(server.url.replace("redis:", "redis+cluster:"), timeout_s=1.0)
