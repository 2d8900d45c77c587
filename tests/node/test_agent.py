"""An agent over a real store and real sockets: every block right, whatever happens to some."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node import layer_ranges
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.node.block_cache import image_bytes
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span, StridedDestination
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.local_client import LocalConnection
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.server import Server
from dualpath_storage import Geometry, ReadStatus
from dualpath_storage.images import ImageItem
from dualpath_storage.ranges import RangeRead
from tests.kvcache.caches import flip, options, write
from tests.support import blocks
from tests.support.blocks import chain, geometry
from tests.transport.peers import Fetched

KINDS = ("mha", "mla")
SOON_S = 20.0
SMALL = StreamOptions(first_io_bytes=4096)


class Bed:
    """A store, an agent over it, and a connection to the agent.

    Args:
        local: over the agent's memory instead of TCP.
    """

    def __init__(self, root: Path, memory_bytes: int, *, local: bool) -> None:
        self.stack = contextlib.ExitStack()
        self.cache = self.stack.enter_context(KVCache(options(root, capacity_bytes=64 << 20)))
        self.agent = Agent(self.cache, memory_bytes, SMALL)
        self.stack.callback(self.agent.close)
        self.server = Server(self.agent)
        self.stack.callback(self.server.close)
        self.local_server = LocalServer(self.agent, root.parent / "agent.sock")
        self.stack.callback(self.local_server.close)
        self.local = local
        self.connection = self.connect()

    def connect(self) -> Connection | LocalConnection:
        deadline = time.monotonic() + SOON_S
        connection: Connection | LocalConnection
        if self.local:
            connection = LocalConnection(self.local_server.path, deadline)
        else:
            connection = Connection(PeerAddress("127.0.0.1", self.server.port), deadline)
        self.stack.callback(connection.close)
        return connection

    @property
    def busy(self) -> bool:
        ends = [*self.server._clients(), *self.local_server._readers()]
        return any(end.busy for end in ends)

    def store(self, of: Geometry, keys: list[bytes]) -> None:
        write(self.cache.attach(of), self.cache, keys)

    def begin(
        self,
        of: Geometry,
        keys: Sequence[bytes],
        layers: tuple[int, int] | None = None,
        timeout_s: float = SOON_S,
        cached_only: bool = False,
        over: Connection | LocalConnection | None = None,
    ) -> Waiting:
        first, end = layers or (0, of.layers)
        request = FetchRequest(of.id_bytes, keys, first, end, timeout_s, cached_only)
        memory = memoryview(bytearray(len(keys) * (end - first) * of.layer_bytes))
        size, count = of.layer_bytes, len(keys)
        place = StridedDestination(memory, size, size, size * count, first_layer=first)
        fetched = Waiting(request, place)
        connection = over or self.connection
        fetched.fetch = connection.fetch(request, fetched.destination, fetched)
        return fetched

    def fetch(
        self,
        of: Geometry,
        keys: Sequence[bytes],
        layers: tuple[int, int] | None = None,
        **how: Any,
    ) -> Waiting:
        fetched = self.begin(of, keys, layers, **how)
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


@pytest.fixture(params=["tcp", "local"])
def make_bed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bed]]:
    local = request.param == "local"
    with contextlib.ExitStack() as stack:

        def make(memory_bytes: int = 32 << 20) -> Bed:
            bed = Bed(tmp_path / "store", memory_bytes, local=local)
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
    before = bed.cache.stats().read_bytes
    assert before >= 40 * of.block_bytes
    second = bed.fetch(of, keys[3:], (1, 3))
    assert second.right(of) == set(range(37))
    assert second.layers == sorted(second.layers)
    assert bed.cache.stats().read_bytes == before, "read once for both"
    assert bed.agent.blocks.hits == 37
    assert second.load == Load(0, 0)


def test_the_first_layer_comes_before_the_last_is_read(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ranges, "_LEAST_IO_BYTES", 1)
    of = geometry("mha", layers=16)
    bed, keys = make_bed(), chain("a", 24)
    bed.store(of, keys)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    pool = bed.agent._pools[of.id_bytes]
    real, came = pool.store.read_images, threading.Event()

    def wait(items: Sequence[ImageItem], first: int, end: int) -> list[RangeRead]:
        if end == of.layers:
            assert came.wait(SOON_S), "the first layer waits for the last"
        return real(items, first, end)

    monkeypatch.setattr(pool.store, "read_images", wait)
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
    assert fetched.lacking == {20}
    assert fetched.right(of) == set(range(40)) - {20}, "its neighbours do not share its fate"
    assert bed.cache.lookup(pool, keys[20:21]) == [False]
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


def test_what_does_not_fit_at_once_comes_in_windows(
    make_bed: Callable[..., Bed], of: Geometry
) -> None:
    bed, keys = make_bed(memory_bytes=10 * image_bytes(of)), chain("a", 47)
    bed.store(of, keys)
    asked = [*keys[:20], *chain("never", 3), *keys[20:]]
    for _ in range(2):
        fetched = bed.fetch(of, asked)
        assert fetched.ends == [End.OK]
        assert fetched.lacking == {20, 21, 22}
        assert fetched.right(of) == set(range(50)) - fetched.lacking
        assert bed.agent.blocks.used_bytes <= 10 * image_bytes(of)
    whole = bed.fetch(of, keys[:10])
    assert whole.right(of) == set(range(10))
    again = bed.fetch(of, keys[:10])
    assert again.layers == sorted(again.layers), "what fits comes in one"
    wait_until_idle(bed)
    assert bed.agent.blocks.pinned_bytes == 0


def test_many_fetches_that_do_not_fit_together_all_end(
    make_bed: Callable[..., Bed], of: Geometry
) -> None:
    bed, keys = make_bed(memory_bytes=10 * image_bytes(of)), chain("a", 60)
    bed.store(of, keys)
    several = [bed.begin(of, keys[n % 7 :]) for n in range(12)]
    for n, fetched in enumerate(several):
        assert fetched.fetch.wait(SOON_S)
        assert fetched.ends in ([End.OK], [End.BUSY])
        if fetched.ends == [End.OK]:
            assert fetched.right(of) == set(range(60 - n % 7))
    assert [End.OK] in [fetched.ends for fetched in several]
    wait_until_idle(bed)
    assert bed.agent.blocks.pinned_bytes == 0


def test_no_room_at_all_is_busy(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(memory_bytes=4 * image_bytes(of)), chain("a", 30)
    bed.store(of, keys)
    assert bed.fetch(of, keys[:1]).right(of) == {0}
    hold = Hold(bed, of, monkeypatch)
    first = bed.begin(of, keys[:4])
    assert hold.called.wait(SOON_S)
    assert bed.fetch(of, keys[10:20]).ends == [End.BUSY]
    hold.go.set()
    assert first.fetch.wait(SOON_S)
    assert first.right(of) == set(range(4))
    assert bed.fetch(of, keys[10:20]).right(of) == set(range(10))


def test_a_page_larger_than_the_memory_is_refused(make_bed: Callable[..., Bed]) -> None:
    of = geometry("mha")
    bed, keys = make_bed(memory_bytes=image_bytes(of) - 4096), chain("a", 2)
    bed.store(of, keys)
    assert bed.fetch(of, keys).ends == [End.FAILED]


def test_only_from_memory_reads_nothing(make_bed: Callable[..., Bed], of: Geometry) -> None:
    bed, keys = make_bed(), chain("a", 20)
    bed.store(of, keys)
    assert bed.fetch(of, keys, cached_only=True).lacking == set(range(20))
    bed.fetch(of, keys[5:10])
    before = bed.cache.stats().read_bytes
    fetched = bed.fetch(of, keys, cached_only=True)
    assert fetched.ends == [End.OK]
    assert fetched.right(of) == set(range(5, 10))
    assert fetched.lacking == set(range(20)) - set(range(5, 10))
    assert bed.cache.stats().read_bytes == before


def test_what_is_in_memory_is_not_looked_up(
    make_bed: Callable[..., Bed], of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, keys = make_bed(), chain("a", 20)
    bed.store(of, keys)
    bed.fetch(of, keys[:12])
    asked: list[Sequence[bytes]] = []
    real = bed.cache.locate

    def locate(pool: Any, wanted: Sequence[bytes]) -> Any:
        asked.append(list(wanted))
        return real(pool, wanted)

    monkeypatch.setattr(bed.cache, "locate", locate)
    assert bed.fetch(of, keys).right(of) == set(range(20))
    assert bed.fetch(of, keys).right(of) == set(range(20))
    assert asked == [keys[12:]]


class Hold:
    """Reads of a pool wait until they may go on."""

    def __init__(self, bed: Bed, of: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.called = threading.Event(), threading.Event()
        self.reads: list[tuple[bytes, int]] = []
        store = bed.agent._pools[of.id_bytes].store
        self._real = store.read_images
        monkeypatch.setattr(store, "read_images", self._read)

    def _read(self, items: Sequence[ImageItem], first: int, end: int) -> list[RangeRead]:
        self.called.set()
        self.go.wait(SOON_S)
        self.reads.append((items[0].key, first))
        return self._real(items, first, end)


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
    hold = Hold(bed, of, monkeypatch)
    late = bed.begin(of, keys, timeout_s=0.3)
    patient = bed.begin(of, keys)
    assert late.fetch.wait(SOON_S)
    assert late.ends == [End.TIMEOUT]
    assert late.right(of) <= {0}
    hold.go.set()
    assert patient.fetch.wait(SOON_S)
    assert patient.ends == [End.OK], "another's deadline is not its own"
    assert patient.right(of) == set(range(12))
    wait_until_idle(bed)
    bed.agent.blocks.clear()
    assert bed.agent.blocks.used_bytes == 0, "nobody holds anything"


def wait_until_idle(bed: Bed) -> None:
    wait_until(lambda: not bed.busy)


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_store_does_not_give_is_late_not_missing(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    monkeypatch.setattr("dualpath_sglang.node.block_reader._READ_S", 0.2)
    monkeypatch.setattr("dualpath_sglang.node.block_reader._GROUP", 1)
    hold = Hold(bed, of, monkeypatch)
    threading.Timer(0.4, hold.go.set).start()
    fetched = bed.fetch(of, keys)
    assert fetched.ends == [End.TIMEOUT]
    assert not fetched.lacking
    assert bed.fetch(of, keys).right(of) == set(range(12)), "it may be tried again"


def test_what_nobody_wants_any_more_is_not_read(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 60)
    bed.store(of, keys)
    assert bed.fetch(of, keys[:1]).right(of) == {0}
    before = bed.cache.stats().read_bytes
    hold = Hold(bed, of, monkeypatch)
    fetched = bed.begin(of, keys)
    assert hold.called.wait(SOON_S)
    bed.connection.cancel(fetched.fetch)
    wait_until_idle(bed)
    hold.go.set()
    wait_until(lambda: bed.cache.read_queue.bytes == 0)
    read = bed.cache.stats().read_bytes - before
    assert read < 60 * of.block_bytes, "only what had begun"
    assert (bed.cache.read_queue.bytes, bed.cache.read_queue.tokens) == (0, 0)
    assert bed.fetch(of, keys).right(of) == set(range(60))


def test_a_block_that_moved_meanwhile_is_found_again(
    make_bed: Callable[..., Bed], of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    pool = bed.cache.attach(of)
    real, moved = bed.cache.locate, []

    def locate(where: Any, wanted: Sequence[bytes]) -> Any:
        places = real(where, wanted)
        if not moved:
            moved.append(True)
            bed.cache.clear()
            bed.store(of, chain("other", 5))
            bed.store(of, keys)
        return places

    monkeypatch.setattr(bed.cache, "locate", locate)
    fetched = bed.fetch(of, keys)
    assert fetched.ends == [End.OK]
    assert fetched.right(of) == set(range(12))
    assert bed.cache.lookup(pool, keys) == [True] * 12


@pytest.mark.parametrize("times", [1, 9])
def test_a_read_that_fails_is_tried_once_more(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """At a later layer: what was sent stays as it is."""
    monkeypatch.setattr(layer_ranges, "_LEAST_IO_BYTES", 1)
    of = geometry("mha", layers=16)
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    store = bed.agent._pools[of.id_bytes].store
    real, failed = store.read_images, [0]

    def fail(items: Sequence[ImageItem], first: int, end: int) -> list[RangeRead]:
        results = real(items, first, end)
        for i, item in enumerate(items):
            if item.key == keys[7] and end > 3 and failed[0] < times:
                failed[0] += 1
                results[i] = RangeRead(ReadStatus.UNAVAILABLE)
        return results

    monkeypatch.setattr(store, "read_images", fail)
    fetched = bed.fetch(of, keys)
    assert fetched.ends == [End.OK]
    lacking = set() if times == 1 else {7}
    assert fetched.lacking == lacking
    assert fetched.right(of) == set(range(12)) - lacking
    wait_until(lambda: bed.cache.read_queue.bytes == 0)
    assert bed.cache.read_queue.tokens == 0


def test_first_layers_are_read_before_later_ones_of_another_fetch(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ranges, "_LEAST_IO_BYTES", 1)
    of = geometry("mha", layers=16)
    bed, long, short = make_bed(), chain("long", 80), chain("short", 2)
    bed.store(of, long)
    bed.store(of, short)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    hold = Hold(bed, of, monkeypatch)
    first = bed.begin(of, long)
    assert hold.called.wait(SOON_S)
    second = bed.begin(of, short)
    wait_until(lambda: bed.cache.read_queue.bytes == 82 * of.block_bytes)
    hold.go.set()
    for fetched, count in ((first, 80), (second, 2)):
        assert fetched.fetch.wait(SOON_S)
        assert fetched.right(of) == set(range(count))
    order = [(key in short, layer) for key, layer in hold.reads]
    whole = order.index((True, 0))
    later = [layer for is_short, layer in order[:whole] if not is_short]
    assert later.count(0) >= 0.7 * len(later), "but for every fourth, only first layers came before"
    ended = max(i for i, (is_short, _) in enumerate(order) if is_short)
    assert ended < len(order) - 1, "it does not come after all of the long one"


def test_the_head_of_a_chain_stays_longest(make_bed: Callable[..., Bed]) -> None:
    of = geometry("mha")
    bed, keys = make_bed(memory_bytes=20 * image_bytes(of)), chain("a", 20)
    bed.store(of, [*keys, *chain("b", 8)])
    bed.fetch(of, keys)
    bed.fetch(of, chain("b", 8))
    wait_until_idle(bed)
    there = bed.fetch(of, keys, cached_only=True)
    assert there.right(of) == set(range(12))


def test_a_store_that_hangs_is_not_waited_for_again(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.node.block_reader._HANGS_S", 0.1)
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 40)
    bed.store(of, [*keys, *chain("b", 3)])
    assert bed.fetch(of, keys[:5]).right(of) == set(range(5))
    hold = Hold(bed, of, monkeypatch)
    first = bed.begin(of, keys)
    wait_until(lambda: bed.agent._reader.stalled)
    for others in (keys, chain("b", 3)):
        assert bed.fetch(of, others, timeout_s=600.0).ends == [End.TIMEOUT], "at once"
    assert bed.fetch(of, keys[:5]).right(of) == set(range(5)), "what is in memory can be had"
    hold.go.set()
    assert first.fetch.wait(SOON_S)
    assert first.right(of) == set(range(40))


def test_a_store_that_hangs_over_what_is_unknown_keeps_up_nobody_else(
    make_bed: Callable[..., Bed], of: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, keys = make_bed(), chain("a", 8)
    bed.store(of, keys)
    assert bed.fetch(of, keys).ends == [End.OK]
    go_on, looking = threading.Event(), threading.Event()

    def hang() -> list[Geometry]:
        looking.set()
        go_on.wait(SOON_S)
        return []

    monkeypatch.setattr(bed.cache, "geometries", hang)
    monkeypatch.setattr(bed.agent, "_looked_at", float("-inf"))
    unknown = geometry(model="another")
    waiting = bed.begin(unknown, keys)
    assert looking.wait(SOON_S)
    other, known = bed.begin(unknown, keys), bed.begin(of, keys)
    assert known.fetch.wait(SOON_S / 2)
    assert known.right(of) == set(range(len(keys)))
    assert other.fetch.wait(SOON_S / 2)
    assert not waiting.ends
    go_on.set()
    assert waiting.fetch.wait(SOON_S)
    assert (waiting.ends, other.ends) == ([End.UNKNOWN], [End.UNKNOWN])


def test_what_goes_wrong_in_the_agent_ends_the_fetch_and_leaves_nothing(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry("mha")
    bed, keys = make_bed(), chain("a", 12)
    bed.store(of, keys)
    assert bed.fetch(of, chain("b", 1)).lacking == {0}
    store = bed.agent._pools[of.id_bytes].store
    with monkeypatch.context() as patch:

        def fail(*_: object) -> list[RangeRead]:
            raise RuntimeError("a fault of the test")

        patch.setattr(store, "read_images", fail)
        assert bed.fetch(of, keys).ends == [End.TIMEOUT]
    assert bed.fetch(of, keys).right(of) == set(range(12))
    wait_until_idle(bed)
    assert bed.agent.blocks.pinned_bytes == 0
    assert (bed.cache.read_queue.bytes, bed.cache.read_queue.tokens) == (0, 0)


@pytest.mark.slow
def test_memory_stays_at_its_bound_whatever_is_fetched(
    make_bed: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several connections, ten times what fits, two geometries: what the kernel says is in use."""
    bed = make_bed(memory_bytes=8 << 20)
    mha, mla = geometry("mha", layers=24, layer_bytes=8 << 10), geometry("mla", layers=24)
    chains = [(mha, chain(n, 40)) for n in range(2)] + [(mla, chain("m", 150))]
    for of, keys in chains:
        bed.store(of, keys)
    most, over = [0], threading.Event()
    fd = bed.agent.blocks.memory.fd
    assert fd is not None

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], os.fstat(fd).st_blocks * 512)

    def work(seed: int) -> None:
        connection = bed.connect()
        for n in range(4):
            of, keys = chains[(seed + n) % len(chains)]
            fetched = bed.begin(of, keys[seed:], over=connection)
            assert fetched.fetch.wait(SOON_S)
            if fetched.ends == [End.OK]:
                right.append(len(fetched.right(of)) == len(keys) - seed)

    right: list[bool] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    watching = threading.Thread(target=watch)
    for thread in [watching, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watching.join()
    assert all(right)
    assert len(right) >= 5
    assert 4 << 20 < most[0] <= 8 << 20
    wait_until_idle(bed)
    bed.agent.blocks.clear()
    assert os.fstat(fd).st_blocks == 0


AGENT = """
import sys
from pathlib import Path
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.server import Server
from tests.kvcache.caches import options
root = Path(sys.argv[1])
agent = Agent(KVCache(options(root / "store", read_only=True)), 8 << 20)
local = LocalServer(agent, root / "agent.sock")
print(Server(agent).port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_an_agents_process_does_not_grow(tmp_path: Path) -> None:
    """Its memory, as the kernel counts it, after many times what fits went through it."""
    of, keys = geometry("mha", layers=24), chain("a", 200)
    root = Path(__file__).parents[2]
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(KVCache(options(tmp_path / "store", capacity_bytes=64 << 20)))
        write(cache.attach(of), cache, keys)
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", AGENT, str(tmp_path)],
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        deadline = time.monotonic() + SOON_S
        connections: list[Connection | LocalConnection] = [
            Connection(PeerAddress("127.0.0.1", port), deadline),
            LocalConnection(tmp_path / "agent.sock", deadline),
        ]
        anonymous: list[int] = []
        for _ in range(3):
            for connection in connections:
                for at in range(0, 200, 50):
                    request = FetchRequest(of.id_bytes, keys[at:], 0, of.layers, SOON_S)
                    memory = memoryview(bytearray((200 - at) * of.block_bytes))
                    place = StridedDestination.of_blocks(memory, of.layer_bytes, of.layers)
                    fetched = Waiting(request, place)
                    assert connection.fetch(request, place, fetched).wait(SOON_S)
                    assert fetched.ends == [End.OK]
                assert fetched.right(of) == set(range(50))
            anonymous.append(memory_kib(process.pid, "RssAnon"))
            assert memory_kib(process.pid, "RssShmem") <= 8 << 10
        assert anonymous[-1] - anonymous[0] < 4 << 10, "KiB: nothing piles up"
        for connection in connections:
            connection.close()


def memory_kib(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0])


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
