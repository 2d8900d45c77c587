"""One geometry of the cache: its store, the slots it may write, and how room is made."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Freed, Index, Record
from dualpath_storage import (
    BlockStore,
    Geometry,
    Header,
    Placement,
    ReadItem,
    ReadStatus,
    Slot,
    pieces_of,
)
from dualpath_storage.memory import aligned

logger = logging.getLogger(__name__)

_EVICT_ROUNDS = 32
_ROUNDS_BEFORE_RECLAIM = 4
_VERIFY_BYTES = 32 << 20
_ADOPT_EVERY_S = 5.0


class Pool:
    """Blocks of one geometry. Made by :meth:`KVCache.attach`; its methods are for the cache.

    Args:
        store: the segments.
        writer: whether this process may own segments and write blocks.
    """

    def __init__(self, store: BlockStore, *, writer: bool) -> None:
        self.store = store
        self.writer = writer
        self._adopted_at = float("-inf")
        self._writing: set[bytes] = set()
        self._lock = threading.Lock()

    @property
    def geometry(self) -> Geometry:
        """What the blocks are."""
        return self.store.geometry

    # -- room -------------------------------------------------------------------------------

    def make_room(
        self, count: int, generation: int, index: Index, evictor: Evictor, deadline: float
    ) -> list[Slot]:
        """Up to ``count`` slots: free ones, then of a new segment, then by eviction.

        Fewer when the capacity does not hold more, or the deadline is near.
        """
        slots = self.store.slots.take(count, generation)
        try:
            self._fill(slots, count, generation, index, evictor, deadline)
        except BaseException:
            self.store.slots.release([(slot, generation) for slot in slots], dirty=True)
            raise
        return slots

    def _fill(
        self,
        slots: list[Slot],
        count: int,
        generation: int,
        index: Index,
        evictor: Evictor,
        deadline: float,
    ) -> None:
        table = self.store.slots
        fruitless = 0
        for _ in range(_EVICT_ROUNDS):
            if len(slots) == count or time.monotonic() >= deadline:
                break
            if self.adopt(index, deadline) or self.store.add_segment(
                max(0.0, deadline - time.monotonic())
            ):
                slots += table.take(count - len(slots), generation)
                continue
            evictor.evict(index, (count - len(slots)) * self.geometry.slot_bytes, deadline)
            more = table.take(count - len(slots), generation)
            slots += more
            fruitless = 0 if more else fruitless + 1
            if fruitless >= _ROUNDS_BEFORE_RECLAIM and not evictor.reclaim(
                index, self.geometry, deadline
            ):
                break

    @contextmanager
    def claim(self, keys: Sequence[bytes]) -> Iterator[set[bytes]]:
        """The keys that no other thread of this process is writing now, for the caller to write."""
        with self._lock:
            mine = set(keys) - self._writing
            self._writing |= mine
        try:
            yield mine
        finally:
            with self._lock:
                self._writing -= mine

    def take_back(self, freed: Sequence[Freed]) -> None:
        """Note freed slots of own segments as reusable."""
        mine = self.geometry.id_bytes
        for row in freed:
            if row.geometry_id == mine:
                self.store.slots.free(row.slot, row.generation, dirty=True)

    # -- upkeep -----------------------------------------------------------------------------

    def maintain(self, index: Index, timeout_s: float) -> None:
        """Take back what others freed, blank what is not reused, forget segments that are gone.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        gone = self.store.unlinked_segments()
        if gone:
            logger.warning("%d segments of %s were removed", len(gone), self.store.directory)
            for number in gone:
                self.store.drop_segment(number, unlink=False)
            index.forget_freed(index.drop_segments(self.geometry, gone, timeout_s), timeout_s)
        self.store.forget_unlinked()
        freed = index.freed(self.geometry, self.store.slots.owned())
        self.take_back(freed)
        self.clean(index, timeout_s)
        index.forget_freed(freed, timeout_s)  # also those of slots that hold newer blocks by now

    def clean(self, index: Index, timeout_s: float) -> None:
        """Blank the headers of freed slots, so that a rescan agrees with the index."""
        dirty = self.store.slots.take_dirty()
        if not dirty:
            return
        done = set(self.store.invalidate([slot for slot, _ in dirty], time.monotonic() + timeout_s))
        index.forget_freed(
            [Freed(self.geometry.id_bytes, s, g) for s, g in dirty if s in done], timeout_s
        )
        self.store.slots.release([d for d in dirty if d[0] in done], dirty=False)
        self.store.slots.release([d for d in dirty if d[0] not in done], dirty=True)

    def give_up_empty(self, keep: int) -> int:
        """Remove owned segments that hold no block, all but ``keep``; how many went."""
        empty = self.store.slots.take_empty()
        for number in empty[keep:]:
            self.store.drop_segment(number, unlink=True)
        for number in empty[:keep]:
            self.store.own(number, {})
        return len(empty[keep:])

    # -- segments whose writer died ---------------------------------------------------------

    def adopt(self, index: Index, deadline: float, *, now: bool = False) -> int:
        """Own the segments whose writer is gone, at most every few seconds; how many.

        A whole block that its writer had not yet published is published; a torn one is blanked.

        Raises:
            IndexUnavailableError: the index cannot answer now; nothing is owned then.
        """
        if not self.writer or (time.monotonic() - self._adopted_at < _ADOPT_EVERY_S and not now):
            return 0
        self._adopted_at = time.monotonic()
        numbers = self.store.lock_orphans()
        if not numbers:
            return 0
        try:
            taken = self._recover(index, numbers, deadline)
        except BaseException:
            for number in numbers:
                self.store.unlock(number)
            raise
        for number in numbers:
            self.store.own(number, taken[number])
        return len(numbers)

    def _recover(
        self, index: Index, numbers: Sequence[int], deadline: float
    ) -> dict[int, dict[int, int]]:
        """Generations by slot of the blocks in these segments, index and store agreed."""
        taken: dict[int, dict[int, int]] = {number: {} for number in numbers}
        for entry in index.entries(self.geometry):
            place = entry.placement
            if place.segment in taken:
                taken[place.segment][place.slot] = place.generation
        freed = index.freed(self.geometry, numbers)
        released = {(f.slot, f.generation) for f in freed}
        stale: list[Slot] = []
        unpublished: list[tuple[Slot, Header]] = []
        for slot, header in self.store.scan(numbers, skip=lambda seg, n: n in taken[seg]):
            if (slot, header.generation) in released:
                stale.append(slot)
            else:
                unpublished.append((slot, header))
        for slot, header, published in self._publish_whole(index, unpublished, deadline):
            if published:
                taken[slot.segment][slot.slot] = header.generation
            else:
                stale.append(slot)
        self.store.invalidate(stale, deadline)
        index.forget_freed(freed, max(0.1, deadline - time.monotonic()))
        return taken

    def _publish_whole(
        self, index: Index, found: Sequence[tuple[Slot, Header]], deadline: float
    ) -> Iterator[tuple[Slot, Header, bool]]:
        size = self.geometry.block_bytes
        step = max(1, _VERIFY_BYTES // size)
        area = aligned(min(step, max(1, len(found))) * size)
        for first in range(0, len(found), step):
            part = found[first : first + step]
            items = [
                ReadItem(
                    header.key,
                    Placement(slot.segment, slot.slot, header.generation),
                    pieces_of(area[i * size : (i + 1) * size], self.geometry),
                )
                for i, (slot, header) in enumerate(part)
            ]
            statuses = self.store.read(items, deadline)
            whole = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
            records = [Record(part[i][1].key, part[i][1].parent, items[i].placement) for i in whole]
            results = index.publish(self.geometry, records, max(0.1, deadline - time.monotonic()))
            new = {i for i, published in zip(whole, results, strict=True) if published}
            for i, (slot, header) in enumerate(part):
                yield slot, header, i in new
