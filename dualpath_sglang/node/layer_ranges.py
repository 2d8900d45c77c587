"""Which layers of a block are read, and sent, together: pure functions over counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_LEAST_IO_BYTES = 256 << 10


def read_ranges(layers: int, layer_bytes: int, first_io_bytes: int) -> list[tuple[int, int]]:
    """Layers ``[first, end)`` that are read with one I/O a block.

    Small ones first, so that the first layers are soon on their way. They double up to a quarter
    of the layers, or to what is worth an I/O of its own if that is more.

    Args:
        first_io_bytes: least bytes of the first.
    """
    step = min(layers, max(1, -(-first_io_bytes // layer_bytes)))
    most = max(step, -(-layers // 4), min(layers, -(-_LEAST_IO_BYTES // layer_bytes)))
    ends = [step]
    while ends[-1] < layers:
        step = min(2 * step, most)
        rest = layers - ends[-1] - step
        ends.append(layers if rest < step // 2 else ends[-1] + step)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def send_ranges(read: Sequence[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """Layers that are sent together, of those from ``first`` to ``end``: as they are read, but the
    first one alone."""
    cuts = {first, first + 1, end} | {cut for _, cut in read if first < cut < end}
    return list(itertools.pairwise(sorted(cuts)))
