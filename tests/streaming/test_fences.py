"""A device that does later what it is told, in the place of a CUDA stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from dualpath_sglang.streaming.landing import Landed, MemoryLanding, Staged, Target
from dualpath_sglang.streaming.load import LoadRequest, Outcome, PoolLoad
from dualpath_sglang.streaming.options import StreamOptions
from tests.streaming.bed import MIB, Bed, Hit, eventually, geometry

OPTIONS = StreamOptions(
    staging_bytes=MIB // 2, queue_depth=4, piece_bytes=MIB // 8, io_bytes=1, probe_s=0
)


class LateFence:
    """Done when the device has come to it."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        self.synchronize()

    def finished(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(20.0)


class Device:
    """Works off its stream in a thread: reads staging memory long after `land` has returned."""

    def __init__(self, pause_s: float = 0.002) -> None:
        self.pause_s = pause_s
        self.running = threading.Event()
        self.running.set()
        self._stream: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (step := self._stream.get()) is not None:
            assert self.running.wait(20.0)
            step()

    def put(self, step: Callable[[], object]) -> None:
        self._stream.put(step)

    def fence(self) -> LateFence:
        fence = LateFence()
        self.put(fence.done.set)
        return fence

    def close(self) -> None:
        self.running.set()
        self._stream.put(None)
        self._thread.join(20.0)


class LateLanding:
    """Lands by way of the device's own memory, as a CUDA landing does."""

    def __init__(self, pages: MemoryLanding, device: Device) -> None:
        self._pages = pages
        self._device = device

    def target(self, pages: Sequence[int], after: object | None = None) -> LateTarget:
        return LateTarget(self._pages.target(pages), self._device)


class LateTarget:
    def __init__(self, pages: Target, device: Device) -> None:
        self._pages = pages
        self._device = device

    def land(self, staged: Staged) -> Landed:
        copy = bytearray(staged.count * staged.shape.stride)

        def bulk_copy() -> None:
            time.sleep(self._device.pause_s)
            copy[:] = staged.memory[: len(copy)]

        self._device.put(bulk_copy)
        copied = self._device.fence()
        there = Staged(memoryview(copy), staged.shape, staged.begin, staged.count)
        self._device.put(lambda: self._pages.land(there))
        layers = range(staged.shape.first, staged.shape.end)
        return Landed(copied, [self._device.fence() for _ in layers])


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def request(hit: Hit, device: Device) -> LoadRequest:
    landing = LateLanding(hit.pages.landing, device)
    return LoadRequest(hit.rid, [PoolLoad(hit.pool, landing, hit.keys, hit.numbers, hit.gates)])


def test_memory_is_not_used_again_before_the_device_has_read_it(
    make_bed: Callable[..., Bed], device: Device
) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=8, layer_bytes=16384))
    hits = [bed.hit(f"r{i}", pool, 20, seed=i) for i in range(2)]
    load = bed.streamer.start(
        [request(hit, device) for hit in hits], layers=8, deadline=time.monotonic() + 20
    )
    assert all(result.ok for result in load.wait(20).values())
    assert [hit.wrong_pages() for hit in hits] == [[], []], "all is there when wait() returns"
    assert bed.streamer.stats().staging_peak_bytes <= OPTIONS.staging_bytes


def test_after_its_fences_a_layer_is_there(make_bed: Callable[..., Bed], device: Device) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=8, layer_bytes=16384))
    hit = bed.hit("a", pool, 12)
    fences: queue.Queue[tuple[int, Sequence[LateFence]]] = queue.Queue()
    load = bed.streamer.start(
        [request(hit, device)],
        layers=8,
        deadline=time.monotonic() + 20,
        on_layer=lambda layer, found: fences.put((layer, found)),  # type: ignore[arg-type]
    )
    whole = {key: hit.numbers[i] for i, key in enumerate(hit.keys)}
    from tests.streaming.bed import block_bytes

    for expected in range(8):
        layer, found = fences.get(timeout=20)
        assert layer == expected and len(found) == 1
        for fence in found:
            fence.wait()
        span = slice(layer * 16384, (layer + 1) * 16384)
        for key, number in whole.items():
            assert hit.pages.layer(number, layer) == block_bytes(pool, key)[span]
    assert load.wait(20)["a"].ok


def test_a_device_that_stops_costs_no_more_than_the_deadline(
    make_bed: Callable[..., Bed], device: Device
) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=8, layer_bytes=16384))
    hit = bed.hit("a", pool, 40)
    device.running.clear()
    seen: list[int] = []
    load = bed.streamer.start(
        [request(hit, device)],
        layers=8,
        deadline=time.monotonic() + 0.3,
        on_layer=lambda layer, _: seen.append(layer),
    )
    eventually(lambda: load.done, "the load ends")
    assert seen == list(range(8))
    assert bed.streamer.stats().staging_used_bytes > 0, "the device may still read it"
    device.running.set()
    assert load.wait(20)["a"].outcome is Outcome.TIMEOUT
    eventually(lambda: bed.streamer.stats().staging_used_bytes == 0, "the memory comes back")
