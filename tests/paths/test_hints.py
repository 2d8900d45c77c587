"""Reads whose nodes a router has chosen: by those alone, each block once, and never a hit less.

The prefill node, whose machine is called "own", has an agent; so have d0, d1, ...
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.paths.host_reader import HostReader
from dualpath_sglang.paths.peers import Nearby, PathOptions, Peers
from dualpath_sglang.pool import Pool
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.scheduling.assign import assign
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_storage import StoreOptions
from tests.paths.cluster import SECRET, Cluster, DecodeNode, source, stop_after
from tests.paths.test_streaming_paths import failing
from tests.streaming.bed import (
    FILLER,
    MIB,
    Gate,
    Hit,
    block_bytes,
    chain,
    eventually,
    geometry,
)
from tests.support.redis_server import RedisServer

COUNT = 24
POLICIES = ("split", "peer", "shorter_queue")
THREE = {"d0": 0.25, "own": 0.25, "d1": 0.5}
slow = pytest.mark.slow
Mode = Literal["streaming", "hicache"]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@dataclass
class Hinted:
    """A cluster, and whole hits that its prefill node reads with a hint, in either mode."""

    nodes: Cluster
    mode: Mode
    pool: Pool
    keys: list[bytes]
    reader: HostReader
    hits: list[Hit] = field(default_factory=list)

    def read(
        self, shares: dict[str, float] | None, seconds: float = 20.0, *, shared: bool = True
    ) -> bool:
        """Whether all of it was read and is right."""
        hint = None if shares is None else ReadHint(tuple(shares.items()), shared)
        if self.mode == "hicache":
            return read_into_host(self.reader, self.pool, self.keys, hint, seconds)
        hit = self.nodes.prefill.hit("r", self.pool, COUNT, stored=False)
        hit.hint = hint
        return self.nodes.prefill.load(hit, seconds=seconds)["r"].ok and not hit.wrong_pages()

    @property
    def agents(self) -> dict[str, DecodeNode]:
        own = self.nodes.own
        return {node.name: node for node in [*([own] if own else []), *self.nodes.nodes]}

    @property
    def read_by(self) -> dict[str, int]:
        """Bytes by who read them from the store; the server itself is "here"."""
        by = {name: node.reads.total_bytes for name, node in self.agents.items()}
        by["here"] = self.nodes.prefill.reads.total_bytes
        return {name: size for name, size in by.items() if size}

    @property
    def kinds(self) -> dict[str, int]:
        return dict(self.reader.hinted if self.mode == "hicache" else self.nodes.stats.hinted)

    @property
    def whole(self) -> int:
        """Bytes of all blocks with their headers."""
        return COUNT * self.pool.geometry.slot_bytes

    def shares(self, shares: dict[str, float]) -> dict[str, int]:
        """Bytes of the blocks that are each node's by a hint."""
        index = assign(self.keys, list(shares.values()))
        size = self.pool.geometry.slot_bytes
        return {name: index.count(i) * size for i, name in enumerate(shares)}


def read_into_host(
    reader: HostReader, pool: Pool, keys: list[bytes], hint: ReadHint | None, seconds: float
) -> bool:
    """Whether whole blocks were read into host memory, and are right."""
    size, step = pool.geometry.block_bytes, pool.geometry.layer_bytes // 2
    memory = bytearray([FILLER]) * (len(keys) * size)
    view = memoryview(memory)
    pieces = [
        [view[at : at + step] for at in range(n * size, (n + 1) * size, step)]
        for n in range(len(keys))
    ]
    good = reader.read(pool, keys, pieces, timeout_s=seconds, hint=hint)
    right = [view[n * size : (n + 1) * size] == block_bytes(pool, k) for n, k in enumerate(keys)]
    return all(good) and all(right)


@pytest.fixture(params=["streaming", "hicache"])
def hinted(
    request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer
) -> Iterator[Callable[..., Hinted]]:
    made: list[Cluster] = []

    def make(**how: Any) -> Hinted:
        how = {"own": True, "decode": 2, **how}
        nodes = Cluster(tmp_path / "store", redis.url, **how)
        made.append(nodes)
        pool = nodes.prefill.cache.attach(geometry())
        keys = chain(1, COUNT)
        nodes.prefill.write(pool, keys)
        if how["own"]:
            known(nodes.peers, "own", pool)
        return Hinted(
            nodes, request.param, pool, keys, HostReader(nodes.prefill.cache, nodes.peers)
        )

    yield make
    for nodes in made:
        nodes.__exit__(None, None, None)


