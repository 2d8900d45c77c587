"""Whatever breaks, the request that it hits ends in time, and nobody else notices."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.throttle import Throttle
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import WriteResult
from dualpath_sglang.streaming.load import Load, Outcome
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage import pieces_of
from tests.streaming.bed import MIB, Bed, Gate, Hit, block_bytes, chain, eventually, geometry

LAYERS, LAYER_BYTES = 8, 32768
OPTIONS = StreamOptions(
    staging_bytes=2 * MIB, queue_depth=4, io_bytes=LAYER_BYTES, piece_bytes=MIB // 4, probe_s=0
)


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    return make_bed(OPTIONS)


def two_hits(bed: Bed) -> tuple[Hit, Hit]:
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    return bed.hit("a", pool, 12, seed=1), bed.hit("b", pool, 12, seed=2)


def place_in_file(bed: Bed, hit: Hit, block: int) -> tuple[Path, int]:
    """The segment of a block, and where its slot begins."""
    place = bed.cache.locate(hit.pool, [hit.keys[block]])[0]
    assert place is not None
    path = hit.pool.store.directory / f"seg-{place.segment:08x}"
    return path, place.slot * hit.pool.geometry.slot_bytes


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x55]))


def test_one_damaged_layer_fails_its_request_alone(bed: Bed, seed: int) -> None:
    rng = random.Random(seed)
    bad, good = two_hits(bed)
    block, layer = rng.randrange(12), rng.randrange(LAYERS)
    path, slot = place_in_file(bed, bad, block)
    flip(path, slot + 4096 + layer * LAYER_BYTES + rng.randrange(LAYER_BYTES))
    results = bed.load(bad, good)
    assert results["a"].outcome is Outcome.MISS and results["a"].reason == "checksum"
    assert results["b"].ok and good.wrong_pages() == []
    assert bed.streamer.stats().reread_blocks >= 1
    # The entry is gone, the page is stored anew, and the next load is right.
    eventually(lambda: bed.cache.prefix(bad.pool, bad.keys) == block, "the entry goes")
    bed.write(bad.pool, bad.keys)
    assert bed.load(bad)["a"].ok and bad.wrong_pages() == []


def test_damage_in_later_layers_does_not_hold_back_the_layers_before(bed: Bed) -> None:
    bad, good = two_hits(bed)
    path, slot = place_in_file(bed, bad, 3)
    flip(path, slot + 4096 + 6 * LAYER_BYTES)
    right: list[bool] = []

    def on_layer(layer: int, fences: object) -> None:
        wanted = block_bytes(bad.pool, bad.keys[3])[layer * LAYER_BYTES :][:LAYER_BYTES]
        right.append(bad.pages.layer(bad.numbers[3], layer) == wanted)

    bed.reads.also = Throttle(32 * MIB)  # or the layer that is damaged may overtake the others
    results = bed.load(bad, good, on_layer=on_layer)
    assert results["a"].reason == "checksum" and results["b"].ok
    assert all(right[:6]) and len(right) == LAYERS


def test_a_block_that_was_damaged_only_on_its_way_is_good_at_the_second_reading(bed: Bed) -> None:
    hit, _ = two_hits(bed)
    path, slot = place_in_file(bed, hit, 5)
    at = slot + 4096 + 2 * LAYER_BYTES
    flip(path, at)
    readings: list[int] = []

    def repair_before_the_second(where: Path, offset: int, size: int) -> None:
        if where == path and offset <= at < offset + size:
            readings.append(offset)
            if len(readings) == 2:
                flip(path, at)

    bed.reads.also = repair_before_the_second
    assert bed.load(hit)["a"].ok and hit.wrong_pages() == []
    stats = bed.streamer.stats()
    assert (stats.reread_blocks, stats.repaired_blocks, stats.failed_requests) == (1, 1, {})


def test_a_block_that_moved_is_read_where_it_is_now(bed: Bed) -> None:
    """Evicted and stored anew in another slot after the load has looked it up."""
    hit, _ = two_hits(bed)
    gate = Gate()
    bed.reads.also = gate
    load = bed.start(hit)
    gate.await_reads(OPTIONS.queue_depth)  # or a worker finds nothing where it looks again
    assert bed.cache.clear() == 24
    bed.write(hit.pool, chain(7, 1))  # takes a slot that was freed
    bed.write(hit.pool, hit.keys)
    gate.opened.set()
    assert load.wait(20)["a"].ok and hit.wrong_pages() == []
    assert bed.streamer.stats().repaired_blocks >= 1


def test_a_segment_deleted_between_lookup_and_load_is_a_miss(bed: Bed) -> None:
    lost, _ = two_hits(bed)
    assert bed.cache.prefix(lost.pool, lost.keys) == 12
    other = bed.hit("c", bed.cache.attach(geometry("other", LAYERS, LAYER_BYTES)), 12, seed=3)
    for path in lost.pool.store.directory.glob("seg-*"):
        path.unlink()
    bed.cache.maintain()
    results = bed.load(lost, other)
    assert results["a"].outcome is Outcome.MISS
    assert results["c"].ok and other.wrong_pages() == []
    assert bed.cache.prefix(lost.pool, lost.keys) == 0


def test_a_page_evicted_during_the_load_is_a_miss_or_whole(bed: Bed) -> None:
    hit, other = two_hits(bed)
    gate = Gate()
    bed.reads.also = gate
    load = bed.start(hit)
    gate.await_reads(1)
    assert bed.cache.clear() == 24
    bed.write(hit.pool, chain(8, 24))  # their slots hold something else now
    gate.opened.set()
    assert load.wait(20)["a"].outcome is Outcome.MISS
    bed.write(hit.pool, other.keys)
    assert bed.load(other)["b"].ok and other.wrong_pages() == []


def test_what_was_promised_is_not_evicted_before_it_is_released(bed: Bed) -> None:
    old, new = two_hits(bed)
    bed.cache.promise("a", old.pool, old.keys[7])
    bed.cache.evict(1 << 40)
    assert bed.cache.prefix(old.pool, old.keys) == 8
    assert bed.cache.prefix(new.pool, new.keys) == 0
    bed.cache.release("a")
    bed.cache.evict(1 << 40)
    assert bed.cache.prefix(old.pool, old.keys) == 0


def test_a_store_that_hangs_costs_a_request_no_more_than_its_deadline(bed: Bed) -> None:
    stuck, other = two_hits(bed)
    gate = Gate()
    bed.reads.also = gate
    seen: list[int] = []
    began = time.monotonic()
    load = bed.start(stuck, seconds=0.3, on_layer=lambda layer, _: seen.append(layer))
    assert load.wait(20)["a"].outcome is Outcome.TIMEOUT
    assert time.monotonic() - began >= 0.3
    assert seen == list(range(LAYERS))
    stats = bed.streamer.stats()
    assert stats.abandoned_reads == 4 and stats.queued_bytes == 0
    assert 0 < stats.retired_bytes == stats.staging_used_bytes <= stats.staging_bytes

    # Nobody waits for a store that is known to hang.
    assert bed.streamer.forecast().stalled
    began = time.monotonic()
    result = bed.load(other, seconds=60)["b"]
    assert (result.outcome, result.reason) == (Outcome.TIMEOUT, "stalled")

    # Late bytes touch nothing, and everything works again.
    gate.opened.set()
    eventually(lambda: bed.streamer.stats().staging_used_bytes == 0, "the memory comes back")
    assert all(stuck.pages.untouched(page) for page in range(13))
    assert not bed.streamer.forecast().stalled and bed.streamer.stats().retired_bytes == 0
    assert bed.load(other)["b"].ok and other.wrong_pages() == []


def test_one_read_that_never_comes_back_leaves_the_others_readable(bed: Bed) -> None:
    stuck, other = two_hits(bed)
    gate = Gate()
    lock = threading.Lock()

    def hang_first(path: Path, offset: int, size: int) -> None:
        with lock:
            first = len(bed.reads.seen) == 1
        if first:
            gate(path, offset, size)

    bed.reads.seen.clear()
    bed.reads.also = hang_first
    assert bed.load(stuck, seconds=0.5)["a"].outcome is Outcome.TIMEOUT
    assert not bed.streamer.forecast().stalled
    assert bed.streamer.stats().retired_bytes > 0
    assert bed.load(other)["b"].ok and other.wrong_pages() == []
    gate.opened.set()
    eventually(lambda: bed.streamer.stats().retired_bytes == 0, "the memory comes back")


def test_a_slow_request_ends_at_its_deadline_with_what_there_is(bed: Bed) -> None:
    hit, _ = two_hits(bed)
    bed.reads.also = Throttle(12 * LAYERS * LAYER_BYTES / 2.0)  # 2 s in all
    load = bed.start(hit, seconds=0.5)
    result = load.wait(20)["a"]
    assert result.outcome is Outcome.TIMEOUT and 0 < result.read_bytes < 12 * LAYERS * LAYER_BYTES
    frozen = bytes(hit.pages.memory)
    bed.reads.also = None
    eventually(lambda: bed.streamer.stats().in_flight_reads == 0, "the last reads come back")
    assert bytes(hit.pages.memory) == frozen, "nothing lands after the end"


def test_a_request_cancelled_while_loading_lets_the_others_finish(bed: Bed) -> None:
    gone, stays = two_hits(bed)
    gate = Gate()
    bed.reads.also = gate
    load = bed.start(gone, stays)
    gate.await_reads(1)
    load.cancel("a")
    eventually(lambda: "a" in load.wait(0.0), "it ends before its reads come back")
    gate.opened.set()
    results = load.wait(20)
    assert results["a"].outcome is Outcome.CANCELLED and results["b"].ok
    assert stays.wrong_pages() == []
    assert all(gone.pages.untouched(page) for page in range(13))


def test_a_cancelled_batch_is_over_and_leaves_no_trace(bed: Bed) -> None:
    a, b = two_hits(bed)
    bed.reads.also = Throttle(4 * MIB)
    seen: list[int] = []
    load = bed.start(a, b, on_layer=lambda layer, _: seen.append(layer))
    load.cancel()
    assert {r.outcome for r in load.wait(20).values()} == {Outcome.CANCELLED}
    assert seen == list(range(LAYERS))
    bed.reads.also = None
    eventually(lambda: bed.streamer.stats().staging_used_bytes == 0, "the memory comes back")
    assert bed.streamer.stats().queued_bytes == 0
    load.cancel("a")
    assert bed.load(a)["a"].ok and a.wrong_pages() == []


def test_closing_while_loading_ends_every_load(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(OPTIONS)
    a, b = two_hits(bed)
    bed.reads.also = Throttle(4 * MIB)
    seen: list[int] = []
    first = bed.start(a, on_layer=lambda layer, _: seen.append(layer))
    second = bed.start(b, on_layer=lambda layer, _: seen.append(layer))
    bed.streamer.close()
    assert first.wait(5)["a"].outcome is second.wait(5)["b"].outcome is Outcome.ERROR
    assert sorted(seen) == sorted(2 * list(range(LAYERS)))
    late = bed.start(a, on_layer=lambda layer, _: seen.append(layer))
    assert late.wait(5)["a"].outcome is Outcome.ERROR and len(seen) == 3 * LAYERS


def test_closing_a_streamer_whose_store_hangs_does_not_hang(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(OPTIONS)
    hit, _ = two_hits(bed)
    gate = Gate()
    bed.reads.also = gate
    load = bed.start(hit)
    gate.await_reads(4)
    bed.streamer.close(timeout_s=0.2)
    assert load.wait(5)["a"].outcome is Outcome.ERROR
    gate.opened.set()


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Make a running thread raise, wherever it is."""
    assert thread.ident is not None
    done = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(error)
    )
    assert done == 1


