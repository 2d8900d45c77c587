"""An agent over a real store and real sockets: every block right, whatever happens to some."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span, StridedDestination
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.server import Server
from dualpath_storage import Geometry
from dualpath_storage.ranges import RangeShape
from tests.kvcache.caches import flip, options, write
from tests.support import blocks
from tests.support.blocks import chain, geometry
from tests.transport.peers import Fetched

KINDS = ("mha", "mla")
SOON_S = 20.0
SMALL = StreamOptions(staging_bytes=1 << 20, io_bytes=1 << 16, first_io_bytes=4096, probe_s=0)


class Bed:
    """A store, an agent over it, and a connection to the agent."""

    def __init__(self, root: Path, memory_bytes: int) -> None:
        self.stack = contextlib.ExitStack()
        self.cache = self.stack.enter_context(KVCache(options(root, capacity_bytes=64 << 20)))
        self.agent = Agent(self.cache, memory_bytes, SMALL)
        self.stack.callback(self.agent.close)
        self.server = Server(self.agent)
        self.stack.callback(self.server.close)
        address = PeerAddress("127.0.0.1", self.server.port)
        self.connection = Connection(address, time.monotonic() + SOON_S)
        self.stack.callback(self.connection.close)

    def store(self, of: Geometry, keys: list[bytes]) -> None:
        write(self.cache.attach(of), self.cache, keys)

    def begin(
        self,
        of: Geometry,
        keys: Sequence[bytes],
        layers: tuple[int, int] | None = None,
        timeout_s: float = SOON_S,
    ) -> Waiting:
        first, end = layers or (0, of.layers)
        request = FetchRequest(of.id_bytes, keys, first, end, timeout_s)
        memory = memoryview(bytearray(len(keys) * (end - first) * of.layer_bytes))
        size, count = of.layer_bytes, len(keys)
        place = StridedDestination(memory, size, size, size * count, first_layer=first)
        fetched = Waiting(request, place)
        fetched.fetch = self.connection.fetch(request, fetched.destination, fetched)
        return fetched

    def fetch(
        self, of: Geometry, keys: Sequence[bytes], layers: tuple[int, int] | None = None
    ) -> Waiting:
        fetched = self.begin(of, keys, layers)
        assert fetched.fetch.wait(SOON_S)
        return fetched


class Waiting(Fetched):
    """What came of a fetch, compared with what the blocks of these tests hold."""

    def right(self, of: Geometry) -> set[int]:
        """Blocks of which every layer came.

        Raises:
            AssertionError: one came with other bytes, or another checksum.
        """
        first, size = self.request.first_layer, of.layer_bytes
        for (layer, i), checksum in self.got.items():
            content = blocks.content(of, self.request.keys[i])
            (view,) = self.destination.views(Span(layer, layer + 1, i, 1))
            assert view == content[layer * size : (layer + 1) * size]
            assert checksum == xxhash.xxh3_64_intdigest(view)
        layers = range(first, self.request.end_layer)
        return {i for i in range(len(self.request.keys)) if all((n, i) in self.got for n in layers)}


@pytest.fixture
def make_bed(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    with contextlib.ExitStack() as stack:

        def make(memory_bytes: int = 32 << 20) -> Bed:
            bed = Bed(tmp_path / "store", memory_bytes)
            stack.callback(bed.stack.close)
            return bed

        yield make


@pytest.fixture(params=KINDS)
def of(request: pytest.FixtureRequest) -> Geometry:
    return geometry(request.param)


def test_blocks_come_from_the_store_and_then_from_memory(
    make_bed: Callable[..., Bed], of: Geometry
) -> None:
    bed, keys = make_bed(), chain("a", 40)
    bed.store(of, keys)
    first = bed.fetch(of, keys)
    assert first.ends == [End.OK]
    assert first.right(of) == set(range(40))
    assert first.layers == sorted(first.layers)
    before = bed.cache.stats().read_bytes
    assert before >= 40 * of.block_bytes
    second = bed.fetch(of, keys[3:], (1, 3))
    assert second.right(of) == set(range(37))
    assert bed.cache.stats().read_bytes == before, "read once for both"
    assert bed.agent.blocks.hits == 37
    assert second.load == Load(0, 0)


def test_the_first_layer_comes_before_the_last_is_read(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha", layers=16)
    bed, keys = make_bed(), chain("a", 24)
    bed.store(of, keys)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    pool = bed.agent._pools[of.id_bytes]
    real, came = pool.store.read_range, threading.Event()

    def wait(items: Any, shape: RangeShape, memory: memoryview) -> Any:
        if shape.end == of.layers:
            assert came.wait(SOON_S), "the first layer waits for the last"
        return real(items, shape, memory)

    monkeypatch.setattr(pool.store, "read_range", wait)
    fetched = bed.begin(of, keys)
    fetched.on_landed = lambda *_: came.set()
    assert fetched.fetch.wait(SOON_S)
    assert fetched.right(of) == set(range(24))


def test_what_is_absent_is_missing_and_the_rest_comes(
    make_bed: Callable[..., Bed], of: Geometry
) -> None:
    bed, keys = make_bed(), chain("a", 9)
    bed.store(of, keys)
    asked = [*keys[:4], *chain("never", 2), *keys[4:]]
    fetched = bed.fetch(of, asked)
    assert fetched.ends == [End.OK]
    assert fetched.lacking == {4, 5}
    assert fetched.right(of) == set(range(11)) - {4, 5}


@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_block_is_missing_and_never_wrong(
    make_bed: Callable[..., Bed], of: Geometry, layer: int
) -> None:
    bed, keys = make_bed(), chain("a", 40)
    bed.store(of, keys)
    pool = bed.cache.attach(of)
    flip(bed.cache, pool, keys[20], 4096 + layer * of.layer_bytes + 5)
    fetched = bed.fetch(of, keys)
    assert fetched.ends == [End.OK]
    right = fetched.right(of)
    assert 20 in fetched.lacking
    assert right >= set(range(40)) - set(range(16, 32)), "its neighbours share its fate, no others"
    assert right.isdisjoint(fetched.lacking)
    again = bed.fetch(of, keys)
    assert again.right(of) == set(range(40)) - {20}, "it has left the index"


def test_an_unknown_geometry_is_said_so(make_bed: Callable[..., Bed], of: Geometry) -> None:
    bed = make_bed()
    assert bed.fetch(of, chain("a", 2)).ends == [End.UNKNOWN]
    bed.store(of, chain("a", 2))
    end = time.monotonic() + SOON_S
    while bed.fetch(of, chain("a", 2)).ends != [End.OK]:
        assert time.monotonic() < end, "found once it is there"
        time.sleep(0.1)
    assert bed.fetch(of, chain("a", 2), (0, of.layers + 1)).ends == [End.UNKNOWN]


def test_more_than_the_memory_holds_is_busy(make_bed: Callable[..., Bed], of: Geometry) -> None:
    bed, keys = make_bed(memory_bytes=10 * of.block_bytes), chain("a", 30)
    bed.store(of, keys)
    assert bed.fetch(of, keys).ends == [End.BUSY]
    for first in range(0, 30, 6):
        fetched = bed.fetch(of, keys[first : first + 6])
        assert fetched.ends == [End.OK]
        assert fetched.right(of) == set(range(6))
        assert bed.agent.blocks.used_bytes <= 10 * of.block_bytes


def test_fetches_of_the_same_blocks_share_one_read(
    make_bed: Callable[..., Bed], of: Geometry
) -> None:
    bed, keys = make_bed(), chain("a", 40)
    bed.store(of, keys)
    several = [bed.begin(of, keys) for _ in range(6)]
    for fetched in several:
        assert fetched.fetch.wait(SOON_S)
        assert fetched.right(of) == set(range(40))
    assert bed.cache.stats().read_bytes < 1.5 * 40 * of.block_bytes


def test_a_read_that_hangs_ends_a_fetch_at_its_deadline_and_no_other(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    assert bed.fetch(of, keys[:1]).right(of) == {0}
    go = threading.Event()
    pool = bed.agent._pools[of.id_bytes]
    real = pool.store.read_range

    def hang(*args: Any) -> Any:
        go.wait(SOON_S)
        return real(*args)

    monkeypatch.setattr(pool.store, "read_range", hang)
    late = bed.begin(of, keys, timeout_s=0.3)
    patient = bed.begin(of, keys)
    assert late.fetch.wait(SOON_S)
    assert late.ends == [End.TIMEOUT]
    assert late.right(of) <= {0}
    go.set()
    assert patient.fetch.wait(SOON_S)
    assert patient.ends == [End.OK], "another's deadline is not its own"
    assert patient.right(of) == set(range(12))
    wait_until_idle(bed)
    bed.agent.blocks.clear()
    assert bed.agent.blocks.used_bytes == 0, "nobody holds anything"


def wait_until_idle(bed: Bed) -> None:
    end = time.monotonic() + SOON_S
    while any(client.busy for client in bed.server._clients()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_store_does_not_give_is_late_not_missing(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    monkeypatch.setattr("dualpath_sglang.node.agent._READ_S", 0.2)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    pool = bed.agent._pools[of.id_bytes]
    go = threading.Event()
    monkeypatch.setattr(pool.store, "read_range", lambda *_: go.wait(SOON_S))
    fetched = bed.fetch(of, keys)
    go.set()
    assert fetched.ends == [End.TIMEOUT]
    assert not fetched.lacking


def test_a_cancelled_fetch_lets_go(make_bed: Callable[..., Bed], of: Geometry) -> None:
    bed, keys = make_bed(), chain("a", 60)
    bed.store(of, keys)
    for _ in range(10):
        fetched = bed.begin(of, keys)
        bed.connection.cancel(fetched.fetch)
    assert bed.fetch(of, keys).right(of) == set(range(60))
    wait_until_idle(bed)
    bed.agent.blocks.clear()
    assert bed.agent.blocks.used_bytes == 0
