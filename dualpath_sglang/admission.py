"""Whether a hit is worth its time: pure arithmetic, no clock.

A forward waits for the layers that it loads, and everything else on the scheduler waits with it.
What would take longer than the operator allows is cut down to what fits, or left to recompute.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Decision(enum.Enum):
    """What becomes of a hit."""

    FULL = "full"
    SHORTENED = "shortened"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class PageCost:
    """Bytes to read for a prefix.

    Args:
        page_bytes: for every page of it.
        end_bytes: once, for what is only needed at its end (sliding window, state).
    """

    page_bytes: int
    end_bytes: int = 0

    def of(self, pages: int) -> int:
        """Bytes of a prefix of ``pages`` pages."""
        return pages * self.page_bytes + self.end_bytes


def admit(
    lengths: Sequence[int], cost: PageCost, affordable_bytes: int | None
) -> tuple[Sequence[int], Decision]:
    """The prefix lengths that may be loaded.

    Args:
        lengths: restorable ones in pages, ascending.
        affordable_bytes: most bytes that are read in time; None when there is no limit.
    """
    if not lengths:
        return lengths, Decision.RECOMPUTE
    if affordable_bytes is None or cost.of(lengths[-1]) <= affordable_bytes:
        return lengths, Decision.FULL
    most = (affordable_bytes - cost.end_bytes) // cost.page_bytes
    if isinstance(lengths, range) and lengths.step == 1:
        kept: Sequence[int] = range(lengths.start, min(lengths.stop, max(most + 1, lengths.start)))
    else:
        kept = [length for length in lengths if length <= most]
    return kept, Decision.SHORTENED if kept else Decision.RECOMPUTE