def thread_named(prefix: str) -> threading.Thread:
    return next(t for t in threading.enumerate() if t.name.startswith(prefix) and t.is_alive())


def test_a_streaming_thread_that_dies_ends_its_loads_and_serves_the_next(bed: Bed) -> None:
    hit, other = two_hits(bed)
    bed.reads.also = Throttle(8 * MIB)
    seen: list[int] = []
    load = bed.start(hit, on_layer=lambda layer, _: seen.append(layer))
    assert load.wait_layer(0, 20)
    raise_in(bed.streamer._thread, SystemExit)
    assert load.wait(20)["a"].outcome is Outcome.ERROR
    assert seen == list(range(LAYERS))
    bed.reads.also = None
    assert bed.load(other)["b"].ok and other.wrong_pages() == []


def test_a_reading_thread_that_dies_fails_what_it_was_reading(bed: Bed) -> None:
    hit, other = two_hits(bed)
    once = threading.Event()

    def die(path: Path, offset: int, size: int) -> None:
        if not once.is_set():
            once.set()
            raise SystemExit

    bed.reads.also = die
    results = bed.load(hit, other)
    assert sorted(r.outcome.value for r in results.values()) == ["error", "ok"]
    assert bed.load(hit, other)["a"].ok
    assert hit.wrong_pages() == other.wrong_pages() == []
    alive = [t for t in threading.enumerate() if t.name.startswith("dualpath-stream-read")]
    assert len(alive) >= 4


