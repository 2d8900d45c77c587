"""Loads over both paths: the same bytes whoever brings them, whatever breaks."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.throttle import Throttle
from dualpath_sglang.streaming.landing import MemoryTarget
from dualpath_sglang.streaming.load import LoadRequest, Outcome, PoolLoad
from dualpath_sglang.transport.base import End, FetchRequest
from tests.paths.cluster import Cluster, flip_one_bit_after, stop_after
from tests.streaming.bed import FILLER, Gate, Hit, Pages, block_bytes, chain, eventually, geometry
from tests.support.redis_server import RedisServer

FORMS = {"mha": 2, "mla": 1}
"""Pieces of a layer in the pages."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, redis: RedisServer) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(**how: Any) -> Cluster:
        made.append(Cluster(tmp_path / "store", redis.url, **how))
        return made[-1]

    yield make
    for one in made:
        one.__exit__(None, None, None)


def a_hit(cluster: Cluster, count: int = 24, parts: int = 1, **more: Any) -> Hit:
    pool = cluster.prefill.cache.attach(geometry())
    return cluster.prefill.hit("r", pool, count, parts=parts, **more)


def slow_local(cluster: Cluster) -> None:
    cluster.prefill.reads.also = lambda *_: time.sleep(0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decode", [1, 3])
@pytest.mark.parametrize("policy", ["local", "peer", "shorter_queue", "split"])
def test_every_path_brings_the_same_bytes(
    cluster: Callable[..., Cluster], policy: str, decode: int, form: str
) -> None:
    nodes = cluster(policy=policy, decode=decode if policy != "local" else 0)
    hit = a_hit(nodes, parts=FORMS[form])
    results = nodes.prefill.load(hit)
    assert results["r"].outcome is Outcome.OK
    assert hit.wrong_pages() == []
    assert hit.pages.untouched(0)
    stats, whole = nodes.stats, 24 * hit.pool.geometry.block_bytes
    assert stats.remote_bytes + stats.read_bytes == whole
    if policy == "local":
        assert stats.remote_bytes == 0
    elif policy == "peer":
        assert stats.remote_bytes == whole
        assert nodes.prefill.reads.total_bytes == 0
    elif policy == "split":
        share = whole / (decode + 1)
        assert stats.remote_bytes == pytest.approx(whole - share, abs=share / 2)
        assert all(node.reads.total_bytes for node in nodes.nodes)
    nodes.idle()


def test_what_has_come_whole_is_not_given_up(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer")
    for _ in range(10):
        assert nodes.prefill.load(a_hit(nodes))["r"].ok
    eventually(lambda: nodes.peers.counts["ok"] == 10, "all fetches end well")
    assert nodes.peers.counts["cancelled"] == 0
    nodes.idle()


def test_the_check_sees_a_wrong_page(cluster: Callable[..., Cluster]) -> None:
    """Control."""
    nodes = cluster()
    hit = a_hit(nodes)
    nodes.prefill.load(hit)
    hit.pages.memory[5 * hit.pool.geometry.block_bytes + 7] ^= 1
    assert hit.wrong_pages() == [5]


def test_layers_come_in_order_and_before_the_whole(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer")
    gate = threading.Event()
    of = geometry(layers=8, layer_bytes=1 << 16)  # a layer is worth a read
    hit = nodes.prefill.hit("r", nodes.prefill.cache.attach(of), 4)
    seen: list[int] = []
    nodes.nodes[0].reads.also = lambda _, offset, __: (
        gate.wait(20.0) if offset % of.slot_bytes else None
    )
    load = nodes.prefill.start(hit, on_layer=lambda layer, _: seen.append(layer))
    assert load.wait_layer(0, 20.0)
    assert seen == [0]
    for key, number in zip(hit.keys, hit.numbers, strict=True):
        assert hit.pages.layer(number, 0) == block_bytes(hit.pool, key)[: of.layer_bytes]
    gate.set()
    assert load.wait(20.0)["r"].ok
    assert seen == list(range(8))
    assert hit.wrong_pages() == []


def test_a_flipped_bit_costs_a_block_and_not_the_request(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)
    nodes.nodes[0].wire.hook = flip_one_bit_after(700_000)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    stats = nodes.stats
    assert stats.remote_bad_blocks + stats.remote_failed > 0
    assert stats.read_bytes > 0
    nodes.idle()


@pytest.mark.parametrize("after", [0, 100, 300_000, 1_000_000])
def test_a_node_that_falls_silent_is_replaced(cluster: Callable[..., Cluster], after: int) -> None:
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)
    go_on = threading.Event()
    nodes.nodes[0].wire.hook = stop_after(after, go_on)
    began = time.monotonic()
    assert nodes.prefill.load(hit, seconds=4.0)["r"].ok
    assert time.monotonic() - began < 4.0
    assert hit.wrong_pages() == []
    assert nodes.stats.hedges == 1
    assert nodes.peers.counts["late"] == 1
    go_on.set()
    nodes.idle()


def test_a_node_whose_connection_breaks_is_replaced_and_comes_back(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)

    def cut(data: bytes) -> bytes:
        raise ConnectionResetError

    nodes.nodes[0].wire.hook = cut
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.remote_failed == 1
    nodes.nodes[0].wire.hook = lambda data: data
    nodes.connected(1)
    again = a_hit(nodes, stored=False)
    assert nodes.prefill.load(again)["r"].ok
    assert again.wrong_pages() == []
    assert nodes.stats.remote_bytes >= 24 * hit.pool.geometry.block_bytes
    nodes.idle()


def test_a_node_that_cannot_read_its_store_is_replaced(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)
    nodes.nodes[0].reads.also = failing(errno.EIO)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.read_bytes == 24 * hit.pool.geometry.block_bytes
    nodes.idle()


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, "of the test")

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_what_this_node_cannot_read_another_one_reads(
    cluster: Callable[..., Cluster], number: int
) -> None:
    nodes = cluster(policy="shorter_queue")
    hit = a_hit(nodes)
    nodes.prefill.reads.also = failing(number)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.remote_bytes == 24 * hit.pool.geometry.block_bytes
    nodes.idle()


def test_a_store_that_hangs_here_is_replaced_by_another_node(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="shorter_queue")
    hit = a_hit(nodes)
    gate = Gate()
    nodes.prefill.reads.also = gate
    assert nodes.prefill.load(hit, seconds=4.0)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.remote_bytes == 24 * hit.pool.geometry.block_bytes
    assert nodes.stats.hedges == 1
    gate.opened.set()
    nodes.idle()


def test_with_both_sides_broken_the_load_ends_in_time_and_is_no_hit(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="split")
    hit = a_hit(nodes)
    gate, go_on = Gate(), threading.Event()
    nodes.prefill.reads.also = gate
    nodes.nodes[0].wire.hook = stop_after(0, go_on)
    began = time.monotonic()
    assert nodes.prefill.load(hit, seconds=1.0)["r"].outcome is Outcome.TIMEOUT
    assert time.monotonic() - began < 5.0
    gate.opened.set()
    go_on.set()
    nodes.idle()


def test_with_both_sides_failing_the_load_is_a_miss(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="split")
    hit = a_hit(nodes)
    nodes.prefill.reads.also = nodes.nodes[0].reads.also = failing(errno.EMFILE)
    assert nodes.prefill.load(hit)["r"].outcome is Outcome.MISS
    nodes.idle()


def test_a_second_fault_during_the_rescue_is_survived(cluster: Callable[..., Cluster]) -> None:
    """The other node falls silent, and one block cannot be read here at the first try."""
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)
    go_on = threading.Event()
    nodes.nodes[0].wire.hook = stop_after(400_000, go_on)
    left = [OSError(errno.EIO, "once")]

    def once(*_: object) -> None:
        if left:
            raise left.pop()

    nodes.prefill.reads.also = once
    assert nodes.prefill.load(hit, seconds=6.0)["r"].ok
    assert hit.wrong_pages() == []
    assert not left
    go_on.set()
    nodes.idle()


