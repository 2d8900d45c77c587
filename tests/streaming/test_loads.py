"""Prefix hits land byte for byte, in every form of pool."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dualpath_sglang.streaming.load import LoadRequest, Outcome, PoolLoad
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage import StoreError
from tests.streaming.bed import MIB, Bed, Pages, chain, eventually, geometry


@pytest.mark.parametrize(
    ("layers", "layer_bytes", "parts"),
    [
        (8, 8192, 2),  # as MHA has them
        (8, 18432, 1),  # as MLA has them
        (5, 1000, 1),  # layers and blocks end anywhere
        (7, 4098, 2),
        (1, 3 * MIB // 2, 1),  # a state that is not cut by layer
        (61, 576, 1),
    ],
)
def test_every_page_holds_its_block(bed: Bed, layers: int, layer_bytes: int, parts: int) -> None:
    pool = bed.cache.attach(geometry(layers=layers, layer_bytes=layer_bytes))
    hit = bed.hit("a", pool, 21, parts=parts)
    result = bed.load(hit)["a"]
    assert result.ok and result.blocks == 21
    assert result.read_bytes == 21 * layers * layer_bytes
    assert hit.wrong_pages() == []
    assert hit.pages.untouched(0), "the page that nobody asked for"


def test_several_requests_land_side_by_side(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    hits = [bed.hit(f"r{i}", pool, count, seed=i) for i, count in enumerate((1, 30, 7))]
    results = bed.load(*hits)
    assert {rid: r.outcome for rid, r in results.items()} == dict.fromkeys(
        ("r0", "r1", "r2"), Outcome.OK
    )
    assert [hit.wrong_pages() for hit in hits] == [[], [], []]


def test_a_hybrid_model_waits_for_the_layers_of_all_its_pools(bed: Bed) -> None:
    # Layers 0 and 2 of the model are of one pool, 1 and 3 of another; a state comes before all.
    full = bed.hit("r", bed.cache.attach(geometry("kv", 2, 12000)), 9, seed=1)
    window = bed.hit("r", bed.cache.attach(geometry("swa", 2, 6000)), 3, seed=1)
    state = bed.hit("r", bed.cache.attach(geometry("mamba", 1, 300_000)), 1, seed=1)
    full.gates, window.gates, state.gates = (0, 2), (1, 3), (0,)
    seen: list[tuple[int, bool, bool, bool]] = []

    def on_layer(layer: int, fences: object) -> None:
        there = [not hit.wrong_pages() for hit in (full, window, state)]
        seen.append((layer, *there))

    load = bed.streamer.start(
        [LoadRequest("r", [full.part, window.part, state.part])],
        layers=4,
        deadline=time.monotonic() + 20,
        on_layer=on_layer,
    )
    assert load.wait(20)["r"].ok
    assert [layer for layer, *_ in seen] == [0, 1, 2, 3]
    assert seen[0][3], "the state is whole before layer 0"
    assert seen[2][1] and seen[3][2]
    assert all(not hit.wrong_pages() for hit in (full, window, state))


def test_layers_that_no_pool_serves_are_announced_with_the_one_before(bed: Bed) -> None:
    pool = bed.cache.attach(geometry(layers=2))
    hit = bed.hit("a", pool, 4)
    hit.gates = (1, 4)
    seen: list[int] = []
    load = bed.start(hit, layers=6, on_layer=lambda layer, fences: seen.append(layer))
    assert load.wait(20)["a"].ok and seen == [0, 1, 2, 3, 4, 5]


def test_a_load_of_nothing_is_over_at_once(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    seen: list[int] = []
    load = bed.streamer.start(
        [
            LoadRequest("a", []),
            LoadRequest("b", [PoolLoad(pool, Pages(pool, 1).landing, [], [], range(8))]),
        ],
        layers=8,
        deadline=time.monotonic() + 20,
        on_layer=lambda layer, fences: seen.append(layer),
    )
    results = load.wait(20)
    assert results["a"].ok and results["b"].ok and seen == list(range(8))
    assert bed.streamer.start([], layers=2, deadline=time.monotonic()).wait(20) == {}


def test_a_load_that_is_malformed_ends_and_harms_no_other(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    good, bad, away = (bed.hit(rid, pool, 5, seed=i) for i, rid in enumerate(("g", "b", "w")))
    bad.gates = range(20, 28)
    away.numbers = [1, 2, 3, 4, 77]
    seen: list[int] = []
    broken = bed.start(bad, layers=8, on_layer=lambda layer, fences: seen.append(layer))
    results = bed.load(good, away, layers=8)
    assert broken.wait(20)["b"].outcome is Outcome.ERROR and seen == list(range(8))
    assert results["g"].ok and results["w"].outcome is Outcome.ERROR
    assert good.wrong_pages() == []


def test_a_listener_that_raises_holds_nobody_up(bed: Bed) -> None:
    hit = bed.hit("a", bed.cache.attach(geometry()), 5)

    def on_layer(layer: int, fences: object) -> None:
        raise RuntimeError("boom")

    assert bed.load(hit, on_layer=on_layer)["a"].ok


def test_staging_memory_stays_at_its_bound_for_a_hit_ten_times_as_large(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed(StreamOptions(staging_bytes=1 * MIB, queue_depth=4, probe_s=0))
    pool = bed.cache.attach(geometry(layers=8, layer_bytes=16384))
    hit = bed.hit("a", pool, 80)
    assert 80 * pool.geometry.block_bytes == 10 * MIB
    assert bed.load(hit)["a"].ok and hit.wrong_pages() == []
    stats = bed.streamer.stats()
    assert stats.staging_peak_bytes <= stats.staging_bytes == 1 * MIB
    assert stats.staging_used_bytes == 0


def test_a_pool_whose_layer_exceeds_the_staging_memory_is_refused_in_words(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed(StreamOptions(staging_bytes=1 * MIB, probe_s=0))
    bed.streamer.check(geometry(layers=4, layer_bytes=MIB - 8192))
    with pytest.raises(StoreError, match="one layer of one page"):
        bed.streamer.check(geometry(layers=4, layer_bytes=MIB))


def test_what_was_loaded_counts_as_used(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    old, new = bed.hit("old", pool, 4, seed=1), bed.hit("new", pool, 4, seed=2)
    bed.cache.maintain()
    assert bed.load(old)["old"].ok
    eventually(lambda: bed.cache.stats().hit_blocks == 4, "the cache hears of it")
    bed.cache.maintain()
    bed.cache.evict(1)
    assert bed.cache.prefix(pool, old.keys) == 4
    assert bed.cache.prefix(pool, new.keys) == 3


def test_counters_tell_what_was_done(bed: Bed) -> None:
    pool = bed.cache.attach(geometry())
    hit = bed.hit("a", pool, 12)
    assert bed.load(hit)["a"].ok
    absent = bed.hit("b", pool, 3, seed=9, stored=False)
    assert bed.load(absent)["b"].reason == "absent"
    stats = bed.streamer.stats()
    assert (stats.loads, stats.requests, stats.blocks) == (2, 2, 12)
    assert stats.read_bytes == 12 * pool.geometry.block_bytes
    assert stats.failed_requests == {"miss": 1}
    assert stats.queued_bytes == stats.in_flight_reads == stats.staging_used_bytes == 0
    eventually(lambda: bed.cache.stats().misses.get("absent") == 3, "the cache hears of it")
    assert bed.cache.stats().read_bytes == stats.read_bytes


def test_the_device_is_measured_on_blocks_of_the_store(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(StreamOptions(queue_depth=2, probe_s=0.1))
    pool = bed.cache.attach(geometry(layers=8, layer_bytes=65536))
    bed.streamer.measure(pool)  # nothing there yet
    bed.write(pool, chain(1, 16))
    bed.streamer.measure(pool)
    eventually(lambda: bed.streamer.forecast().bytes_per_s, "a rate")
    assert bed.streamer.stats().io_bytes in {65536 * n for n in (1, 2, 4, 8)}


def test_a_size_that_the_operator_gave_is_not_measured(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(StreamOptions(queue_depth=2, io_bytes=12345, probe_s=1))
    pool = bed.cache.attach(geometry())
    bed.write(pool, chain(1, 16))
    before = len(bed.reads.seen)
    bed.streamer.measure(pool)
    assert bed.load(bed.hit("a", pool, 1))["a"].ok
    assert bed.streamer.stats().io_bytes == 12345
    assert len(bed.reads.seen) - before <= 8
