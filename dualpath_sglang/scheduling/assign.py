"""Which of several nodes reads a block, so that all who want it ask the same one.

Not in the paper, which gives a whole hit to one node. Here the prefill and the decode server of a
request want the same blocks, each may begin at another one (what it has in memory differs), and
they do not talk to each other: so the block's key alone decides, not its place in the hit. The
price is that neighbours on disk are read by different nodes when a hit is split; see
docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

_KEY_BYTES = 8
_SPAN = 1 << (8 * _KEY_BYTES)


def assign(keys: Sequence[bytes], weights: Sequence[float]) -> list[int]:
    """The index in ``weights`` of who reads each block.

    The same on every machine for the same key and the same weights in the same order. Weights that
    change a little move few keys.

    Args:
        keys: of blocks, at least 8 bytes each and evenly spread: hashes.
        weights: parts of a hit, not negative, not all 0. Only their relation matters.

    Raises:
        ValueError: the weights are not so.
    """
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0:
        raise ValueError(f"{list(weights)} are not parts of a hit")
    if len(weights) == 1:
        return [0] * len(keys)
    # The same sums of the same floats in the same order are the same everywhere (IEEE 754).
    ends = [int(end / total * _SPAN) for end in itertools.accumulate(weights)]
    last = max(i for i, weight in enumerate(weights) if weight)
    return [
        min(last, bisect_right(ends, int.from_bytes(key[-_KEY_BYTES:], "little"))) for key in keys
    ]
