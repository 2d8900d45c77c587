"""Claims, node reports and leases: one at a time, and over when nobody renews them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.redis.cluster_state import ClusterState
from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import INDEXER, KV, OTHER
from tests.support.blocks import chain, key
from tests.support.redis_server import RedisServer, wait_for

LONG_S = 60.0
SHORT_S = 0.15


@pytest.fixture
def state(index: RedisIndex) -> ClusterState:
    return index.cluster


def test_a_block_is_claimed_by_one(state: ClusterState) -> None:
    keys = chain("a", 3)
    assert state.claim(KV, keys[:2], "one", LONG_S) == [True, True]
    assert state.claim(KV, keys, "two", LONG_S) == [False, False, True]
    assert state.claim(KV, keys, "one", LONG_S) == [True, True, False]
    assert state.claim(INDEXER, keys, "two", LONG_S) == [True] * 3, "other blocks of the pages"
    assert state.claim(OTHER, keys, "two", LONG_S) == [True] * 3
    assert state.claim(KV, [], "one", LONG_S) == []


def test_a_claim_is_released_by_its_owner_alone(state: ClusterState) -> None:
    keys = chain("a", 2)
    state.claim(KV, keys, "one", LONG_S)
    state.release(KV, keys, "two")
    assert state.claim(KV, keys, "two", LONG_S) == [False, False]
    state.release(KV, keys[:1], "one")
    assert state.claim(KV, keys, "two", LONG_S) == [True, False]


def test_a_claim_ends_by_itself_unless_it_is_renewed(state: ClusterState) -> None:
    left, renewed = chain("a", 2)
    state.claim(KV, [left, renewed], "one", SHORT_S)
    state.claim(KV, [renewed], "one", LONG_S)
    wait_for(lambda: state.claim(KV, [left], "two", LONG_S) == [True], what="the claim's end")
    assert state.claim(KV, [renewed], "two", LONG_S) == [False]


def test_of_many_who_claim_at_once_each_block_has_one(state: ClusterState) -> None:
    keys = chain("a", 1500)
    got: dict[str, list[bool]] = {}

    def claim(owner: str) -> None:
        got[owner] = state.claim(KV, keys, owner, LONG_S)

    threads = [threading.Thread(target=claim, args=(f"node {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(flags) for flags in zip(*got.values(), strict=True)] == [1] * len(keys)


def test_nodes_hear_of_each_other(state: ClusterState) -> None:
    state.report("node/1 {x}", {"role": "prefill", "queue_bytes": 5, "ready": True}, LONG_S)
    state.report("two", {"role": "decode"}, LONG_S)
    state.report("two", {"role": "both"}, LONG_S)
    assert state.nodes() == {
        "node/1 {x}": {"role": "prefill", "queue_bytes": 5, "ready": True},
        "two": {"role": "both"},
    }


def test_a_node_that_says_nothing_is_forgotten(
    server: RedisServer, index: RedisIndex, state: ClusterState
) -> None:
    state.report("gone", {}, SHORT_S)
    state.report("here", {}, LONG_S)
    wait_for(lambda: set(state.nodes()) == {"here"}, what="the report's end")
    state.report("here", {}, LONG_S)
    with server.admin() as admin:
        assert admin.hkeys(index._access.key("nodes")) == [b"here"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[1]", b"7", b"null", b"[" * 100_000, b"9" * 10_000]
)
def test_what_is_no_report_hides_no_other(
    server: RedisServer, index: RedisIndex, state: ClusterState, text: bytes
) -> None:
    state.report("here", {"role": "node"}, LONG_S)
    name = index._access.key("nodes")
    with server.admin() as admin:
        (until,) = [value[: -len(b'{"role":"node"}')] for value in admin.hvals(name)]
        admin.hset(name, b"nons\xffense", until + text)
        admin.hset(name, "short", b"x")
    assert state.nodes() == {"here": {"role": "node"}}
    state.report("here", {"role": "node"}, LONG_S)
    assert state.nodes() == {"here": {"role": "node"}}


def test_a_lease_has_one_owner_and_a_higher_number_each_time(state: ClusterState) -> None:
    first = state.lease("janitor", "one", LONG_S)
    assert first is not None
    assert state.lease("janitor", "two", LONG_S) is None
    assert state.lease("janitor", "one", LONG_S) == first
    assert state.lease("rebuild", "two", LONG_S) is not None, "another lease"
    state.end_lease("janitor", "two")
    assert state.lease("janitor", "two", LONG_S) is None
    state.end_lease("janitor", "one")
    second = state.lease("janitor", "two", LONG_S)
    assert second is not None and second > first


def test_a_lease_of_one_who_died_passes_on(state: ClusterState) -> None:
    first = state.lease("janitor", "one", SHORT_S)
    assert first is not None
    numbers: list[int | None] = []

    def taken_over() -> bool:
        numbers.append(state.lease("janitor", "two", LONG_S))
        return numbers[-1] is not None

    wait_for(taken_over, what="the takeover")
    assert numbers[-1] is not None and numbers[-1] > first
    assert state.lease("janitor", "one", LONG_S) is None
    state.end_lease("janitor", "two")
    assert (state.lease("janitor", "one", LONG_S) or 0) > numbers[-1], "back, but not as before"


def test_stores_have_their_own(
    server: RedisServer, state: ClusterState, open_at: Callable[..., RedisIndex]
) -> None:
    other = open_at(server.url, "f" * 16).cluster
    state.report("here", {}, LONG_S)
    assert other.nodes() == {}
    assert state.lease("janitor", "one", LONG_S) and other.lease("janitor", "two", LONG_S)
    assert state.claim(KV, [key("a")], "one", LONG_S) == [True]
    assert other.claim(KV, [key("a")], "two", LONG_S) == [True]


def test_a_server_that_is_away_is_unavailable(server: RedisServer, index: RedisIndex) -> None:
    state = ClusterState(index._access, timeout_s=0.2)
    server.stop()
    try:
        for call in (
            lambda: state.claim(KV, [key("a")], "one", LONG_S),
            lambda: state.report("here", {}, LONG_S),
            lambda: state.nodes(),
            lambda: state.lease("janitor", "one", LONG_S),
        ):
            began = time.monotonic()
            with pytest.raises(IndexUnavailableError):
                call()
            assert time.monotonic() - began < 0.2 + 0.25
    finally:
        server.cont()
