"""Whole blocks into host memory over both paths."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.paths.host_reader import HostReader
from dualpath_sglang.pool import Pool
from tests.paths.cluster import Cluster, flip_one_bit_after, stop_after
from tests.paths.test_streaming_paths import failing
from tests.streaming.bed import FILLER, block_bytes, chain, eventually, geometry
from tests.support.redis_server import RedisServer

COUNT = 24


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@dataclass
class Host:
    """A cluster whose prefill node reads into host memory, two pieces a layer."""

    nodes: Cluster
    reader: HostReader
    pool: Pool
    keys: list[bytes]
    memory: bytearray

    def read(self, timeout_s: float = 20.0, keys: list[bytes] | None = None) -> list[bool]:
        size, step = self.pool.geometry.block_bytes, self.pool.geometry.layer_bytes // 2
        view = memoryview(self.memory)
        pieces = [
            [view[at : at + step] for at in range(n * size, (n + 1) * size, step)]
            for n in range(COUNT)
        ]
        return self.reader.read(self.pool, keys or self.keys, pieces, timeout_s=timeout_s)

    def right(self) -> list[bool]:
        size = self.pool.geometry.block_bytes
        return [
            self.memory[n * size : (n + 1) * size] == block_bytes(self.pool, key)
            for n, key in enumerate(self.keys)
        ]

    @property
    def here(self) -> int:
        """Bytes that the prefill node read from its store."""
        return self.nodes.prefill.reads.total_bytes

    @property
    def there(self) -> int:
        """Bytes that the decode nodes read from theirs."""
        return sum(node.reads.total_bytes for node in self.nodes.nodes)


@pytest.fixture
def host(tmp_path: Path, redis: RedisServer) -> Iterator[Callable[..., Host]]:
    made: list[Cluster] = []

    def make(**how: Any) -> Host:
        nodes = Cluster(tmp_path / "store", redis.url, **how)
        made.append(nodes)
        bed = nodes.prefill
        pool = bed.cache.attach(geometry())
        keys = chain(1, COUNT)
        bed.write(pool, keys)
        memory = bytearray([FILLER]) * (COUNT * pool.geometry.block_bytes)
        return Host(nodes, HostReader(bed.cache, nodes.peers), pool, keys, memory)

    yield make
    for nodes in made:
        nodes.__exit__(None, None, None)


@pytest.mark.parametrize("decode", [1, 3])
@pytest.mark.parametrize("policy", ["local", "peer", "shorter_queue", "split"])
def test_every_path_brings_the_same_bytes(
    host: Callable[..., Host], policy: str, decode: int
) -> None:
    read = host(policy=policy, decode=0 if policy == "local" else decode)
    assert all(read.read())
    assert all(read.right())
    assert (read.here == 0) == (policy == "peer")
    assert (read.there == 0) == (policy in ("local", "shorter_queue"))
    if policy == "split":
        assert all(node.reads.total_bytes for node in read.nodes.nodes)
    read.nodes.idle()


@pytest.mark.parametrize("warm", [COUNT, 10])
def test_what_the_machines_own_agent_has_in_memory_is_read_from_there(
    host: Callable[..., Host], warm: int
) -> None:
    read = host(policy="split", own=True)
    own = read.nodes.own
    assert own is not None
    own.warm(read.pool.geometry, read.keys[:warm])
    eventually(lambda: read.nodes.peers.nearby(read.pool.geometry) is not None, "it is known")
    assert all(read.read())
    assert all(read.right())
    assert own.reads.seen == []
    assert read.nodes.local.counts["bytes"] == warm * read.pool.geometry.block_bytes
    assert (read.here > 0, read.there > 0) == (warm < COUNT, warm < COUNT)
    read.nodes.idle()


def test_the_check_sees_a_wrong_byte(host: Callable[..., Host]) -> None:
    """Control."""
    read = host(policy="peer")
    read.read()
    read.memory[3 * read.pool.geometry.block_bytes] ^= 1
    assert read.right().index(False) == 3


def test_a_block_that_is_not_there_is_said_so(host: Callable[..., Host]) -> None:
    read = host(policy="split")
    keys = list(read.keys)
    keys[2], keys[20] = b"x" * 32, b"y" * 32
    good = read.read(keys=keys)
    assert [n for n, ok in enumerate(good) if not ok] == [2, 20]
    assert [n for n, ok in enumerate(read.right()) if not ok] == [2, 20]


@pytest.mark.parametrize("fault", ["flip", "silent", "cut", "eio"])
def test_what_a_node_does_not_bring_is_read_here(host: Callable[..., Host], fault: str) -> None:
    read = host(policy="peer")
    node, go_on = read.nodes.nodes[0], threading.Event()

    def cut(data: bytes) -> bytes:
        raise ConnectionResetError

    if fault == "flip":
        node.wire.hook = flip_one_bit_after(500_000)
    elif fault == "silent":
        node.wire.hook = stop_after(500_000, go_on)
    elif fault == "cut":
        node.wire.hook = cut
    else:
        node.reads.also = failing(errno.EMFILE)
    began = time.monotonic()
    assert all(read.read(timeout_s=4.0))
    assert time.monotonic() - began < 4.0
    assert all(read.right())
    assert read.here > 0
    go_on.set()
    read.nodes.idle()


def test_what_this_node_cannot_read_another_one_brings(host: Callable[..., Host]) -> None:
    read = host(policy="shorter_queue")
    read.nodes.prefill.reads.also = failing(errno.EMFILE)
    assert all(read.read())
    assert all(read.right())
    assert read.there > 0


def test_a_read_ends_by_its_deadline_and_nothing_is_written_afterwards(
    host: Callable[..., Host],
) -> None:
    read = host(policy="peer")
    go_on = threading.Event()
    read.nodes.nodes[0].wire.hook = stop_after(500_000, go_on)
    read.nodes.prefill.reads.also = failing(errno.EMFILE)
    began = time.monotonic()
    good = read.read(timeout_s=1.0)
    assert time.monotonic() - began < 5.0
    assert not all(good)
    assert all(right for right, ok in zip(read.right(), good, strict=True) if ok)
    before = bytes(read.memory)
    go_on.set()
    read.nodes.idle()
    assert read.memory == before


def test_a_fault_of_this_process_ends_what_was_asked_for(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's memory is somebody else's afterwards, also when the read raises."""
    read = host(policy="split")
    go_on = threading.Event()
    read.nodes.nodes[0].wire.hook = stop_after(100_000, go_on)

    def fail(*_: Any, **__: Any) -> list[bool]:
        raise MemoryError("of the test")

    monkeypatch.setattr(read.nodes.prefill.cache, "read", fail)
    with pytest.raises(MemoryError):
        read.read()
    before = bytes(read.memory)
    go_on.set()
    time.sleep(0.5)
    assert bytes(read.memory) == before
    read.nodes.idle()


