"""First layers first: what is announced when, and who is served in which order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.throttle import Throttle
from dualpath_sglang.streaming.options import StreamOptions
from tests.streaming.bed import MIB, Bed, Gate, Hit, block_bytes, geometry

LAYERS, LAYER_BYTES = 8, 65536
OPTIONS = StreamOptions(
    staging_bytes=2 * MIB, queue_depth=2, io_bytes=LAYER_BYTES, piece_bytes=MIB // 2, probe_s=0
)


def read_layers(bed: Bed, slot_bytes: int) -> dict[int, list[float]]:
    """When each layer was read, by the trace of the backend."""
    times: dict[int, list[float]] = {}
    for when, _, offset, size in bed.reads.seen:
        first = max(0, offset % slot_bytes - 4096) // LAYER_BYTES
        for layer in range(first, first + size // LAYER_BYTES):
            times.setdefault(layer, []).append(when)
    return times


@dataclass
class Announced:
    """A listener that looks whether a layer is there when it is told so."""

    hits: list[Hit]
    rows: list[tuple[int, float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = {k: block_bytes(hit.pool, k) for hit in self.hits for k in hit.keys}

    def __call__(self, layer: int, fences: object) -> None:
        now = time.monotonic()
        span = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
        whole = all(
            hit.pages.layer(number, layer) == self.blocks[key][span]
            for hit in self.hits
            for key, number in zip(hit.keys, hit.numbers, strict=True)
        )
        self.rows.append((layer, now, whole))


def throttled_load(bed: Bed) -> tuple[Announced, dict[int, list[float]]]:
    """Two hits of which a layer takes 50 ms; announcements, and the reads of each layer."""
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hits = [bed.hit(f"r{i}", pool, 12, seed=i) for i in range(2)]
    listener = Announced(hits)
    bed.reads.also = Throttle(24 * LAYER_BYTES / 0.05)
    bed.reads.seen.clear()
    assert all(result.ok for result in bed.load(*hits, on_layer=listener).values())
    assert [layer for layer, _, _ in listener.rows] == list(range(LAYERS))
    assert all(whole for _, _, whole in listener.rows), "every byte of a layer is there by then"
    return listener, read_layers(bed, pool.geometry.slot_bytes)


def test_a_layer_is_announced_before_the_one_after_the_next_is_read(
    make_bed: Callable[..., Bed],
) -> None:
    listener, read = throttled_load(make_bed(OPTIONS))
    for layer, when, _ in listener.rows[:-2]:
        assert sum(t < when for t in read[layer + 2]) <= len(read[layer + 2]) // 4


def test_with_whole_pages_nothing_is_announced_before_everything_is_read(
    make_bed: Callable[..., Bed],
) -> None:
    """The negative control of the test before."""
    listener, read = throttled_load(make_bed(replace(OPTIONS, first_io_bytes=MIB, piece_bytes=MIB)))
    assert listener.rows[0][1] > max(t for times in read.values() for t in times)


def test_a_small_load_does_not_wait_until_a_huge_one_is_through(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    huge, small = bed.hit("huge", pool, 60, seed=1), bed.hit("small", pool, 2, seed=2)
    gate = Gate()
    bed.reads.also = gate
    ends: list[str] = []
    first = bed.start(huge, on_layer=lambda layer, _: layer == 7 and ends.append("huge"))
    gate.await_reads(1)
    second = bed.start(small, on_layer=lambda layer, _: layer == 7 and ends.append("small"))
    gate.opened.set()
    assert first.wait(20)["huge"].ok and second.wait(20)["small"].ok
    assert ends == ["small", "huge"]
    assert huge.wrong_pages() == small.wrong_pages() == []


def test_requests_of_a_batch_advance_together(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hits = [bed.hit(f"r{i}", pool, count, seed=i) for i, count in enumerate((32, 4))]
    seen: list[int] = []

    def on_layer(layer: int, fences: object) -> None:
        if layer == 0:  # hardly anything of the later layers is there, of either request
            for hit in hits:
                done = sum(
                    hit.pages.layer(n, i) != bytes([0xA5]) * LAYER_BYTES
                    for n in hit.numbers
                    for i in range(3, LAYERS)
                )
                seen.append(done)

    bed.reads.also = Throttle(64 * MIB)
    assert all(result.ok for result in bed.load(*hits, on_layer=on_layer).values())
    assert seen == [0, 0]


def test_headers_are_not_read_again_with_every_range(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hit = bed.hit("a", pool, 60)
    bed.reads.seen.clear()
    assert bed.load(hit)["a"].ok
    extra = bed.reads.total_bytes - 60 * (4096 + pool.geometry.block_bytes)
    # Only where a second range begins before the first one is back from the workers.
    assert 0 <= extra <= 4096 * 2 * OPTIONS.queue_depth * (OPTIONS.piece_bytes // LAYER_BYTES)
    assert extra < 4096 * 60


def test_small_pages_of_neighbours_are_read_in_few_ios(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(StreamOptions(staging_bytes=4 * MIB, queue_depth=1, probe_s=0))
    pool = bed.cache.attach(geometry(layers=4, layer_bytes=4096))
    hit = bed.hit("a", pool, 32)
    bed.reads.seen.clear()
    assert bed.load(hit)["a"].ok and hit.wrong_pages() == []
    assert len(bed.reads.seen) <= 4


def test_layers_can_be_waited_for_one_by_one(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hit = bed.hit("a", pool, 20)
    load = bed.start(hit)
    assert load.wait_layer(LAYERS - 1, 20)
    assert load.wait(20)["a"].ok and load.done
    assert load.ready_s == sorted(load.ready_s) and len(load.ready_s) == LAYERS
