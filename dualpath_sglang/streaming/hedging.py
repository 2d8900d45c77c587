"""Which Layer Blocks have landed, who was asked for the others, and who is asked next.

Pure state, no I/O, no clock. A block is asked of one side; when that fails or is late it is asked
of the other, and only when both have failed is it lost. What lands twice is counted once.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence

import numpy as np


class By(enum.IntEnum):
    """Who brings a block."""

    LOCAL = 0
    REMOTE = 1

    @property
    def other(self) -> By:
        """The other one."""
        return By(1 - self)


class Asked(enum.IntEnum):
    """How far a side has got with a block."""

    NOT = 0
    ASKED = 1
    FAILED = 2


class Progress:
    """Of one pool of one request.

    Args:
        blocks, layers: how many there are.
    """

    def __init__(self, blocks: int, layers: int) -> None:
        self._left = np.ones((blocks, layers), dtype=np.bool_)
        self._asked = np.zeros((2, blocks), dtype=np.uint8)

    def ask(self, by: By, blocks: Sequence[int]) -> None:
        """A side was asked for these."""
        self._asked[by, blocks] = Asked.ASKED

    def unask(self, by: By, blocks: Sequence[int]) -> None:
        """As if a side had never been asked for these: what it had, it has brought."""
        self._asked[by, blocks] = Asked.NOT

    def asked(self, by: By, block: int) -> Asked:
        """How far a side has got."""
        return Asked(int(self._asked[by, block]))

    def landed(self, begin: int, end: int, first_layer: int, end_layer: int) -> list[int]:
        """Layers ``[first_layer, end_layer)`` of blocks ``[begin, end)`` are there.

        Returns:
            By layer: how many of them were not before.
        """
        window = self._left[begin:end, first_layer:end_layer]
        counts: list[int] = window.sum(axis=0).tolist()
        window[:] = False
        return counts

    def waiting(self, by: By) -> list[int]:
        """Blocks that a side was asked for, that are not whole, and that only it is asked for."""
        mine = self._asked[by] == Asked.ASKED
        other = self._asked[by.other] == Asked.ASKED
        numbers: list[int] = np.flatnonzero(mine & ~other & self._left.any(axis=1)).tolist()
        return numbers

    def unfinished(self, blocks: Sequence[int]) -> list[int]:
        """Those of some blocks that are not whole."""
        numbers = np.asarray(blocks, dtype=np.intp)
        left: list[int] = numbers[self._left[numbers].any(axis=1)].tolist()
        return left

    def failed(self, by: By, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """A side does not bring these any more.

        Returns:
            Those that the other side can be asked for, and those that are lost. What the other
            side was asked for already is in neither.
        """
        blocks = self.unfinished(blocks)
        self._asked[by, blocks] = Asked.FAILED
        others = self._asked[by.other, blocks]
        pairs = list(zip(blocks, others.tolist(), strict=True))
        return (
            [block for block, other in pairs if other == Asked.NOT],
            [block for block, other in pairs if other == Asked.FAILED],
        )

    def first_layer(self, blocks: Sequence[int]) -> int:
        """The first layer that one of these, none of them whole, still needs."""
        return int(self._left[blocks].argmax(axis=1).min())

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Neighbours that need the same layers: ``[begin, end)`` and the first layer."""
        firsts = self._left[blocks].argmax(axis=1).tolist()
        rows = list(zip(blocks, firsts, strict=True))
        alike = itertools.groupby(enumerate(rows), lambda row: (row[1][0] - row[0], row[1][1]))
        for _, group in alike:
            run = [row for _, row in group]
            yield run[0][0], run[-1][0] + 1, run[0][1]
