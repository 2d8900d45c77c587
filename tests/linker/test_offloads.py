"""Pages on their way to the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.offloads import OffloadPart, Offloads
from dualpath_sglang.pool import Pool
from dualpath_storage import pieces_of
from dualpath_storage.memory import aligned
from tests.linker.conftest import chain, geometry, put


class Device:
    """A device pool whose page `n` holds nothing but the byte `n`."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.gathered: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def gather(self, pages: Sequence[int], memory: memoryview, stride: int) -> None:
        assert self.gate.wait(10.0)
        for i, page in enumerate(pages):
            memory[i * stride : i * stride + self.block_bytes] = bytes([page]) * self.block_bytes
        self.gathered += pages


@pytest.fixture
def device(pool: Pool) -> Device:
    return Device(pool.geometry.block_bytes)


Part = Callable[..., OffloadPart]


@pytest.fixture
def part(pool: Pool, device: Device) -> Part:
    def make(first: int, end: int, parent: str | None = None) -> OffloadPart:
        keys = [bytes.fromhex(name) for name in chain(end)[first:]]
        before = bytes.fromhex(parent) if parent else None
        return OffloadPart(pool, device, keys, list(range(first, end)), before)

    return make


@pytest.fixture
def offloads(cache: KVCache) -> Iterator[Offloads]:
    made = Offloads(cache, timeout_s=10.0, max_pages=100, memory=aligned(4 * 4096))
    yield made
    made.close()


def stored(cache: KVCache, pool: Pool, count: int) -> list[int | None]:
    """What stands in the blocks of the chain: its byte, or None."""
    found: list[int | None] = []
    for name in chain(count):
        block = aligned(pool.geometry.block_bytes)[: pool.geometry.block_bytes]
        good = cache.read(pool, [bytes.fromhex(name)], [pieces_of(block, pool.geometry)])[0]
        found.append(block[-1] if good and len(set(block)) == 1 else None)
    return found


def test_pages_are_stored_as_they_were(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part
) -> None:
    assert offloads.submit(9, [part(0, 9)])
    assert offloads.drain(10.0)
    assert (offloads.completed(), offloads.pop()) == (1, True)
    assert stored(cache, pool, 9) == list(range(9))


def test_what_is_there_is_not_even_copied(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part, device: Device
) -> None:
    put(cache, pool, chain(9)[:3])
    put(cache, pool, chain(9)[5:6], parent=chain(9)[4])
    offloads.submit(9, [part(0, 9)])
    offloads.drain(10.0)
    assert device.gathered == [3, 4, 6, 7, 8]
    assert offloads.pop()


def test_each_page_knows_its_parent(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part
) -> None:
    offloads.submit(4, [part(0, 4)])
    offloads.submit(4, [part(4, 8, parent=chain(4)[3])])
    offloads.drain(10.0)
    parents = {e.key.hex(): e.parent.hex() for e in cache.index.entries(pool.geometry)}
    names = chain(8)
    assert [parents[name] for name in names[1:]] == names[:-1]


def test_results_come_in_the_order_of_the_calls(
    offloads: Offloads, part: Part, device: Device
) -> None:
    device.gate.clear()
    offloads.submit(2, [part(0, 2)])
    offloads.submit(3, [])  # another rank stores these
    offloads.submit(1, None)  # could not be addressed
    assert offloads.completed() == 0
    device.gate.set()
    assert offloads.drain(10.0)
    assert offloads.completed() == 3
    assert [offloads.pop() for _ in range(3)] == [True, True, False]


def test_too_many_waiting_pages_are_refused_until_results_are_taken(
    offloads: Offloads, part: Part
) -> None:
    assert offloads.submit(150, [part(0, 2)])  # alone it may be as large as it likes
    assert not offloads.submit(1, [part(2, 3)])
    offloads.drain(10.0)
    assert not offloads.submit(1, [part(2, 3)])  # results that wait count: ranks must agree
    offloads.pop()
    assert offloads.submit(60, [])
    assert offloads.submit(40, [])
    assert not offloads.submit(1, [])
    assert offloads.waiting_pages == 100


def test_pages_that_were_given_away_meanwhile_are_not_stored(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part, device: Device
) -> None:
    device.gate.clear()
    offloads.submit(4, [part(0, 4)])
    offloads.submit(4, [part(4, 8)])
    offloads.abandon()
    assert (offloads.completed(), offloads.waiting_pages) == (0, 0)
    device.gate.set()
    offloads.submit(1, [part(8, 9)])
    assert offloads.drain(10.0)
    assert stored(cache, pool, 9) == [*[None] * 8, 8]


def test_a_store_that_hangs_keeps_no_pages(
    cache: KVCache, pool: Pool, part: Part, device: Device
) -> None:
    offloads = Offloads(cache, timeout_s=0.05, max_pages=100, memory=aligned(4 * 4096))
    device.gate.clear()
    offloads.submit(4, [part(0, 4)])
    offloads.submit(4, [part(4, 8)])
    while offloads.completed() < 2:
        pass
    assert [offloads.pop(), offloads.pop()] == [False, False]
    offloads.submit(1, [part(8, 9)])  # not even tried as long as it hangs
    assert (offloads.completed(), offloads.pop()) == (1, False)
    device.gate.set()
    while offloads._hangs():
        pass
    assert stored(cache, pool, 9) == [None] * 9
    assert offloads.submit(1, [part(8, 9)])
    assert offloads.drain(10.0)
    offloads.close()


@pytest.mark.parametrize(
    ("result", "good"),
    [(WriteResult.DROPPED, True), (WriteResult.PRESENT, True), (WriteResult.FAILED, False)],
)
def test_what_is_left_out_on_purpose_is_no_failure(
    cache: KVCache,
    offloads: Offloads,
    part: Part,
    monkeypatch: pytest.MonkeyPatch,
    result: WriteResult,
    good: bool,
) -> None:
    def write(_pool: Any, keys: Sequence[bytes], *_: Any, **__: Any) -> list[WriteResult]:
        return [result] * len(keys)

    monkeypatch.setattr(cache, "write", write)
    offloads.submit(2, [part(0, 2)])
    offloads.drain(10.0)
    assert offloads.pop() is good


def test_a_failure_is_a_result_and_the_next_one_goes_on(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part, device: Device
) -> None:
    bad = OffloadPart(pool, device, [b"k" * 32], [999], None)  # no byte has that value
    offloads.submit(1, [bad])
    offloads.submit(1, [part(0, 1)])
    assert offloads.drain(10.0)
    assert [offloads.pop(), offloads.pop()] == [False, True]
    assert stored(cache, pool, 1) == [0]


def test_all_pools_of_an_offload_are_stored(
    cache: KVCache, pool: Pool, offloads: Offloads, part: Part
) -> None:
    side = cache.attach(geometry("indexer", layers=1, layer_bytes=64))
    keys = [bytes.fromhex(name) for name in chain(3)]
    told: list[bytes] = []
    offloads._on_stored = told.extend
    offloads.submit(3, [part(0, 3), OffloadPart(side, Device(64), keys, [7, 8, 9])])
    offloads.drain(10.0)
    assert offloads.pop()
    assert cache.lookup(side, keys) == [True] * 3
    assert told == keys + keys
