"""What is known of pages: for so long, of this epoch, and only so many."""

from __future__ import annotations

import time

import pytest

from dualpath_sglang import known_pages
from dualpath_sglang.known_pages import KnownPages

KEYS = list("abcdefgh")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its first element is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_was_seen_is_known(clock: list[float]) -> None:
    known: KnownPages[str] = KnownPages(10.0, 1.0)
    assert known.leading_run(KEYS, 0) == (0, False)
    known.seen(KEYS[:5], KEYS[5], 0)
    assert known.leading_run(KEYS, 0) == (5, True)
    clock[0] += 1.5
    assert known.leading_run(KEYS, 0) == (5, False)
    known.seen(KEYS[:5], KEYS[5], 0)
    known.appeared(KEYS)
    assert known.leading_run(KEYS, 0) == (5, False)


@pytest.mark.parametrize("pauses", [[10.1], [4.0, 4.0, 4.0], [9.0, 9.0], [3600.0]])
def test_it_is_forgotten_in_time_however_often_it_is_asked_for(
    clock: list[float], pauses: list[float]
) -> None:
    known: KnownPages[str] = KnownPages(10.0)
    known.seen(KEYS, None, 0)
    for pause in pauses:
        clock[0] += pause
        known.leading_run(KEYS[:1], 0)
    assert known.leading_run(KEYS, 0) == (0, False)


def test_an_earlier_epoch_counts_no_more(clock: list[float]) -> None:
    known: KnownPages[str] = KnownPages(10.0)
    known.seen(KEYS, None, 3)
    assert known.leading_run(KEYS, 3) == (8, False)
    assert known.leading_run(KEYS, 4) == (0, False)
    known.seen(KEYS, None, 3)  # asked before the eviction, answered after it
    assert known.leading_run(KEYS, 4) == (0, False)
    known.seen(KEYS[:2], None, 4)
    assert known.leading_run(KEYS, 4) == (2, False)


def test_it_is_bounded(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_pages, "MAX_PAGES", 100)
    known: KnownPages[int] = KnownPages(10.0)
    for first in range(0, 10_000, 10):
        known.seen(range(first, first + 10), None, 0)
    assert sum(known.leading_run([n], 0)[0] for n in range(10_000)) <= 110
    assert known.leading_run(range(9_990, 10_000), 0) == (10, False)
