"""A network or a server that does not do its part: nobody waits for long, and all is well again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.redis import RedisSettings, open_redis_index
from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import FOREVER_S, KV, records
from tests.support.blocks import chain, key
from tests.support.redis_server import RedisServer, wait_for
from tests.support.toxic_proxy import Toxic, ToxicProxy

DEADLINE_S = 0.15
MARGIN_S = 0.25
KEYS = chain("known", 300)
TOXICS = [toxic for toxic in Toxic if toxic is not Toxic.NONE]


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[ToxicProxy]:
    with ToxicProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def index(proxy: ToxicProxy, open_at: Callable[..., RedisIndex]) -> RedisIndex:
    index = open_at(proxy.url, lookup_timeout_s=DEADLINE_S)
    index.publish(KV, records(KEYS), FOREVER_S)
    return index


def answers(index: RedisIndex) -> bool:
    try:
        return index.prefix(KV, KEYS) == len(KEYS)
    except IndexUnavailableError:
        return False


def outcomes(call: Callable[[], object], count: int) -> list[object]:
    """What came of each call; none took much longer than its deadline."""
    found: list[object] = []
    for _ in range(count):
        began = time.monotonic()
        try:
            found.append(call())
        except IndexUnavailableError as error:
            found.append(str(error))
        assert time.monotonic() - began < DEADLINE_S + MARGIN_S
    return found


@pytest.mark.parametrize("toxic", TOXICS)
def test_every_call_ends_by_its_deadline_and_it_recovers(
    index: RedisIndex, proxy: ToxicProxy, toxic: Toxic
) -> None:
    proxy.set(toxic)
    new = records([key("new")], slot=1000)
    failures = [
        *outcomes(lambda: index.lookup(KV, KEYS), 5),
        *outcomes(lambda: index.publish(KV, new, DEADLINE_S), 5),
        *outcomes(lambda: index.prefix(KV, KEYS), 5),
    ]
    assert all(isinstance(failure, str) for failure in failures)
    assert any("has not been answering" in str(failure) for failure in failures)
    proxy.set(Toxic.NONE)
    wait_for(lambda: answers(index), what="recovery")
    assert index.publish(KV, records([key("later")], slot=1001), FOREVER_S) == [True]


@pytest.mark.parametrize("toxic", TOXICS)
def test_a_start_in_bad_times_ends_by_its_deadline(proxy: ToxicProxy, toxic: Toxic) -> None:
    proxy.set(toxic)
    settings = RedisSettings.parse(proxy.url)
    began = time.monotonic()
    with pytest.raises(IndexUnavailableError):
        open_redis_index(settings, "0" * 16, timeout_s=DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S + MARGIN_S


def test_a_slow_network_is_not_a_dead_one(
    proxy: ToxicProxy, open_at: Callable[..., RedisIndex]
) -> None:
    index = open_at(proxy.url)
    index.publish(KV, records(KEYS), FOREVER_S)
    proxy.latency_s = 0.05
    proxy.set(Toxic.SLOW)
    assert outcomes(lambda: index.prefix(KV, KEYS), 3) == [len(KEYS)] * 3


def test_a_whole_chain_is_one_round_trip(
    proxy: ToxicProxy, open_at: Callable[..., RedisIndex]
) -> None:
    keys = chain("long", 16_384)
    index = open_at(proxy.url)
    index.publish(KV, records(keys), FOREVER_S)
    assert index.prefix(KV, keys) == 16_384
    proxy.latency_s = 0.5
    proxy.set(Toxic.SLOW)
    began = time.monotonic()
    assert index._access.client.call("x", [("TIME",)], began + FOREVER_S)
    one_s = time.monotonic() - began
    # Sixteen trips would be eight seconds; a reply may reach the proxy in several pieces.
    proxy.latency_s = one_s / 4
    began = time.monotonic()
    assert index.prefix(KV, keys) == 16_384
    assert time.monotonic() - began < 8 * proxy.latency_s + 1.0


def test_a_long_deadline_is_not_spent_on_a_dead_connection(
    index: RedisIndex, proxy: ToxicProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.index.redis.client.ROUND_TRIP_S", DEADLINE_S)
    proxy.set(Toxic.SILENT)
    new = records([key("new")], slot=1000)
    failures = outcomes(lambda: index.publish(KV, new, FOREVER_S), 3)
    assert all(isinstance(failure, str) for failure in failures)


def test_no_reply_is_taken_for_that_of_another_call(index: RedisIndex, proxy: ToxicProxy) -> None:
    """One that is late must not be read by the next who uses the connection."""
    proxy.latency_s = 2 * DEADLINE_S
    for _ in range(3):
        proxy.set(Toxic.SLOW)
        with pytest.raises(IndexUnavailableError):
            index.prefix(KV, KEYS)
        proxy.set(Toxic.NONE)
        time.sleep(3 * DEADLINE_S)
        wait_for(lambda: answers(index), what="recovery")
        assert index.lookup(KV, [key("absent"), KEYS[0]])[0] is None
        assert index.prefix(KV, [*KEYS[:7], key("absent")]) == 7


def test_threads_do_not_wait_for_each_other(index: RedisIndex, proxy: ToxicProxy) -> None:
    proxy.set(Toxic.SILENT)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.extend(outcomes(lambda: index.lookup(KV, KEYS), 5)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    proxy.set(Toxic.NONE)
    wait_for(lambda: answers(index), what="recovery")


def test_a_server_that_hangs_costs_the_deadline_a_few_times(
    server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    index = open_at(server.url, lookup_timeout_s=DEADLINE_S)
    index.publish(KV, records(KEYS), FOREVER_S)
    server.stop()
    try:
        began = time.monotonic()
        failures = outcomes(lambda: index.lookup(KV, KEYS), 200)
        assert time.monotonic() - began < 100 * DEADLINE_S
        assert all(isinstance(failure, str) for failure in failures)
    finally:
        server.cont()
    wait_for(lambda: answers(index), what="recovery")


def test_a_publish_without_an_answer_is_taken_back(
    server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    """Its slot has been used for another block by then."""
    index = open_at(server.url)
    index.publish(KV, records(KEYS), FOREVER_S)
    late = records(chain("late", 3), slot=1000, generation=7)
    server.stop()
    try:
        with pytest.raises(IndexUnavailableError):
            index.publish(KV, late, DEADLINE_S)
    finally:
        server.cont()
    names = [record.key for record in late]
    wait_for(lambda: index.prefix(KV, names) == 3, what="the late publish")
    index.upkeep()
    assert index.lookup(KV, names) == [None] * 3
    assert index.prefix(KV, KEYS) == len(KEYS)
    index.check()


def test_a_server_that_was_started_anew_is_found_again(open_at: Callable[..., RedisIndex]) -> None:
    with RedisServer(["appendonly yes", "appendfsync always"]) as server:
        index = open_at(server.url, lookup_timeout_s=2.0)
        index.publish(KV, records(KEYS), FOREVER_S)
        server.kill()
        with pytest.raises(IndexUnavailableError):
            index.lookup(KV, KEYS)
        server.start()
        wait_for(lambda: answers(index), what="recovery")
        index.upkeep()


def test_connections_that_the_server_closed_cost_nothing(
    server: RedisServer, index: RedisIndex
) -> None:
    idle = index._access.client._topology.node("", 0.0)._idle
    with server.admin() as admin:
        for _ in range(5):
            assert answers(index)
            admin.client_kill_filter(_type="normal", skipme=True)
            wait_for(lambda: len(admin.client_list()) == 1, what="the end of connections")
            wait_for(lambda: not any(link.alive() for link in idle), what="word of it")
            assert answers(index)
