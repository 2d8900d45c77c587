"""Free slots of the segments that this process owns. Pure bookkeeping, no I/O."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

_CLEAN = 1
"""Free, and no valid header stands in it."""
_DIRTY = 2
"""Free, but the header of the block that used to be there still checks: reused first."""
_TAKEN = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a segment."""

    segment: int
    slot: int


class _Segment:
    __slots__ = ("free", "generations", "state")

    def __init__(self, slots: int) -> None:
        self.state = bytearray(slots)  # all taken until freed
        self.generations = array("Q", bytes(8 * slots))
        self.free = 0


class SlotTable:
    """Which slots are free, and the generation that each taken slot holds. Thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._lock = threading.Lock()

    def add(self, segment: int, slots: int, taken: dict[int, int]) -> None:
        """Own a segment whose ``taken`` slots hold these generations and the rest are clean."""
        with self._lock:
            table = _Segment(slots)
            for slot in range(slots):
                if slot in taken:
                    table.generations[slot] = taken[slot]
                else:
                    table.state[slot] = _CLEAN
                    table.free += 1
            self._segments[segment] = table

    def drop(self, segment: int) -> None:
        """Own a segment no more."""
        with self._lock:
            self._segments.pop(segment, None)

    def take(self, count: int, generation: int) -> list[Slot]:
        """Up to ``count`` free slots, neighbours where possible, marked with ``generation``."""
        taken: list[Slot] = []
        with self._lock:
            for wanted in (_DIRTY, _CLEAN):
                for number, table in self._segments.items():
                    if len(taken) == count:
                        return taken
                    if table.free:
                        self._take_from(number, table, wanted, count, generation, taken)
        return taken

    @staticmethod
    def _take_from(
        number: int, table: _Segment, state: int, count: int, generation: int, taken: list[Slot]
    ) -> None:
        slot = table.state.find(state)
        while slot >= 0 and len(taken) < count:
            table.state[slot] = _TAKEN
            table.generations[slot] = generation
            table.free -= 1
            taken.append(Slot(number, slot))
            slot = table.state.find(state, slot + 1)

    def free(self, slot: Slot, generation: int, *, dirty: bool) -> bool:
        """Give a slot back if it still holds ``generation``; says whether it did."""
        with self._lock:
            table = self._segments.get(slot.segment)
            if table is None or not 0 <= slot.slot < len(table.state):
                return False
            if table.state[slot.slot] != _TAKEN or table.generations[slot.slot] != generation:
                return False
            table.state[slot.slot] = _DIRTY if dirty else _CLEAN
            table.free += 1
            return True

    def take_dirty(self) -> list[tuple[Slot, int]]:
        """Take every dirty slot, with the generation it held, so that it can be cleaned."""
        found: list[tuple[Slot, int]] = []
        with self._lock:
            for number, table in self._segments.items():
                slot = table.state.find(_DIRTY) if table.free else -1
                while slot >= 0:
                    table.state[slot] = _TAKEN
                    table.free -= 1
                    found.append((Slot(number, slot), table.generations[slot]))
                    slot = table.state.find(_DIRTY, slot + 1)
        return found

    def owned(self) -> list[int]:
        """Numbers of the owned segments."""
        with self._lock:
            return list(self._segments)

    def owns(self, segment: int) -> bool:
        """Whether this process owns the segment."""
        return segment in self._segments

    def free_count(self) -> int:
        """Free slots over all owned segments."""
        with self._lock:
            return sum(table.free for table in self._segments.values())

    def take_empty(self) -> list[int]:
        """Drop and return the segments in which every slot is free."""
        with self._lock:
            empty = [n for n, t in self._segments.items() if t.free == len(t.state)]
            for number in empty:
                del self._segments[number]
            return empty

    def release(self, slots: Iterable[tuple[Slot, int]], *, dirty: bool) -> None:
        """Give many slots back."""
        for slot, generation in slots:
            self.free(slot, generation, dirty=dirty)
