"""How many tokens a text has, and how many of a prompt are cached: learned from answers."""

from __future__ import annotations

_FIRST = 0.3
"""Tokens a byte until an answer has told: between English (about 0.22) and code."""
_WEIGHT = 0.05
_LEAST, _MOST = 0.02, 4.0
_MOST_FACTOR = 100.0


class TokenEstimator:
    """Learns tokens a byte from the lengths that engines report."""

    def __init__(self) -> None:
        self.ratio = _FIRST
        self._learned = 0

    def estimate(self, size_bytes: int) -> int:
        """Tokens of a text of so many bytes, at least one."""
        return max(1, round(self.ratio * size_bytes))

    def learn(self, size_bytes: int, tokens: int) -> None:
        """A text of so many bytes had so many tokens."""
        if size_bytes < 16 or tokens < 1:
            return
        ratio = min(_MOST, max(_LEAST, tokens / size_bytes))
        self._learned += 1
        weight = max(_WEIGHT, 1 / self._learned)  # the first few are averaged
        self.ratio += weight * (ratio - self.ratio)


class HitShare:
    """How many times more tokens prompts have than prefill servers compute of them.

    Engines report how fast they compute; queues are counted in prompt tokens, most of which are
    cached where agents are served.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._computed = 0.0

    def learn(self, tokens: int, cached: int) -> None:
        """A prompt had so many tokens, and so many of them were cached."""
        self._tokens = (1 - _WEIGHT) * self._tokens + tokens
        self._computed = (1 - _WEIGHT) * self._computed + max(0, tokens - cached)

    @property
    def factor(self) -> float:
        """At least 1; 1 while nothing is known."""
        if not self._tokens:
            return 1.0
        return self._tokens / max(self._computed, self._tokens / _MOST_FACTOR)