def known(peers: Peers, machine: str, pool: Pool) -> None:
    """Until a machine's agent can be asked."""
    hint = ReadHint(((machine, 1.0),))

    def asked() -> bool:
        sides = peers.hinted(pool.geometry, [b"k" * 32], hint)
        return sides is not None and bool(sides[0])

    eventually(asked, f"the agent of {machine} is known")


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        pytest.param("split", {"own": 0.5, "d1": 0.5}),
        *(pytest.param(policy, {"own": 1.0}, marks=slow) for policy in POLICIES),
        *(pytest.param(policy, {"d0": 1.0}, marks=slow) for policy in POLICIES),
        *(pytest.param(policy, THREE, marks=slow) for policy in POLICIES),
    ],
)
def test_a_hint_is_followed_and_every_block_is_read_once(
    hinted: Callable[..., Hinted], policy: str, shares: dict[str, float]
) -> None:
    bed = hinted(policy=policy)
    assert bed.read(shares)
    assert bed.read_by == bed.shares(shares)
    assert sum(bed.read_by.values()) == bed.whole
    assert bed.kinds == {"honoured": 1}
    bed.nodes.idle()


def test_without_a_hint_everything_is_as_it_was(hinted: Callable[..., Hinted]) -> None:
    """Control: the servers' own rule deals otherwise."""
    bed = hinted(policy="split")
    assert bed.read(None)
    assert {"here", "d0", "d1"} == set(bed.read_by)
    assert bed.kinds == {}


def test_an_operator_who_wants_local_reads_has_them(hinted: Callable[..., Hinted]) -> None:
    bed = hinted(policy="local", own=False, decode=0)
    assert bed.read({"d0": 1.0})
    assert set(bed.read_by) == {"here"}


@slow
def test_what_is_in_this_machines_memory_is_not_read_elsewhere(
    hinted: Callable[..., Hinted],
) -> None:
    bed = hinted()
    assert bed.nodes.own is not None
    bed.nodes.own.warm(bed.pool.geometry, bed.keys[:10])
    eventually(lambda: bed.nodes.peers.nearby(bed.pool.geometry) is not None, "it is known")
    assert bed.read({"d0": 1.0})
    assert bed.read_by == {"d0": (COUNT - 10) * bed.pool.geometry.slot_bytes}
    assert bed.kinds == {"honoured": 1}


def test_of_a_node_that_nobody_knows_the_servers_own_rule_decides(
    hinted: Callable[..., Hinted],
) -> None:
    bed = hinted(policy="shorter_queue")
    shares = {"d0": 0.5, "nobody": 0.5}
    assert bed.read(shares)
    expected = bed.shares(shares)
    assert bed.read_by == {"d0": expected["d0"], "here": expected["nobody"]}
    assert bed.kinds == {"replaced": 1}
    bed.nodes.idle()


@slow
@pytest.mark.parametrize("shares", [{"own": 1.0}, {"own": 0.5, "d0": 0.5}])
def test_what_one_server_alone_wants_it_reads_itself_where_it_is_its_machines(
    hinted: Callable[..., Hinted], shares: dict[str, float]
) -> None:
    bed = hinted(policy="peer")
    assert bed.read(shares, shared=False)
    assert "own" not in bed.read_by
    assert bed.read_by.get("d0", 0) == bed.shares(shares).get("d0", 0)
    assert bed.kinds == {"honoured": 1}
    bed.nodes.idle()


@slow
def test_a_machine_without_its_agent_reads_itself(hinted: Callable[..., Hinted]) -> None:
    bed = hinted(own=False, policy="peer")
    hint = {"own": 1.0}
    assert bed.read(hint)
    assert bed.nodes.prefill.reads.total_bytes >= bed.whole - COUNT * 4096
    assert not any(node.reads.total_bytes for node in bed.nodes.nodes)


@pytest.mark.parametrize(
    ("machine", "fault"),
    [
        pytest.param("d0", "dead"),
        pytest.param("own", "eio"),
        *(pytest.param("d0", fault, marks=slow) for fault in ("cut", "silent", "eio", "hangs")),
        *(pytest.param("own", fault, marks=slow) for fault in ("dead", "hangs")),
    ],
)
def test_what_a_hinted_node_does_not_bring_another_does(
    hinted: Callable[..., Hinted], machine: str, fault: str
) -> None:
    bed = hinted(policy="shorter_queue")
    node, go_on = bed.agents[machine], threading.Event()
    gate = Gate()
    if fault == "dead":
        node.wire.close()
        node.server.close()
        if machine == "own":
            bed.nodes.local.close()
    elif fault == "eio":
        node.reads.also = failing(errno.EIO)
    elif fault == "hangs":
        node.reads.also = gate
    elif fault == "silent":
        node.wire.hook = stop_after(200_000, go_on)
    else:
        node.wire.hook = cut
    began = time.monotonic()
    assert bed.read({machine: 0.75, "d1": 0.25}, seconds=4.0)
    assert time.monotonic() - began < 4.0
    if (fault, machine) != ("dead", "own"):  # the machine itself reads then
        assert bed.kinds == {"replaced": 1}
    gate.opened.set()
    go_on.set()
    bed.nodes.idle()


def cut(data: bytes) -> bytes:
    raise ConnectionResetError