def test_an_error_of_the_device_is_a_miss_after_the_second_try(bed: Bed) -> None:
    hit, other = two_hits(bed)
    path, slot = place_in_file(bed, hit, 4)
    size = hit.pool.geometry.slot_bytes

    def fail(where: Path, offset: int, length: int) -> None:
        if where == path and slot <= offset < slot + size:
            raise OSError(5, "Input/output error")

    bed.reads.also = fail
    results = bed.load(hit, other)
    assert results["a"].outcome is Outcome.MISS and results["b"].ok
    assert results["a"].reason in ("io_error", "unavailable")


def test_when_the_index_cannot_answer_a_load_misses(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit, _ = two_hits(bed)

    def busy(*_: object) -> None:
        raise IndexUnavailableError("busy")

    monkeypatch.setattr(type(bed.cache.index), "lookup", busy)
    result = bed.load(hit)["a"]
    assert (result.outcome, result.reason) == (Outcome.MISS, "absent")
    monkeypatch.undo()
    assert bed.load(hit)["a"].ok and hit.wrong_pages() == []


@pytest.mark.parametrize("round_", range(3))
def test_under_random_faults_a_good_result_means_right_pages(
    make_bed: Callable[..., Bed], seed: int, round_: int
) -> None:
    """Loads, cancellations, evictions, damage, delays and errors at once."""
    rng = random.Random(seed + round_)
    bed = make_bed(OPTIONS)
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    lock = threading.Lock()

    def fault(path: Path, offset: int, size: int) -> None:
        with lock:
            what = rng.random()
        if what < 0.02:
            raise OSError(5, "Input/output error")
        if what < 0.1:
            time.sleep(0.01)

    bed.reads.also = fault
    loads: list[tuple[Load, list[Hit]]] = []
    for number in range(25):
        hits = [
            bed.hit(f"{number}/{i}", pool, rng.randint(1, 10), seed=rng.randrange(6))
            for i in range(rng.randint(1, 3))
        ]
        load = bed.start(*hits, seconds=rng.choice([0.02, 5.0, 5.0]))
        loads.append((load, hits))
        action = rng.random()
        if action < 0.1:
            load.cancel(rng.choice([None, hits[0].rid]))
        elif action < 0.2:
            bed.cache.evict(rng.randint(1, 40) * pool.geometry.slot_bytes)
        elif action < 0.3:
            path = rng.choice(bed.segment_files())
            flip(path, rng.randrange(path.stat().st_size))
        elif action < 0.4:
            bed.cache.maintain()
    outcomes = []
    for load, hits in loads:
        results = load.wait(20)
        assert len(load.ready_s) == LAYERS
        for hit in hits:
            outcomes.append(results[hit.rid].outcome)
            assert not results[hit.rid].ok or hit.wrong_pages() == []
    assert Outcome.OK in outcomes
    eventually(lambda: bed.streamer.stats().staging_used_bytes == 0, "all memory comes back")
    assert bed.streamer.stats().queued_bytes == 0


def test_bytes_that_were_written_in_one_piece_are_read_in_layers(bed: Bed) -> None:
    """A page written by one interface is read by the other, and the other way round."""
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hit = bed.hit("a", pool, 6)
    assert bed.load(hit)["a"].ok
    whole = [bytearray(pool.geometry.block_bytes) for _ in hit.keys]
    pieces = [pieces_of(memoryview(block), pool.geometry) for block in whole]
    assert all(bed.cache.read(pool, hit.keys, pieces))
    assert [bytes(b) for b in whole] == [hit.pages.page(n) for n in hit.numbers]
    assert set(bed.cache.write(pool, hit.keys, pieces)) == {WriteResult.PRESENT}


def test_the_time_after_a_load_that_was_given_up_does_not_make_the_store_slow(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bed.cache.attach(geometry(layers=LAYERS, layer_bytes=LAYER_BYTES))
    hit = bed.hit("r", pool, 48)
    meter = bed.streamer._pipeline.meter
    passed = itertools.count()
    gate = Gate()
    bed.reads.also = lambda *read: gate(*read) if next(passed) >= 12 else None
    load = bed.start(hit)
    gate.await_reads(4)
    load.cancel()
    load.wait(20.0)
    gate.opened.set()
    eventually(lambda: bed.streamer.stats().in_flight_reads == 0, "all reads are back")
    assert meter._last is not None, "its last word was that there is more to read"
    meter._last -= 100.0  # so long ago
    meter._at -= 100.0
    meter._sampled -= 100.0
    note, rates = meter.note, []

    def noted(size: int, now: float, *, full: bool) -> None:
        note(size, now, full=full)
        rates.append(meter.rate(now))

    monkeypatch.setattr(meter, "note", noted)
    bed.reads.also = lambda *_: time.sleep(0.01)
    assert bed.load(hit)["r"].ok
    known = [rate for rate in rates if rate is not None]
    assert min(known) > 48 * pool.geometry.block_bytes / 50.0
