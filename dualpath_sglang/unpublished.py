"""Blocks that are whole in the store while the index does not answer: published once it does.

A process that dies first loses nothing: whoever takes over its segments publishes what is whole
in them (:meth:`Pool.adopt`), and an index that is made anew from the store has them anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath_sglang.index import Index, Record
from dualpath_sglang.pool import Pool
from dualpath_storage import Slot

MAX_BLOCKS = 1 << 14


@dataclass(frozen=True, slots=True)
class _Late:
    pool: Pool
    records: Sequence[Record]
    generation: int


class Unpublished:
    """Thread-safe.

    Args:
        most: blocks that may wait; what does not fit is not written at all.
    """

    def __init__(self, most: int = MAX_BLOCKS) -> None:
        self._most = most
        self._count = 0
        self._late: deque[_Late] = deque()
        self._lock = threading.Lock()
        self._publishing = threading.Lock()

    @property
    def count(self) -> int:
        """Blocks that wait."""
        return self._count

    @property
    def room(self) -> int:
        """Blocks that may be added."""
        return self._most - self._count

    def add(self, pool: Pool, records: Sequence[Record], generation: int) -> set[bytes]:
        """Have whole blocks published later, as many as there is room for.

        Returns:
            Their keys, which stay claimed in ``pool`` until then.
        """
        with self._lock:
            records = records[: self.room]
            if records:
                self._late.append(_Late(pool, records, generation))
                self._count += len(records)
        return {record.key for record in records}

    def publish(self, index: Index, timeout_s: float) -> None:
        """Publish what waits.

        Raises:
            IndexUnavailableError: the index does not answer yet; the rest waits on.
        """
        with self._publishing:
            while self._late:
                late = self._late[0]
                self._publish(index, late, timeout_s)
                with self._lock:
                    self._late.popleft()
                    self._count -= len(late.records)
                late.pool.end_claim([record.key for record in late.records], late.generation)

    @staticmethod
    def _publish(index: Index, late: _Late, timeout_s: float) -> None:
        pool = late.pool
        owned = set(pool.store.slots.owned())
        records = [r for r in late.records if r.placement.segment in owned]
        if not records:  # their files are gone
            return
        results = index.publish(pool.geometry, records, timeout_s)
        refused = [r for r, new in zip(records, results, strict=True) if not new]
        # An index that was made anew may have found these very blocks; others were first otherwise.
        places = index.lookup(pool.geometry, [r.key for r in refused]) if refused else []
        for record, place in zip(refused, places, strict=True):
            if place != record.placement:
                slot = Slot(record.placement.segment, record.placement.slot)
                pool.store.slots.free(slot, late.generation, dirty=True)
