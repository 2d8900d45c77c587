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
