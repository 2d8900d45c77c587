"""Warnings that repeat are said once in a while, whoever says them."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from dualpath_storage import notices
from dualpath_storage.notices import Notices


class Slow(float):
    """A time between whose comparison and whose use others come in."""

    def __sub__(self, other: float) -> float:
        time.sleep(0.02)
        return float(self) - other


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return Slow(self.now)


def test_threads_that_warn_at_once_are_heard_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(notices, "time", clock)
    several = Notices(logging.getLogger("test"))

    def all_warn() -> int:
        threads = [threading.Thread(target=several.warn, args=("of %d", i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(caplog.records)

    assert all_warn() == 1
    assert all_warn() == 1
    clock.now += 9.0
    assert all_warn() == 1
    clock.now += 2.0
    assert all_warn() == 2


def test_who_logs_slowly_keeps_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    go, logging_now = threading.Event(), threading.Event()

    class Blocking(logging.Logger):
        def warning(self, *_: object, **__: object) -> None:
            logging_now.set()
            go.wait(20.0)

    several = Notices(Blocking("test"))
    thread = threading.Thread(target=several.warn, args=("of the test",))
    thread.start()
    assert logging_now.wait(20.0)
    several.warn("of another")
    assert thread.is_alive(), "it still logs"
    go.set()
    thread.join(20.0)
