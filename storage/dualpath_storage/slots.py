"""Free slots of the segments that this process owns. Pure bookkeeping, no I/O."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

_TAKEN = 0
_CLEAN = 1
"""Free, and no valid header stands in it."""
_DIRTY = 2
"""Free, but the header of the block that used to be there may still check: reused first."""
_CLEANING = 3
"""Its header is being blanked: nobody may take it, and to free it again changes nothing."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a segment."""

    segment: int
    slot: int


class _Segment:
    __slots__ = ("free", "generations", "retired", "state")

    def __init__(self, slots: int) -> None:
        self.state = bytearray([_CLEAN]) * slots
        self.generations = array("Q", bytes(8 * slots))
        self.free = slots
        self.retired = False


class SlotTable:
    """Which slots are free, and the generation that each taken slot holds. Thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._lock = threading.Lock()

    def add(
        self, segment: int, slots: int, taken: dict[int, int], dirty: Iterable[int] = ()
    ) -> None:
        """Own a segment.

        Args:
            taken: generations by slot; slots past the end of the segment are left out.
            dirty: free slots in which a valid header may stand; the rest is clean.
        """
        table = _Segment(slots)
        for slot in dirty:
            if slot < slots:
                table.state[slot] = _DIRTY
        for slot, generation in taken.items():
            if slot < slots:
                table.state[slot] = _TAKEN
                table.generations[slot] = generation
                table.free -= 1
        with self._lock:
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
                    if table.free and not table.retired:
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

    def begin_cleaning(self, most: int) -> list[Slot]:
        """Set up to ``most`` dirty slots aside until they are cleaned."""
        found: list[Slot] = []
        with self._lock:
            for number, table in self._segments.items():
                slot = table.state.find(_DIRTY) if table.free else -1
                while slot >= 0 and len(found) < most:
                    table.state[slot] = _CLEANING
                    table.free -= 1
                    found.append(Slot(number, slot))
                    slot = table.state.find(_DIRTY, slot + 1)
        return found

    def end_cleaning(self, slots: Iterable[Slot], *, dirty: bool) -> None:
        """Make slots of :meth:`begin_cleaning` free again, clean unless they are still dirty."""
        with self._lock:
            for slot in slots:
                table = self._segments.get(slot.segment)
                if table is not None and table.state[slot.slot] == _CLEANING:
                    table.state[slot.slot] = _DIRTY if dirty else _CLEAN
                    table.free += 1

    def owned(self) -> list[int]:
        """Numbers of the owned segments."""
        with self._lock:
            return list(self._segments)

    def taken(self) -> dict[Slot, int]:
        """Every taken slot and the generation it holds."""
        with self._lock:
            return {
                Slot(number, slot): table.generations[slot]
                for number, table in self._segments.items()
                for slot, state in enumerate(table.state)
                if state == _TAKEN
            }

    def dirty(self) -> set[Slot]:
        """Every free slot in which a valid header may stand."""
        with self._lock:
            return {
                Slot(number, slot)
                for number, table in self._segments.items()
                for slot, state in enumerate(table.state)
                if state == _DIRTY
            }

    def free_count(self) -> int:
        """Free slots over all owned segments."""
        with self._lock:
            return sum(table.free for table in self._segments.values())

    def retire(self, segment: int) -> None:
        """Take nothing from a segment any more, so that it empties."""
        with self._lock:
            if segment in self._segments:
                self._segments[segment].retired = True

    def retired(self) -> list[int]:
        """Numbers of the segments that are to empty."""
        with self._lock:
            return [n for n, t in self._segments.items() if t.retired]

    def has_empty(self, *, retired: bool, keep: int = 0) -> bool:
        """Whether :meth:`take_empty` would return any."""
        with self._lock:
            return len(self._empty(retired)) > keep

    def _empty(self, retired: bool) -> list[int]:
        return [
            number
            for number, table in self._segments.items()
            if table.free == len(table.state) and (table.retired or not retired)
        ]

    def take_empty(self, *, retired: bool, keep: int = 0) -> list[int]:
        """Drop and return segments in which every slot is free.

        Args:
            retired: only those that were to empty.
            keep: leave this many.
        """
        with self._lock:
            empty = self._empty(retired)[keep:]
            for number in empty:
                del self._segments[number]
            return empty

    def release(self, slots: Iterable[tuple[Slot, int]], *, dirty: bool) -> None:
        """Give many slots back."""
        for slot, generation in slots:
            self.free(slot, generation, dirty=dirty)
