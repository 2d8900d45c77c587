"""The circuit breaker, by a clock of the test's."""

from __future__ import annotations

import threading

import pytest

from dualpath_sglang.index.redis.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(3, (0.1, 1.0), clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert breaker.enter()
        breaker.failed()


def test_a_few_failures_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.enter()
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker, 1)
    assert breaker.is_open
    assert not breaker.enter()


def test_one_at_a_time_tries(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 0.1
    assert breaker.enter()
    assert not breaker.enter(), "another tries already"
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.enter() and breaker.enter()


def test_the_pauses_double_up_to_the_longest(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        clock.now += pause_s - 0.01
        assert not breaker.enter()
        clock.now += 0.02
        assert breaker.enter()
        breaker.failed()
    clock.now += 1.1
    assert breaker.enter()
    breaker.succeeded()
    fail(breaker, 3)
    clock.now += 0.11
    assert breaker.enter(), "the pauses begin anew"


def test_those_who_fail_late_do_not_lengthen_the_pause(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    for _ in range(10):
        assert breaker.enter()
    for _ in range(10):
        clock.now += 0.05
        breaker.failed()
    assert breaker.enter()


def test_many_threads_try_once(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.0
    entered: list[bool] = []
    threads = [threading.Thread(target=lambda: entered.append(breaker.enter())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered.count(True) == 1
