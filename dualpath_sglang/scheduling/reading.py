"""Which node of a PE/DE pair reads a hit from storage, and how long that takes.

The rules are those of ``paths``, which servers apply to blocks; here they are applied to tokens,
and say weights, because a router knows no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dualpath_sglang.scheduling.paths import Side, proportions, shorter_queue
from dualpath_sglang.scheduling.rules import ReadPath

Shares = tuple[tuple[str, float], ...]


def usable_rate(rates: Mapping[str, float], node: str) -> float | None:
    """The rate measured for a node; None when there is none, or it says nothing."""
    rate = rates.get(node)
    return rate if rate is not None and 0 < rate < math.inf else None


def read_shares(pe: Side, de: Side, tokens: int, path: ReadPath, turn: int = 0) -> Shares:
    """Who reads: (node, weight > 0), the PE's first; the weights sum to 1.

    A node that cannot read (``Side.usable``) is given nothing where the path leaves a choice; when
    neither can, the PE's node is named, whose server then finds out what is to be had. A tie goes
    to the PE's node, which needs no other one.

    Args:
        pe: node of the PE, its queue and rate in tokens.
        de: node of the DE; may be the same one, which then reads everything.
        tokens: to be read. Of nothing the split is that of one token: to who is free first. A part
            of less than half a token is left to the other.
        path: the rule.
        turn: with ``alternate``, 0 for the PE's node and 1 for the DE's.
    """
    if pe.name == de.name or path == "pe":
        return ((pe.name, 1.0),)
    if path == "de" or (path == "alternate" and turn % 2):
        return ((de.name, 1.0),)
    if path == "alternate":
        return ((pe.name, 1.0),)
    if not (pe.usable or de.usable):
        return ((pe.name, 1.0),)
    if path == "shorter_queue":
        return ((shorter_queue((pe, de)).name, 1.0),)
    size = max(1, tokens)
    first, second = proportions((pe, de), size)
    if second * size < 0.5:
        return ((pe.name, 1.0),)
    if first * size < 0.5:
        return ((de.name, 1.0),)
    return ((pe.name, first), (de.name, 1.0 - first))


def tokens_of(shares: Shares, tokens: int) -> list[tuple[str, int]]:
    """How many of the tokens each node reads; together all of them."""
    parts, left = [], tokens
    for node, weight in shares[:-1]:
        part = min(left, round(weight * tokens))
        parts.append((node, part))
        left -= part
    parts.append((shares[-1][0], left))
    return parts


def read_seconds(sides: Sequence[Side], shares: Shares, tokens: int, rate: float) -> float:
    """Until the tokens are read that way, behind what waits there; 0 when there are none.

    Args:
        sides: the nodes that the shares name, at least.
        shares: who reads.
        tokens: to be read.
        rate: tokens a second of a node whose own rate is not known.
    """
    if not tokens:
        return 0.0
    parts = dict(tokens_of(shares, tokens))
    return max(
        (side.queue_bytes + parts[side.name]) / (side.rate or rate)
        for side in sides
        if parts.get(side.name)
    )
