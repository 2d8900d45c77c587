"""The bounded memory that reads go into."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath_storage.geometry import PAGE_BYTES

_UNIT_BYTES = 16 * PAGE_BYTES
_FREE, _USED = 0, 1


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
    """Hands out pieces of one area, first fit. For one thread.

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

    def take(self, size_bytes: int) -> Piece | None:
        """A piece of at least ``size_bytes``; None when there is none now."""
        units = -(-size_bytes // _UNIT_BYTES)
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
        assert self._state[span] == bytes([_USED]) * piece.units
        self._state[span] = bytes([_FREE]) * piece.units
        self.used_bytes -= piece.size_bytes
