"""One geometry of the cache: its store, the slots it may write, and how room is made."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Freed, Index
from dualpath_sglang.known_pages import KnownPages
from dualpath_sglang.tenure import Tenure
from dualpath_storage import (
    NO_PARENT,
    BlockStore,
    Geometry,
    Slot,
)
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_EVICT_ROUNDS = 32
_ROUNDS_BEFORE_RECLAIM = 1
_KNOWN_S = 2.0
_CLEAN_BATCH = 256


@dataclass(slots=True)
class Claim:
    """Keys that one writer of this process writes, and no other.

    Args:
        mine: all of them.
        kept: those that stay claimed when the writer is done, until :meth:`Pool.end_claim`.
    """

    mine: set[bytes]
    kept: set[bytes] = field(default_factory=set)


class Pool:
    """Blocks of one geometry. Made by :meth:`KVCache.attach`; its methods are for the cache.

    Args:
        store: the segments.
        writer: whether this process may own segments and write blocks.
        trusted_s: see :class:`Tenure`.
    """

    def __init__(self, store: BlockStore, *, writer: bool, trusted_s: float = math.inf) -> None:
        self.store = store
        self.writer = writer
        self.known: KnownPages[bytes] = KnownPages(_KNOWN_S)
        self.tenure = Tenure(store, trusted_s)
        self._writing: set[bytes] = set()
        self._generations: set[int] = set()
        self._unsettled: set[int] = set()
        self._lock = threading.Lock()
        self._upkeep = threading.Lock()
        self._notices = Notices(logger)

    @property
    def geometry(self) -> Geometry:
        """What the blocks are."""
        return self.store.geometry

    def adopt(self, index: Index, deadline: float, *, now: bool = False) -> int:
        """Own the segments whose owner is gone, see :meth:`Tenure.adopt`."""
        return self.tenure.adopt(index, deadline, now=now) if self.writer else 0

    # -- room -------------------------------------------------------------------------------

    def make_room(
        self,
        count: int,
        generation: int,
        parent: bytes,
        index: Index,
        evictor: Evictor,
        deadline: float,
    ) -> list[Slot]:
        """Up to ``count`` slots: free ones, then of a new segment, then by eviction.

        Fewer when the capacity does not hold more, or the deadline is near. Nothing is evicted
        for blocks whose ``parent`` is known and absent, nor the parent itself: no hit could use
        them, and a chain longer than the capacity would push out its own head.
        """
        slots = self.store.slots.take(count, generation)
        try:
            self._fill(slots, count, generation, parent, index, evictor, deadline)
        except BaseException:
            self.store.slots.release([(slot, generation) for slot in slots], dirty=True)
            raise
        return slots

    def _fill(
        self,
        slots: list[Slot],
        count: int,
        generation: int,
        parent: bytes,
        index: Index,
        evictor: Evictor,
        deadline: float,
    ) -> None:
        table = self.store.slots
        keep = None if parent == NO_PARENT else (self.geometry.unit, parent)
        fruitless = 0
        for _ in range(_EVICT_ROUNDS):
            if len(slots) == count or time.monotonic() >= deadline:
                break
            if self.adopt(index, deadline) or self.tenure.add(index, deadline):
                slots += table.take(count - len(slots), generation)
                continue
            owned = table.owned()
            self.take_back(index.freed(self.geometry, owned))  # by other processes
            if more := table.take(count - len(slots), generation):
                slots += more
                continue
            if keep is not None and not index.present(*keep):
                break
            namespace = evictor.tight(self.geometry)
            if owned:  # else nothing that is evicted could be of use here
                need_bytes = (count - len(slots)) * self.geometry.slot_bytes
                mine = {(self.geometry.id_bytes, number) for number in owned}
                evictor.evict(
                    index, need_bytes, deadline, keep=keep, prefer=mine, namespace=namespace
                )
            more = table.take(count - len(slots), generation)
            slots += more
            fruitless = 0 if more else fruitless + 1
            if owned and fruitless < _ROUNDS_BEFORE_RECLAIM:
                continue
            if not evictor.reclaim(
                index, self.geometry, owned, deadline, keep=keep, namespace=namespace
            ):
                break

    def free_room(self, count: int, generation: int, deadline: float) -> list[Slot]:
        """Up to ``count`` slots that nobody has to make way for, while there is no index."""
        slots = self.store.slots.take(count, generation)
        self.tenure.made_alone()
        while len(slots) < count and self.store.files.add(max(0.0, deadline - time.monotonic())):
            slots += self.store.slots.take(count - len(slots), generation)
        return slots

    @contextmanager
    def claim(self, keys: Sequence[bytes], generation: int) -> Iterator[Claim]:
        """The keys that no other thread of this process is writing now, for the caller to write.

        Slots taken for ``generation`` count as being written until the end of the context.
        """
        with self._lock:
            claim = Claim(set(keys) - self._writing)
            self._writing |= claim.mine
            self._generations.add(generation)
        try:
            yield claim
        finally:
            with self._lock:
                self._writing -= claim.mine - claim.kept
                if not claim.kept:
                    self._generations.discard(generation)

    def end_claim(self, keys: Sequence[bytes], generation: int) -> None:
        """Give up the keys that a claim has kept."""
        with self._lock:
            self._writing -= set(keys)
            self._generations.discard(generation)

    def take_back(self, freed: Sequence[Freed]) -> None:
        """Note freed slots of own segments as reusable."""
        mine = self.geometry.id_bytes
        for row in freed:
            if row.geometry_id == mine:
                self.store.slots.free(row.slot, row.generation, dirty=True)

    def retire(self, segment: int) -> None:
        """Write no more to a segment, so that it can be given up."""
        self.store.slots.retire(segment)

    # -- upkeep -----------------------------------------------------------------------------

    def maintain(self, index: Index, timeout_s: float) -> list[Freed]:
        """Take back what others freed, blank what is not reused, forget segments that are gone.

        Returns:
            What it took out itself, of this pool and of others.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        with self._upkeep:
            self.tenure.keep_when_due(index)
            if self._unsettled and self._unsettled.isdisjoint(self._generations):
                self.reconcile(index, timeout_s)
            gone = self.store.files.drop_lost()
            if gone:
                logger.warning("%d segments of %s were lost", len(gone), self.store.directory)
                index.drop_segments(self.geometry, gone, timeout_s)
                index.forget_segments(self.geometry.id_bytes, gone, timeout_s)
            self.store.files.forget_unlinked()
            if self.store.slots.owned():
                self._describe()
            owned = set(self.store.slots.owned())
            wanted = owned.intersection(index.wanted(self.geometry))
            for number in wanted:
                self.store.slots.retire(number)
            freed = index.freed(self.geometry, owned)
            self.take_back(freed)
            failed = self._clean(timeout_s)
            # Also those of slots that hold newer blocks by now.
            index.forget_freed([row for row in freed if row.slot not in failed], timeout_s)
            self.give_up_empty(index, timeout_s, retired=True)
            taken_out: list[Freed] = []
            for number in wanted.intersection(self.store.slots.retired()):
                # Blocks that were being written when others asked for the segment.
                taken_out += index.evict_segment(self.geometry.id_bytes, number, timeout_s)
            self.take_back(taken_out)
            return taken_out

    def _describe(self) -> None:
        try:
            self.store.files.create_directory()
        except OSError as error:
            self._notices.warn("Cannot write in %s: %s", self.store.directory, error)

    def _clean(self, timeout_s: float) -> set[Slot]:
        """Blank the headers of freed slots, so that a rescan agrees; those it could not blank.

        A few at a time: a slot that is being cleaned is of no use to a writer.
        """
        deadline = time.monotonic() + timeout_s
        table = self.store.slots
        while dirty := table.begin_cleaning(_CLEAN_BATCH):
            done: set[Slot] = set()
            try:
                done.update(self.store.invalidate(dirty, deadline))
            finally:
                failed = set(dirty) - done
                table.end_cleaning(done, dirty=False)
                table.end_cleaning(failed, dirty=True)
            if failed:
                return table.dirty()
        return set()

    def reconcile(self, index: Index, timeout_s: float) -> None:
        """Agree with an index that was rebuilt while this process was writing.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        self.tenure.keep(index)
        with self._lock:
            writing = set(self._generations)
            # The rebuild may have found what these had written, and they not have published it.
            self._unsettled = set() if self._unsettled else set(writing)
        before = self.store.slots.taken()
        owned = set(self.store.slots.owned())
        known = {
            Slot(e.placement.segment, e.placement.slot): e
            for e in index.entries(self.geometry)
            if e.placement.segment in owned
        }
        taken = self.store.slots.taken()
        stale = [
            (e.key, e.placement.generation)
            for slot, e in known.items()
            if taken.get(slot) != e.placement.generation
        ]
        index.forget_freed(index.remove(self.geometry, stale, timeout_s), timeout_s)
        for slot, generation in before.items():
            indexed = slot in known and known[slot].placement.generation == generation
            if not indexed and generation not in writing:
                self.store.slots.free(slot, generation, dirty=True)

    def give_up_empty(
        self, index: Index, timeout_s: float, *, retired: bool = False, keep: int = 0
    ) -> int:
        """Remove owned segments that hold no block; how many went.

        Args:
            retired: only those that others want.
            keep: leave this many.

        Raises:
            IndexUnavailableError: the index cannot answer now; the files are gone all the same.
        """
        if not self.store.slots.has_empty(retired=retired, keep=keep):
            return 0
        self.tenure.keep(index)  # or it would be another's file that goes
        empty = self.store.slots.take_empty(retired=retired, keep=keep)
        for number in empty:
            self.store.files.drop(number, unlink=True)
        if empty:
            index.forget_segments(self.geometry.id_bytes, empty, timeout_s)
        return len(empty)