def test_a_block_that_nobody_has_is_a_miss(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="split")
    hit = a_hit(nodes)
    hit.keys = [*hit.keys[:-1], b"x" * 32]
    assert nodes.prefill.load(hit)["r"].outcome is Outcome.MISS
    nodes.idle()


def test_a_cancelled_load_writes_nothing_more(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer")
    hit = a_hit(nodes)
    go_on = threading.Event()
    nodes.nodes[0].wire.hook = stop_after(400_000, go_on)
    load = nodes.prefill.start(hit)
    eventually(lambda: nodes.stats.remote_bytes > 0, "something has come")
    load.cancel()
    assert load.wait(20.0)["r"].outcome is Outcome.CANCELLED
    before = bytes(hit.pages.memory)
    go_on.set()
    nodes.idle()
    assert bytes(hit.pages.memory) == before


def test_staging_memory_of_a_few_layers_is_enough(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="split", staging_bytes=1 << 20)
    hit = a_hit(nodes, count=64)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.staging_peak_bytes <= 1 << 20
    nodes.idle()


@pytest.mark.parametrize("warm", [24, 10, 0])
@pytest.mark.parametrize("policy", ["split", "shorter_queue", "peer"])
def test_what_the_machines_own_agent_has_in_memory_is_read_from_there(
    cluster: Callable[..., Cluster], policy: str, warm: int
) -> None:
    nodes = cluster(policy=policy, own=True)
    hit = a_hit(nodes)
    assert nodes.own is not None
    of, other = hit.pool.geometry, chain(2, 1)
    nodes.prefill.write(hit.pool, other)
    nodes.own.warm(of, hit.keys[:warm] or other)
    eventually(lambda: nodes.peers.nearby(of) is not None, "the own agent is known")
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.own.reads.seen == []
    assert nodes.local.counts["bytes"] == warm * of.block_bytes
    read = nodes.stats.read_bytes + sum(node.reads.total_bytes > 0 for node in nodes.nodes)
    assert (read > 0) == (warm < 24)
    if policy == "split" and warm == 10:
        assert nodes.stats.read_bytes == pytest.approx(7 * of.block_bytes, abs=of.block_bytes)
    nodes.idle()


def test_an_own_agent_that_hangs_is_replaced(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(policy="split", own=True)
    hit = a_hit(nodes)
    assert nodes.own is not None
    nodes.own.warm(hit.pool.geometry, hit.keys)
    eventually(lambda: nodes.peers.nearby(hit.pool.geometry) is not None, "it is known")
    go_on = threading.Event()
    serve = nodes.own.agent.serve

    def hang(request: FetchRequest) -> Any:
        go_on.wait(20.0)
        return serve(request)

    monkeypatch.setattr(nodes.own.agent, "serve", hang)
    assert nodes.prefill.load(hit, seconds=4.0)["r"].ok
    assert hit.wrong_pages() == []
    assert (nodes.stats.hedges, nodes.local.counts["bytes"]) == (1, 0)
    go_on.set()
    nodes.idle()


def test_without_other_nodes_it_reads_by_itself(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="peer", decode=0)
    hit = a_hit(nodes)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    nodes.idle()


def test_small_hits_are_not_split(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="split", floor_bytes=1 << 20)
    hit = a_hit(nodes, count=4)
    assert nodes.prefill.load(hit)["r"].ok
    sides = (nodes.stats.read_bytes, nodes.stats.remote_bytes)
    assert sorted(sides) == [0, 4 * hit.pool.geometry.block_bytes]


def test_several_requests_and_pools_of_a_batch(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(policy="split", decode=2)
    bed = nodes.prefill
    kv, side = bed.cache.attach(geometry()), bed.cache.attach(geometry("side", layers=3))
    hits = [bed.hit(f"r{i}", kv if i % 2 else side, 8 + 5 * i, seed=i) for i in range(5)]
    for hit in hits:
        hit.gates = [7 if hit.pool is side else n for n in range(hit.pool.geometry.layers)]
    results = bed.load(*hits, layers=8)
    assert all(result.ok for result in results.values())
    assert not [hit.rid for hit in hits if hit.wrong_pages()]
    nodes.idle()


def of_own_agent(nodes: Cluster, hit: Hit, warm: int) -> None:
    """Have the first blocks of a hit in the memory of the machine's own agent."""
    assert nodes.own is not None
    nodes.own.warm(hit.pool.geometry, hit.keys[:warm])
    eventually(lambda: nodes.peers.nearby(hit.pool.geometry) is not None, "it is known")


def test_what_the_own_agent_has_not_and_this_node_cannot_read_another_one_reads(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="shorter_queue", own=True)
    hit = a_hit(nodes)
    of_own_agent(nodes, hit, 10)
    nodes.prefill.reads.also = failing(errno.EMFILE)
    assert nodes.prefill.load(hit, seconds=8.0)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.remote_bytes == 24 * hit.pool.geometry.block_bytes
    nodes.idle()


def test_what_the_own_agent_has_not_is_rescued_from_a_store_that_hangs(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="shorter_queue", own=True)
    hit = a_hit(nodes)
    of_own_agent(nodes, hit, 10)
    nodes.prefill.reads.also = gate = Gate()
    assert nodes.prefill.load(hit, seconds=4.0)["r"].ok
    assert hit.wrong_pages() == []
    gate.opened.set()
    nodes.idle()


def test_an_own_agent_that_cannot_be_asked_leaves_the_hit_to_all(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(policy="split", own=True)
    hit = a_hit(nodes)
    of_own_agent(nodes, hit, 24)
    assert nodes.own is not None
    monkeypatch.setattr(nodes.own.agent, "serve", lambda _: End.BUSY)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    whole = 24 * hit.pool.geometry.block_bytes
    assert nodes.stats.read_bytes == pytest.approx(whole / 2, abs=whole / 8)
    nodes.idle()


@pytest.mark.parametrize("own", [False, True])
def test_a_pool_without_blocks_holds_nobody_up(cluster: Callable[..., Cluster], own: bool) -> None:
    nodes = cluster(policy="split", own=own)
    hit = a_hit(nodes)
    if own:
        of_own_agent(nodes, hit, 24)
    side = nodes.prefill.cache.attach(geometry("side", layers=3))
    empty = PoolLoad(side, Pages(side, 1).landing, [], [], [7, 7, 7])
    request = LoadRequest("r", [hit.part, empty])
    load = nodes.prefill.streamer.start([request], layers=8, deadline=time.monotonic() + 20.0)
    assert load.wait(20.0)["r"].ok
    assert hit.wrong_pages() == []
    nodes.idle()


def test_many_blocks_that_this_node_cannot_read_another_one_reads(
    cluster: Callable[..., Cluster],
) -> None:
    """More than an agent takes on as fetches of their own."""
    nodes = cluster(policy="shorter_queue")
    pool = nodes.prefill.cache.attach(geometry(layers=2, layer_bytes=4096))
    hit = nodes.prefill.hit("r", pool, 300)
    nodes.prefill.reads.also = failing(errno.EMFILE)
    nodes.nodes[0].reads.also = lambda *_: time.sleep(0.01)
    assert nodes.prefill.load(hit)["r"].ok
    assert hit.wrong_pages() == []
    assert nodes.stats.remote_fetches < 100
    nodes.idle()


def test_while_a_store_hangs_here_new_hits_go_to_others_at_once(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="shorter_queue")
    hit = a_hit(nodes)
    nodes.prefill.reads.also = gate = Gate()
    assert nodes.prefill.load(hit, seconds=4.0)["r"].ok
    assert nodes.stats.hedges == 1
    for _ in range(3):
        again = a_hit(nodes, stored=False)
        assert nodes.prefill.load(again, seconds=20.0)["r"].ok
        assert again.wrong_pages() == []
    assert nodes.stats.hedges == 1
    gate.opened.set()
    nodes.idle()
    eventually(lambda: nodes.prefill.streamer.stats().retired_bytes == 0, "the reads are back")
    last = a_hit(nodes, stored=False)
    assert nodes.prefill.load(last)["r"].ok
    assert nodes.stats.read_bytes > 0


def test_a_store_that_hangs_is_rescued_by_a_node_that_comes_later(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(policy="shorter_queue")
    hit = a_hit(nodes)
    nodes.prefill.reads.also = gate = Gate()
    (peer,) = nodes.peers._usable(None)
    asked = threading.Event()
    monkeypatch.setattr(peer, "usable", lambda _: asked.is_set())
    load = nodes.prefill.start(hit, seconds=8.0)
    time.sleep(2.5)  # by now this node is late
    asked.set()
    assert load.wait(20.0)["r"].ok
    assert hit.wrong_pages() == []
    gate.opened.set()
    nodes.idle()


def test_the_hits_of_a_batch_are_spread_evenly_too(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(policy="split")
    pool = nodes.prefill.cache.attach(geometry())
    hits = [nodes.prefill.hit(f"r{i}", pool, 10, seed=i) for i in range(8)]
    begin = nodes.peers.begin

    def slowly(*how: Any) -> Any:
        time.sleep(0.2)
        return begin(*how)

    monkeypatch.setattr(nodes.peers, "begin", slowly)
    results = nodes.prefill.load(*hits)
    assert all(result.ok for result in results.values())
    whole = 80 * pool.geometry.block_bytes
    assert nodes.stats.remote_bytes == pytest.approx(whole / 2, abs=whole / 8)
    nodes.idle()


def test_what_the_own_agent_has_not_is_read_in_the_order_of_the_batch(
    cluster: Callable[..., Cluster],
) -> None:
    """First layers of all requests first, as if it had not been asked."""
    nodes = cluster(policy="split", decode=0, own=True)
    of = geometry(layers=8, layer_bytes=1 << 16)
    pool = nodes.prefill.cache.attach(of)
    hits = [nodes.prefill.hit(f"r{i}", pool, n, seed=i) for i, n in enumerate((32, 4))]
    other = nodes.prefill.hit("other", pool, 1, seed=7)
    of_own_agent(nodes, other, 1)
    late: list[int] = []

    def on_layer(layer: int, fences: object) -> None:
        if layer == 0:
            late.extend(
                sum(
                    set(hit.pages.layer(number, i)) != {FILLER}
                    for number in hit.numbers
                    for i in range(5, 8)
                )
                for hit in hits
            )

    nodes.prefill.reads.also = Throttle(64 << 20)
    assert all(result.ok for result in nodes.prefill.load(*hits, on_layer=on_layer).values())
    assert late == [0, 0]
    assert nodes.stats.hedged_bytes == 0
    nodes.idle()


def test_a_fetch_that_brought_everything_ends_well(cluster: Callable[..., Cluster]) -> None:
    """Though its request may be over before the node has said that this is all."""
    nodes = cluster(policy="peer")
    pool = nodes.prefill.cache.attach(geometry())
    hits = [nodes.prefill.hit(f"r{i}", pool, 4, seed=i) for i in range(32)]
    assert all(result.ok for result in nodes.prefill.load(*hits).values())
    eventually(lambda: sum(nodes.peers.counts.values()) == 32, "all fetches have ended")
    assert nodes.peers.counts == {"ok": 32}


def test_pages_that_cannot_be_written_cost_their_request_alone(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(policy="peer")
    pool = nodes.prefill.cache.attach(geometry())
    good, bad = nodes.prefill.hit("good", pool, 60), nodes.prefill.hit("bad", pool, 2, seed=2)
    nodes.nodes[0].reads.also = lambda *_: time.sleep(0.02)  # so that the bad one comes first
    land = MemoryTarget.land

    def fail(self: Any, staged: Any) -> Any:
        if self._blocks[0][0].obj is bad.pages.memory:
            raise RuntimeError("of the test")
        return land(self, staged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryTarget, "land", fail)
        results = nodes.prefill.load(bad, good)
    assert results["bad"].outcome is Outcome.ERROR
    assert results["good"].ok
    assert good.wrong_pages() == []
    nodes.idle()


@pytest.mark.parametrize("seed", range(4))
def test_under_random_faults_a_good_result_means_right_pages(
    cluster: Callable[..., Cluster], seed: int
) -> None:
    rng = random.Random(seed)
    nodes = cluster(policy="split", decode=2)
    pool = nodes.prefill.cache.attach(geometry())
    outcomes = set()

    def trouble(*_: object) -> None:
        if rng.random() < 0.1:
            raise OSError(rng.choice([errno.EIO, errno.EMFILE]), "of the test")

    def all_reads(also: Callable[..., None] | None) -> None:
        for reads in [nodes.prefill.reads, *(node.reads for node in nodes.nodes)]:
            reads.also = also

    all_reads(trouble)
    for number in range(12):
        for node in nodes.nodes:
            node.wire.hook = rng.choice(
                [lambda data: data, flip_one_bit_after(rng.randrange(1 << 20))]
            )
        hit = nodes.prefill.hit(f"r{number}", pool, 20, seed=seed, stored=number == 0)
        result = nodes.prefill.load(hit, seconds=4.0)[hit.rid]
        outcomes.add(result.outcome)
        if result.ok:
            assert hit.wrong_pages() == []
        else:  # it may have been taken out as damaged
            all_reads(None)
            nodes.prefill.write(pool, hit.keys)
            all_reads(trouble)
    all_reads(None)
    assert Outcome.OK in outcomes
    nodes.idle()