def test_a_read_without_time_is_a_miss(host: Callable[..., Host]) -> None:
    read = host(policy="peer")
    for timeout_s in (0.0, -1.0, 1e-9, 1e-5, 1e-4):
        assert read.read(timeout_s=timeout_s) == [False] * COUNT


def test_a_read_may_have_all_the_time_there_is(host: Callable[..., Host]) -> None:
    read = host(policy="peer")
    assert all(read.read(timeout_s=1e9))
    assert read.here == 0


def test_a_node_that_brings_too_little_is_replaced(host: Callable[..., Host]) -> None:
    """It never falls silent, and would not be through by the deadline."""
    read = host(policy="peer")

    def slowly(data: bytes) -> bytes:
        time.sleep(0.4)
        return data

    read.nodes.nodes[0].wire.hook = slowly
    assert all(read.read(timeout_s=6.0))
    assert all(read.right())
    assert read.here > 0
    read.nodes.nodes[0].wire.hook = lambda data: data
    read.nodes.idle()


def test_a_store_that_was_slow_for_a_moment_is_soon_used_again(host: Callable[..., Host]) -> None:
    made = host()
    now = time.monotonic()
    made.reader._meter.add(1e8, now - 30.0)
    made.reader._meter.add(1.0, now - 20.0)
    assert made.read() == [True] * COUNT
    assert all(made.right())
    assert made.here > 0
