"""When a load would be done."""

from __future__ import annotations

import math

import pytest

from dualpath_sglang.streaming.estimate import Forecast, RateMeter, too_slow


def test_a_load_waits_for_what_is_queued_before_it() -> None:
    forecast = Forecast(bytes_per_s=1000.0, queued_bytes=500, stalled=False)
    assert forecast.read_s(1500) == 2.0
    assert forecast.affordable_bytes(2.0) == 1500
    assert forecast.affordable_bytes(0.1) == 0


def test_nothing_is_refused_before_anything_was_measured() -> None:
    forecast = Forecast(bytes_per_s=None, queued_bytes=1 << 40, stalled=False)
    assert forecast.read_s(1 << 40) == 0.0
    assert forecast.affordable_bytes(0.1) is None


def test_a_stalled_store_affords_nothing() -> None:
    for rate in (None, 1e9):
        forecast = Forecast(rate, 0, stalled=True)
        assert forecast.read_s(1) == math.inf
        assert forecast.affordable_bytes(100.0) == 0


def test_the_rate_is_that_of_a_full_queue() -> None:
    meter = RateMeter()
    now = 0.0
    for _ in range(200):
        now += 0.001
        meter.note(1_000_000, now, full=True)
    assert meter.rate(now) == pytest.approx(1e9, rel=0.01)


def test_reads_of_a_small_load_say_nothing_about_the_rate() -> None:
    meter = RateMeter()
    meter.set(1e9, 0.0)
    for now in range(1, 20):
        meter.note(1000, float(now), full=False)
    assert meter.rate(19.0) == 1e9


def test_the_idle_time_between_loads_does_not_count() -> None:
    meter = RateMeter()
    for load in range(3):
        began = 100.0 * load
        for i in range(1, 100):
            meter.note(1_000_000, began + 0.001 * i, full=i < 99)
    assert meter.rate(200.1) == pytest.approx(1e9, rel=0.05)


def test_what_was_left_of_a_fast_load_does_not_hide_a_slow_store() -> None:
    meter = RateMeter()
    meter.note(1_000_000, 0.0, full=True)
    meter.note(1_000_000, 0.001, full=True)  # too short to say anything
    meter.note(1_000_000, 0.002, full=False)
    for i in range(4):
        meter.note(1_000_000, 60.0 + i, full=True)
    assert meter.rate(63.0) == pytest.approx(1e6)


def test_a_slow_moment_is_forgotten() -> None:
    meter = RateMeter()
    meter.set(1e6, 0.0)
    assert meter.rate(30.0) == 1e6
    assert meter.rate(330.0) == pytest.approx(1e6 * 2**10)
    assert meter.rate(1e12) is not None


def test_a_side_that_goes_on_as_it_has_begun_is_too_slow_or_not() -> None:
    assert not too_slow(0.0, 2.0, 10.0, done=0, total=100)
    assert not too_slow(0.0, 2.0, 10.0, done=30, total=100)
    assert too_slow(0.0, 2.0, 10.0, done=20, total=100)
    assert not too_slow(0.0, 2.0, 10.0, done=100, total=100)
    assert not too_slow(0.0, 2.0, float("inf"), done=1, total=100)


def slowed_down() -> RateMeter:
    """Does 1e9 until 10, and 1e6 until 25."""
    meter = RateMeter()
    for i in range(1, 10_001):
        meter.note(1_000_000, 0.001 * i, full=True)
    slow(meter, 10.0, 60)
    assert meter.rate(25.0) == pytest.approx(1e6, rel=0.01)
    return meter


def slow(meter: RateMeter, begin: float, count: int) -> None:
    for i in range(1, count + 1):
        meter.note(250_000, begin + 0.25 * i, full=True)


def test_a_side_that_had_a_slow_moment_is_soon_hoped_to_be_as_before() -> None:
    meter = slowed_down()
    assert meter.hope(25.0) == meter.hope(26.0) == pytest.approx(1e6, rel=0.01)
    assert meter.hope(27.0) == pytest.approx(4e6, rel=0.01), "it is tried with a little first"
    assert meter.hope(31.5) == pytest.approx(0.8e9, rel=0.1)
    assert meter.rate(31.5) == pytest.approx(1e6, rel=0.01), "a forecast does not hope"


def test_hopes_end_with_what_is_measured() -> None:
    meter = slowed_down()
    assert (meter.hope(31.5) or 0.0) > 5e8
    slow(meter, 31.5, 8)
    assert meter.hope(33.5) == pytest.approx(1e6, rel=0.3)


def test_one_that_stays_slow_is_hoped_for_less_and_less() -> None:
    meter = slowed_down()
    slow(meter, 25.0, 2400)
    assert meter.hope(632.0) == pytest.approx(1e6, rel=0.1)


def test_one_piece_that_came_fast_corrects_an_old_low_rate_and_no_other() -> None:
    meter = slowed_down()
    meter.at_least(5e8, 25.5)
    assert meter.rate(25.5) == pytest.approx(1e6, rel=0.01), "it was measured just now"
    meter.at_least(5e8, 27.0)
    assert meter.rate(27.0) == 5e8
    meter.at_least(1e6, 29.0)
    assert meter.rate(29.0) == 5e8
    nothing = RateMeter()
    nothing.at_least(5e8, 0.0)
    assert nothing.rate(0.0) is None


def test_time_in_which_nothing_was_asked_for_does_not_count() -> None:
    """A load that is given up leaves no last read that says so."""
    meter = RateMeter()
    for i in range(1, 100):
        meter.note(1_000_000, 0.001 * i, full=True)
    meter.pause()
    for i in range(1, 100):
        meter.note(1_000_000, 60.0 + 0.001 * i, full=True)
    assert meter.rate(60.1) == pytest.approx(1e9, rel=0.05)
