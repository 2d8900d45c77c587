"""What is read in which order: pure functions over counts, no clock, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_YOUNGER_EVERY = 4


def layer_ranges(
    layers: int, layer_bytes: int, first_io_bytes: int, io_bytes: int, most_bytes: int
) -> list[tuple[int, int]]:
    """Cut ``layers`` into ranges ``[first, end)``, each of which is one I/O a block.

    The first ranges are small, so that layer 0 is there soon; they double until they reach the
    size that gives full bandwidth; the last ones halve again, because what is computed after the
    last byte has arrived is hidden behind nothing: 1, 2, 4, 8, ..., 8, 4, 2, 1 layers, with what
    is left over among the last. A range is never more than a quarter of the layers, unless that
    is less than the first I/O.

    Args:
        first_io_bytes: least bytes of the first I/O.
        io_bytes: bytes of an I/O that give full bandwidth.
        most_bytes: what a range may take at the most (one layer always may).
    """
    fit = max(1, most_bytes // layer_bytes)
    least = min(fit, layers, _parts(first_io_bytes, layer_bytes))
    most = max(least, min(fit, _parts(io_bytes, layer_bytes), -(-layers // 4)))
    ramp: list[int] = []
    size = least
    while size < most and 2 * (sum(ramp) + size) <= layers:
        ramp.append(size)
        size *= 2
    size = min(size, most)
    full, rest = divmod(layers - 2 * sum(ramp), size)
    ending = sorted([*ramp, rest] if rest else ramp, reverse=True)
    ends = list(itertools.accumulate([*ramp, *[size] * full, *ending]))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _parts(size: int, part: int) -> int:
    return max(1, -(-size // part))


@dataclass(frozen=True, slots=True)
class Job:
    """One pool of one request of a batch, as the order of reading sees it.

    Args:
        blocks: how many, numbered from 0.
        ranges: of :func:`layer_ranges`.
        gates: by layer of the pool: the model's layer that waits for it.
        step: blocks of one chunk, by range.
    """

    blocks: int
    ranges: Sequence[tuple[int, int]]
    gates: Sequence[int]
    step: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks ``[begin, end)`` of a job, layers ``[first_layer, end_layer)`` of each."""

    job: int
    begin: int
    end: int
    first_layer: int
    end_layer: int


def chunks(jobs: Sequence[Job]) -> Iterator[Chunk]:
    """Everything a batch needs, earliest layers of all blocks first.

    Ranges go by the first layer of the model that waits for them; within one such step the jobs
    take turns, a chunk each.
    """
    steps: dict[int, list[tuple[int, int]]] = {}
    for number, job in enumerate(jobs):
        for i, (first, end) in enumerate(job.ranges):
            steps.setdefault(min(job.gates[first:end]), []).append((number, i))
    for gate in sorted(steps):
        turns = [_range_chunks(jobs[number], number, i) for number, i in steps[gate]]
        while turns:
            left = []
            for turn in turns:
                chunk = next(turn, None)
                if chunk is not None:
                    yield chunk
                    left.append(turn)
            turns = left


def _range_chunks(job: Job, number: int, index: int) -> Iterator[Chunk]:
    first, end = job.ranges[index]
    step = job.step[index]
    for begin in range(0, job.blocks, step):
        yield Chunk(number, begin, min(begin + step, job.blocks), first, end)


class Turns:
    """Whose chunk is next among batches: the oldest one's, and every fourth time another's.

    The engine needs its batches in the order they came, but a small one must not wait until a
    huge one is through.
    """

    def __init__(self) -> None:
        self._count = 0
        self._other = 0

    def next(self, batches: int) -> int:
        """Index of a batch, oldest first, of ``batches`` that have something to read."""
        self._count += 1
        if batches == 1 or self._count % _YOUNGER_EVERY:
            return 0
        self._other += 1
        return 1 + self._other % (batches - 1)
