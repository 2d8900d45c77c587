"""Which side reads a prefix hit from storage: the PE, a DE, or several at once.

The paper (arXiv 2602.21548) gives a whole request to the node with the shorter read queue, and
names splitting one request over both as future work. Both rules are here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Side:
    """A node that can read blocks from storage for the PE: the PE's own, or that of a DE.

    Args:
        name: given back in the answer, unique among the sides of one request.
        queue_bytes: its read queue, bytes accepted and not yet read.
        rate: bytes a second that arrive at the PE, so of a DE no more than the compute network
            brings; None when not measured yet. A side without a positive, finite rate cannot be
            used.
        delay_s: seconds that a read over this side takes on top, whatever its size: what the
            DE path adds. A side whose delay is not finite cannot be used.
    """

    name: str
    queue_bytes: int
    rate: float | None
    delay_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether anything may be read over it."""
        return (self.rate is None or 0 < self.rate < math.inf) and math.isfinite(self.delay_s)

    def finish_s(self, size_bytes: int) -> float:
        """Seconds from now until ``size_bytes`` more are read.

        Infinite when the side cannot be used, ``delay_s`` alone when its rate is not known.
        """
        if not self.usable:
            return math.inf
        if self.rate is None:
            return self.delay_s
        return self.delay_s + (self.queue_bytes + size_bytes) / self.rate


@dataclass(frozen=True, slots=True)
class _Lane(Side):
    """A side that has a rate, measured or not."""

    rate: float


@dataclass(frozen=True, slots=True)
class Share:
    """A run of a request's blocks, and who reads it.

    Args:
        side: its name.
        first: index of the first block.
        count: blocks, at least one.
    """

    side: str
    first: int
    count: int


def shorter_queue(sides: Sequence[Side]) -> Side:
    """The side that reads the whole request, by the paper's rule: the shorter read queue.

    The paper counts queues in tokens; for one model bytes order them alike. Rates and delays do
    not matter. It does not say who wins a tie: here the side given first, which is to be the PE,
    because what it reads needs no other node.

    Raises:
        ValueError: no side can be used.
    """
    return min(_usable(sides), key=lambda side: side.queue_bytes)


def split(
    sides: Sequence[Side], blocks: int, block_bytes: int, floor_bytes: int = 0
) -> list[Share]:
    """Spread one request over any number of sides so that all of them finish together.

    Not in the paper. Every block goes to the side that would finish it first (in a tie the one
    given first), so no other choice of whole blocks is done earlier. Rates that are not known are
    taken to be the mean of the known ones; when none is known all are taken to be equal, and
    delays, which cannot be weighed then, are left out.

    Args:
        sides: the PE first. They get their runs in this order: what a later side fails to bring
            leaves a shorter prefix, not one with a hole.
        blocks: how many to read.
        block_bytes: size of each.
        floor_bytes: a smaller request is not split, all of it goes to the side that would finish
            it first.

    Returns:
        Contiguous runs that cover the request in block order. Sides that get nothing are left out;
        the list is empty when there is nothing to read.

    Raises:
        ValueError: no side can be used though there is something to read, or a negative number of
            blocks, or blocks of no size.
    """
    if blocks < 0 or block_bytes <= 0:
        raise ValueError(f"cannot split {blocks} blocks of {block_bytes} bytes")
    if not blocks:
        return []
    lanes = _lanes(_usable(sides))
    size = blocks * block_bytes
    if size < floor_bytes:
        soonest = min(lanes, key=lambda lane: lane.finish_s(size))
        return [Share(soonest.name, 0, blocks)]
    shares, first = [], 0
    for lane, count in zip(lanes, _counts(lanes, blocks, block_bytes), strict=True):
        if count:
            shares.append(Share(lane.name, first, count))
            first += count
    return shares


def proportions(sides: Sequence[Side], size_bytes: int) -> list[float]:
    """What part of a request each side would read in ``split``, could blocks be divided.

    For who knows no blocks. Queues and size may be in another unit than bytes if rates are too.

    Args:
        sides: in any order.
        size_bytes: of the request, more than 0.

    Returns:
        A part for each side, those that cannot be used 0; together 1.

    Raises:
        ValueError: no side can be used, or nothing is to be read.
    """
    if size_bytes <= 0:
        raise ValueError(f"cannot split {size_bytes} bytes")
    lanes = _lanes(_usable(sides))
    level = _level_s(lanes, size_bytes)
    amounts = [max(0.0, (level - lane.finish_s(0)) * lane.rate) for lane in lanes]
    total = sum(amounts)
    if not 0 < total < math.inf:
        # Queues so long that the size is lost in rounding.
        soonest = min(range(len(lanes)), key=lambda i: lanes[i].finish_s(size_bytes))
        amounts, total = [float(i == soonest) for i in range(len(lanes))], 1.0
    usable = iter(amounts)
    return [next(usable) / total if side.usable else 0.0 for side in sides]


def _usable(sides: Sequence[Side]) -> list[Side]:
    usable = [side for side in sides if side.usable]
    if not usable:
        raise ValueError(f"none of {len(sides)} sides can read")
    return usable


def _lanes(sides: Sequence[Side]) -> list[_Lane]:
    known = [side.rate for side in sides if side.rate is not None]
    if not known:
        return [_Lane(side.name, side.queue_bytes, 1.0) for side in sides]
    mean = fmean(known)
    return [
        _Lane(side.name, side.queue_bytes, mean if side.rate is None else side.rate, side.delay_s)
        for side in sides
    ]


def _counts(lanes: Sequence[_Lane], blocks: int, block_bytes: int) -> list[int]:
    """Blocks of each side: the ``blocks`` that are finished first, of all that they could read.

    Filling to the common level says how many in one step. It is rounded down by more than a block,
    so that the last few, and with them all rounding, are decided by comparing finish times.
    """
    level = _level_s(lanes, blocks * block_bytes)
    counts, left = [], blocks
    for lane in lanes:
        amount = (level - lane.finish_s(0)) * lane.rate / block_bytes
        count = int(min(left, max(0.0, amount - 1)))
        counts.append(count)
        left -= count
    soonest = [
        (lane.finish_s((count + 1) * block_bytes), i)
        for i, (lane, count) in enumerate(zip(lanes, counts, strict=True))
    ]
    heapq.heapify(soonest)
    for _ in range(left):
        i = soonest[0][1]
        counts[i] += 1
        heapq.heapreplace(soonest, (lanes[i].finish_s((counts[i] + 1) * block_bytes), i))
    return counts


def _level_s(lanes: Sequence[_Lane], size_bytes: int) -> float:
    """When all sides that get a part of ``size_bytes`` would finish, could bytes be divided.

    That is the t with sum of (t - free_i) x rate_i = size over all sides i that are free before t.
    """
    level, rates, filled = math.inf, 0.0, float(size_bytes)
    for free_s, rate in sorted((lane.finish_s(0), lane.rate) for lane in lanes):
        if free_s >= level:
            break
        rates += rate
        filled += free_s * rate
        level = filled / rates
    return level
