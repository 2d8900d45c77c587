"""The bounded memory that reads go into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dualpath_storage.geometry import PAGE_BYTES

_UNIT_BYTES = 16 * PAGE_BYTES
_FREE, _USED = 0, 1
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A page-aligned run of the staging memory, its holder's alone until it is given back."""

    memory: memoryview
    first: int
    units: int

    @property
    def size_bytes(self) -> int:
        """What it takes of the staging memory."""
        return self.units * _UNIT_BYTES


class Staging:
    """Hands out pieces of one area, first fit. Thread-safe.

    Args:
        area: page-aligned memory; what does not fill a unit of 64 KiB is left out.
    """

    def __init__(self, area: memoryview) -> None:
        units = len(area) // _UNIT_BYTES
        self._area = area
        self._state = bytearray([_FREE]) * units
        self.total_bytes = units * _UNIT_BYTES
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting = 0
        self._given = threading.Condition()

    def take(self, size_bytes: int) -> Piece | None:
        """A piece of at least ``size_bytes``; None when there is none now, or others wait."""
        with self._given:
            return None if self._waiting else self._take(-(-size_bytes // _UNIT_BYTES))

    def take_by(
        self, size_bytes: int, deadline: float, unwanted: Callable[[], bool]
    ) -> Piece | None:
        """The same as soon as there is one.

        Args:
            deadline: monotonic seconds; None when there is none by then, or ever.
            unwanted: whether nobody waits for it any more; looked at now and then.
        """
        units = -(-size_bytes // _UNIT_BYTES)
        if units * _UNIT_BYTES > self.total_bytes:
            return None
        with self._given:
            self._waiting += 1
            try:
                while (piece := self._take(units)) is None:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or unwanted():
                        return None
                    self._given.wait(min(left_s, _LOOK_EVERY_S))
                return piece
            finally:
                self._waiting -= 1

    def _take(self, units: int) -> Piece | None:
        first = self._state.find(bytes([_FREE]) * units)
        if first < 0:
            return None
        self._state[first : first + units] = bytes([_USED]) * units
        begin = first * _UNIT_BYTES
        piece = Piece(self._area[begin : begin + units * _UNIT_BYTES], first, units)
        self.used_bytes += piece.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return piece

    def give(self, piece: Piece) -> None:
        """Take a piece back: nothing reads or writes it any more."""
        span = slice(piece.first, piece.first + piece.units)
        with self._given:
            assert self._state[span] == bytes([_USED]) * piece.units
            self._state[span] = bytes([_FREE]) * piece.units
            self.used_bytes -= piece.size_bytes
            self._given.notify_all()
