"""How many tokens a text has, estimated from its bytes and corrected by what engines answer."""

from __future__ import annotations

_FIRST = 0.3
"""Tokens a byte until an answer has told: between English (about 0.22) and code."""
_WEIGHT = 0.05
_LEAST, _MOST = 0.02, 4.0


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
