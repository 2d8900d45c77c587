"""What the bench of the cluster is made of: counters, the model's time, turns, what lands."""

from __future__ import annotations

import threading
import time

import pytest

from bench.cluster.__main__ import names_of, shapes_of
from bench.cluster.counters import max_avg, received_bytes
from bench.cluster.driver import Figures, _check_landed, _Scheduler
from bench.cluster.engine import Turns
from bench.cluster.landing import CheckedSink, Tally
from bench.cluster.model import MODELS, Contents, keys
from bench.cluster.spec import HostSpec, Peering
from bench.measure import BenchError
from dualpath_sglang.streaming.landing import Staged
from dualpath_storage.ranges import RangeShape


def test_max_avg_is_1_when_all_do_the_same_and_their_number_when_one_does_it_all() -> None:
    mib = 1 << 20
    assert max_avg([[mib] * 6] * 5) == 1
    assert max_avg([[6 * mib, 0, 0, 0, 0, 0]] * 5) == 6
    assert max_avg([[mib, mib], [9 * mib, 0]]) == pytest.approx((2 * mib + 18 * mib) / (11 * mib))
    assert max_avg([[5, 0], []]) == 0, "what moved next to nothing is not counted"


def test_a_device_s_bytes_are_found_among_others() -> None:
    text = "Inter-|   Receive\n face |bytes\n    lo: 5 1\nstorage:1234 6 0\ncompute: 99 1\n"
    assert received_bytes(text, "storage") == 1234
    with pytest.raises(BenchError, match="no device eth9"):
        received_bytes(text, "eth9")


def test_bytes_that_no_nic_brought_are_noticed() -> None:
    _check_landed(100, 107)
    with pytest.raises(BenchError, match="landed"):
        _check_landed(200, 107)


def test_reading_takes_longer_than_computing_where_io_bound_and_not_where_compute_bound() -> None:
    nic = 200e6 / 8

    def ratio(name: str) -> float:
        model = MODELS[name]
        cached = 17_000 // model.page_tokens * model.page_tokens
        read_s = cached // model.page_tokens * model.geometry.block_bytes / nic
        return read_s / (model.layers * model.layer_s(400, cached))

    assert ratio("io_bound") > 3
    assert ratio("compute_bound") < 1
    small, large = MODELS["io_bound"].layer_s(1, 100), MODELS["io_bound"].layer_s(1, 10_000)
    assert 0 < small < large


def test_what_lands_is_counted_and_a_block_in_the_wrong_place_is_noticed() -> None:
    geometry = MODELS["compute_bound"].geometry
    contents, tally = Contents(geometry), Tally()
    names = keys("a", 0, 3)
    shape = RangeShape(geometry, 2, 5, header=False)
    area = memoryview(bytearray(3 * shape.stride))
    for i, block in enumerate(contents.of(names)):
        for layer in range(2, 5):
            shape.layer(area, i, layer)[:] = block[layer]
    CheckedSink(contents, names, tally).target([0, 1, 2]).land(Staged(area, shape, 0, 3))
    assert (tally.landed_bytes, tally.wrong) == (9 * geometry.layer_bytes, 0)
    sink = CheckedSink(contents, names, tally)
    sink.target([0, 2, 1]).land(Staged(area, shape, 0, 3))
    assert tally.wrong == 6
    with pytest.raises(ValueError, match="not page 3"):
        sink.target([3])


def test_blocks_of_two_trajectories_differ() -> None:
    contents = Contents(MODELS["compute_bound"].geometry)
    one, other = keys("a", 0, 1)[0], keys("b", 0, 1)[0]
    assert one != other
    ((first, *_),) = contents.of([one])
    assert not contents.wrong(one, 0, first)
    assert contents.wrong(other, 0, first)
    assert contents.wrong(one, 1, first)


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order, inside = Turns(), list[int](), threading.Event()

    def take(number: int) -> None:
        with turns:
            order.append(number)
            if number == 0:
                assert inside.wait(60)

    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        while turns.asked <= number:
            time.sleep(0.001)
    inside.set()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_the_least_loaded_engine_takes_the_next_turn() -> None:
    scheduler = _Scheduler(3)
    assert [scheduler.take(10), scheduler.take(30), scheduler.take(20)] == [0, 1, 2]
    assert scheduler.take(5) == 0
    scheduler.give(1, 30)
    assert scheduler.take(1) == 1


def test_a_spec_survives_its_way_into_a_process() -> None:
    spec = HostSpec("p0", "io_bound", "/r", "redis://h:1", ("h", 2), "a", "split", 5, 6,
                    [Peering("d0", "h", 3)])  # fmt: skip
    assert HostSpec.from_json(spec.to_json()) == spec
    storage = HostSpec("s0", "io_bound", "/r", "redis://h:1")
    assert HostSpec.from_json(storage.to_json()).blocks is None


def test_percentiles_of_no_turns_are_zero() -> None:
    assert Figures(0, 0, 0).ttft(0.5) == 0
    assert Figures(0, 0, 0, ttft_s=[3.0, 1.0, 2.0]).ttft(0.5) == 2.0


def test_what_the_command_line_says_is_checked() -> None:
    assert [(s.prefill, s.decode) for s in shapes_of("1x1, 2x4", 1e6, 8)] == [(1, 1), (2, 4)]
    for bad in ("", "1", "0x1", "1x0", "axb", "1x-1"):
        with pytest.raises(BenchError, match="PxD"):
            shapes_of(bad, 1e6, 8)
    with pytest.raises(BenchError, match="more than one machine"):
        shapes_of("100x100", 1e6, 8)
    with pytest.raises(BenchError, match="There is no system x; there are a, b"):
        names_of("a,x", ["a", "b"], "system")