@slow
def test_a_hint_brings_what_the_own_store_does_not_give(hinted: Callable[..., Hinted]) -> None:
    """And so does no hint; here the server cannot read anything itself."""
    bed = hinted()
    bed.nodes.prefill.reads.also = failing(errno.EMFILE)
    assert bed.read({"own": 0.5, "d0": 0.5})
    assert "here" not in bed.read_by


# -- both sides at once --------------------------------------------------------------------------


@dataclass
class DecodeServer:
    """A server on the machine d0, beside its agent, that reads into host memory."""

    cache: KVCache
    peers: Peers
    reader: HostReader
    pool: Pool


@pytest.fixture
def decode_server(tmp_path: Path, redis: RedisServer) -> Iterator[Callable[..., DecodeServer]]:
    closing: list[Callable[[], None]] = []

    def make(bed: Hinted) -> DecodeServer:
        node = bed.agents["d0"]
        local = LocalServer(node.agent, tmp_path / "d0.sock")
        closing.append(local.close)
        cache = KVCache(
            StoreOptions(tmp_path / "store", 256 * MIB, direct_io="off"), index=source(redis.url)
        )
        closing.append(cache.close)
        options = PathOptions(
            secret=lambda _: SECRET, own=lambda: Nearby("d0", local.path), machine="d0"
        )
        peers = Peers(bed.nodes._reports, options)
        closing.append(peers.close)
        pool = cache.attach(geometry())
        for machine in bed.agents:
            known(peers, machine, pool)
        return DecodeServer(cache, peers, HostReader(cache, peers), pool)

    yield make
    for close in reversed(closing):
        close()


@pytest.mark.parametrize(
    ("shares", "late"),
    [
        pytest.param({"own": 0.5, "d0": 0.5}, False, id="split-at once"),
        pytest.param({"own": 0.5, "d0": 0.5}, True, id="split-later", marks=slow),
        pytest.param({"own": 1.0}, False, id="pe path-at once", marks=slow),
        pytest.param({"own": 1.0}, True, id="pe path-later", marks=slow),
        pytest.param({"d0": 1.0}, False, id="de path-at once", marks=slow),
        pytest.param({"d0": 1.0}, True, id="de path-later", marks=slow),
    ],
)
def test_prefill_and_decode_read_every_block_once_between_them(
    hinted: Callable[..., Hinted],
    decode_server: Callable[..., DecodeServer],
    shares: dict[str, float],
    late: bool,
) -> None:
    bed = hinted()
    decode = decode_server(bed)
    hint = ReadHint(tuple(shares.items()))
    gates = {name: Gate() for name in shares}
    for name, gate in gates.items():
        bed.agents[name].reads.also = gate
        if late:
            gate.opened.set()
    skipped = 5  # what decode has in memory already differs from what prefill has

    def restore() -> bool:
        keys = bed.keys[skipped:]
        return read_into_host(decode.reader, decode.pool, keys, hint, 20.0)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bed.read, shares)
        if late:
            assert first.result(30.0)
        second = pool.submit(restore)
        if not late:  # both wait for the same reads
            wanted = 2 * COUNT - skipped
            eventually(lambda: blocks_wanted(bed, shares) == wanted, "both have asked")
            for gate in gates.values():
                gate.opened.set()
        assert first.result(30.0)
        assert second.result(30.0)
    assert bed.read_by == bed.shares(shares)
    assert decode.cache.stats().read_bytes == 0
    assert decode.reader.hinted == {"honoured": 1}
    bed.nodes.idle()


def blocks_wanted(bed: Hinted, shares: dict[str, float]) -> int:
    """How often blocks were asked of agents: read, or found there."""
    return sum(
        bed.agents[name].agent.blocks.count + bed.agents[name].agent.blocks.hits for name in shares
    )


@slow
def test_without_a_hint_both_read_for_themselves(
    hinted: Callable[..., Hinted], decode_server: Callable[..., DecodeServer]
) -> None:
    """Control: the measure sees a second read."""
    bed = hinted(policy="shorter_queue")
    decode = decode_server(bed)
    assert bed.read(None)
    assert read_into_host(decode.reader, decode.pool, bed.keys, None, 20.0)
    read = sum(bed.read_by.values()) + decode.cache.stats().read_bytes
    assert read > 1.5 * bed.whole


@slow
def test_memory_that_is_too_small_costs_reads_and_nothing_else(
    hinted: Callable[..., Hinted], decode_server: Callable[..., DecodeServer]
) -> None:
    bed = hinted(decode=1, memory_bytes=8 * geometry().slot_bytes)
    decode = decode_server(bed)
    hint = ReadHint((("d0", 1.0),))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bed.read, dict(hint.shares))
        second = pool.submit(read_into_host, decode.reader, decode.pool, bed.keys, hint, 20.0)
        assert first.result(30.0)
        assert second.result(30.0)
    assert set(bed.read_by) == {"d0"}
    bed.nodes.idle()
