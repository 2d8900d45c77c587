"""When a load would be done: pure arithmetic on what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SAMPLE_S = 0.02
_MEMORY_S = 1.0
_DOUBLING_S = 30.0
_REGAIN_S = 0.5
_FADE_S = 60.0
_AHEAD = 0.9
"""Share of the time until the deadline by which a side must be expected to be through."""


def too_slow(began: float, now: float, deadline: float, *, done: int, total: int) -> bool:
    """Whether a side that goes on as it has begun would be through only just before a deadline.

    Args:
        began, now, deadline: seconds of any one clock.
        done: of ``total``; nothing is said of a side that has not brought anything yet.
    """
    return done > 0 and (now - began) * total > done * _AHEAD * (deadline - began)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a scheduler needs to know before it admits a load.

    Args:
        bytes_per_s: bandwidth with a full queue; None when nothing was measured yet.
        queued_bytes: accepted and not yet read.
        stalled: reads were given up and have not come back: loads cannot be trusted now.
    """

    bytes_per_s: float | None
    queued_bytes: int
    stalled: bool

    def read_s(self, size_bytes: int) -> float:
        """Seconds from now until ``size_bytes`` more are read: 0 when nothing is known."""
        if self.stalled:
            return math.inf
        if self.bytes_per_s is None:
            return 0.0
        return (self.queued_bytes + size_bytes) / self.bytes_per_s

    def affordable_bytes(self, budget_s: float) -> int | None:
        """Most bytes that would be read within ``budget_s`` seconds; None when nothing is known."""
        if self.stalled:
            return 0
        if self.bytes_per_s is None:
            return None
        return max(0, int(self.bytes_per_s * budget_s) - self.queued_bytes)


class RateMeter:
    """Bandwidth while the queue is full. Times are given, in seconds of any one clock.

    Reads of a small load say how long the device takes for one, not what it can do: they are left
    out. A rate that nothing confirms doubles every half minute, so that a slow moment, after which
    loads are refused and nothing is measured any more, is forgotten.

    Whoever deals reads out over several sides asks for :meth:`hope` instead: a side that had a slow
    moment gets so little that nothing is measured, and would not get more for minutes.
    """

    def __init__(self) -> None:
        self._rate: float | None = None
        self._at = 0.0
        self._best = 0.0
        self._best_at = 0.0
        self._last: float | None = None
        self._bytes = 0
        self._elapsed_s = 0.0
        self._sampled = -math.inf

    def note(self, size_bytes: int, now: float, *, full: bool) -> None:
        """A read ended at ``now``; ``full``: and until then the queue was."""
        if now - self._sampled > _MEMORY_S:  # what was left of a small load, long ago
            self._bytes, self._elapsed_s, self._sampled = 0, 0.0, now
        if full and self._last is not None:
            self._bytes += size_bytes
            self._elapsed_s += max(0.0, now - self._last)
        self._last = now if full else None
        if self._elapsed_s >= _SAMPLE_S:
            self._sample(self._bytes / self._elapsed_s, now)
            self._bytes, self._elapsed_s, self._sampled = 0, 0.0, now

    def pause(self) -> None:
        """Nothing was asked for: the time since the last read does not count."""
        self._last = None

    def set(self, bytes_per_s: float, now: float) -> None:
        """A rate that somebody else measured."""
        self._rate, self._at = bytes_per_s, now
        self._note_best(now)

    def add(self, bytes_per_s: float, now: float) -> None:
        """One more sample that somebody else took."""
        self._sample(bytes_per_s, now)

    def at_least(self, bytes_per_s: float, now: float) -> None:
        """Something small was read at such a rate: one below it, unless it is fresh, is wrong."""
        if self._rate is not None and now - self._at > _MEMORY_S and bytes_per_s > self._rate:
            self.set(bytes_per_s, now)

    def _sample(self, rate: float, now: float) -> None:
        if self._rate is None:
            self._rate = rate
        else:  # the older the last sample is, the less it says
            self._rate += (1 - math.exp((self._at - now) / _MEMORY_S)) * (rate - self._rate)
        self._at = now
        self._note_best(now)

    def _note_best(self, now: float) -> None:
        if self._rate is not None and self._rate >= self._faded(now):
            self._best, self._best_at = self._rate, now

    def _faded(self, now: float) -> float:
        """The best rate; it counts for less and less."""
        return self._best * math.pow(2.0, (self._best_at - now) / _FADE_S)

    def rate(self, now: float) -> float | None:
        """Bytes a second, None when nothing was measured yet."""
        if self._rate is None:
            return None
        doublings = max(0.0, now - self._at - _DOUBLING_S) / _DOUBLING_S
        return self._rate * math.pow(2.0, min(doublings, 40.0))

    def hope(self, now: float) -> float | None:
        """The rate, or the one of better times once a low one is no longer confirmed.

        It rises to that within seconds, so that the side is tried with a little first.
        """
        rate = self.rate(now)
        if rate is None:
            return None
        doublings = max(0.0, now - self._at - _MEMORY_S) / _REGAIN_S
        return max(rate, min(self._faded(now), rate * math.pow(2.0, min(doublings, 40.0))))
