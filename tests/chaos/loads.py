"""What the prefill process told of its loads, and figures over windows of time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Load:
    """One load; times are monotonic seconds.

    Args:
        worker: who made it; each makes one at a time.
        outcome: ``ok``, or why not.
        wrong: numbers of its pages that did not hold what they should.
        stray: whether something was written to its pages after it had ended.
        brought: bytes until now, by who brought them: ``local``, or a host's address.
        counts: until now: fetches by how they ended, and what went wrong.
    """

    worker: int
    began: float
    ended: float
    outcome: str
    wrong: Sequence[int]
    stray: bool
    brought: dict[str, int]
    counts: dict[str, int]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Window:
    """Loads of one stretch of time."""

    loads: Sequence[Load]

    @property
    def median_s(self) -> float:
        """Of their seconds."""
        return statistics.median(load.seconds for load in self.loads)

    def percentile_s(self, share: float) -> float:
        """Of their seconds."""
        ordered = sorted(load.seconds for load in self.loads)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def longest_s(self) -> float:
        """Seconds of the slowest."""
        return max(load.seconds for load in self.loads)

    @property
    def outcomes(self) -> Counter[str]:
        """How many ended how."""
        return Counter(load.outcome for load in self.loads)

    @property
    def wrong(self) -> int:
        """Pages that did not hold what they should."""
        return sum(len(load.wrong) for load in self.loads)

    @property
    def brought(self) -> dict[str, int]:
        """Bytes by who brought them, between the ends of the first load and of the last."""
        first, last = self._ends()
        return {who: size - first.brought.get(who, 0) for who, size in last.brought.items()}

    @property
    def counts(self) -> Counter[str]:
        """How fetches ended, and what went wrong, between the same."""
        first, last = self._ends()
        return Counter(last.counts) - Counter(first.counts)

    def _ends(self) -> tuple[Load, Load]:
        ordered = sorted(self.loads, key=lambda load: load.ended)
        return ordered[0], ordered[-1]

    @property
    def remote_share(self) -> float:
        """Of the bytes, what other hosts brought."""
        brought = self.brought
        return 1.0 - brought["local"] / max(1, sum(brought.values()))

    def brings(self, hosts: Sequence[str], least: float) -> bool:
        """Whether each of some hosts brought at least such a share of the bytes."""
        brought = self.brought
        total = max(1, sum(brought.values()))
        return all(brought.get(host, 0) >= least * total for host in hosts)


def parse(line: dict[str, Any]) -> Load:
    """Of a line of the prefill process."""
    return Load(**line)


def between(loads: Sequence[Load], begin: float, end: float) -> Window:
    """Loads that began in a stretch of time."""
    return Window([load for load in loads if begin <= load.began < end])


def under_way(loads: Sequence[Load], begin: float, end: float) -> Window:
    """Loads of which any part lies in a stretch of time."""
    return Window([load for load in loads if load.began < end and load.ended > begin])
