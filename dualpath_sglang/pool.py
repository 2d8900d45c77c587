"""One geometry of the cache: its store, the slots it may write, and how room is made."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Freed, Index, IndexUnavailableError, Record
from dualpath_sglang.known_pages import KnownPages
from dualpath_storage import (
    NO_PARENT,
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
from dualpath_storage.notices import Notices
from dualpath_storage.segments import new_number

logger = logging.getLogger(__name__)

_EVICT_ROUNDS = 32
_ROUNDS_BEFORE_RECLAIM = 1
_VERIFY_BYTES = 32 << 20
_ADOPT_EVERY_S = 5.0
_KEEP_EVERY_S = 5.0
_KNOWN_S = 2.0
_WORD_S = 1.0
"""For a word about owners: others may wait for whoever has it to say."""
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
        trusted_s: how long a segment that nobody else was told of is certainly this process's.
    """

    def __init__(self, store: BlockStore, *, writer: bool, trusted_s: float = math.inf) -> None:
        self.store = store
        self.writer = writer
        self.known: KnownPages[bytes] = KnownPages(_KNOWN_S)
        self._adopted_at = self._kept_at = float("-inf")
        self._trusted_s = trusted_s
        self._sure_until = math.inf
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
            if self.adopt(index, deadline) or self._add_segment(index, deadline):
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

    def _add_segment(self, index: Index, deadline: float) -> bool:
        """Own one more segment, if there may be one.

        Raises:
            IndexUnavailableError: nobody can be told whose it is; there is none then.
        """
        if not self.store.files.may_add():
            return False
        name, number, ownership = self.geometry.id_bytes, new_number(), index.ownership
        began = time.monotonic()
        if not all(ownership.keep(name, [number], _WORD_S)):
            return False
        self._trust(began, ownership.trusted_s)
        if self.store.files.add(max(0.0, deadline - time.monotonic()), number):
            return True
        with contextlib.suppress(IndexUnavailableError):
            ownership.forget(name, [number], _WORD_S)
        return False

    def _trust(self, began: float, trusted_s: float) -> None:
        """A segment is noted as this process's by a call that began then, or was made then."""
        if not self.store.slots.owned():  # else the others were noted earlier
            self._sure_until = began + trusted_s

    @property
    def sure(self) -> bool:
        """Whether what this process owns is certainly still its own: else nothing is done to it."""
        return time.monotonic() < self._sure_until or not self.store.slots.owned()

    def free_room(self, count: int, generation: int, deadline: float) -> list[Slot]:
        """Up to ``count`` slots that nobody has to make way for, while there is no index."""
        slots = self.store.slots.take(count, generation)
        self._trust(time.monotonic(), self._trusted_s)
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
            if time.monotonic() - self._kept_at >= _KEEP_EVERY_S or not self.sure:
                self.keep_segments(index)
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

    def keep_segments(self, index: Index) -> None:
        """Renew the lease on own segments; those that others have taken over are theirs.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        owned = self.store.slots.owned()
        began = time.monotonic()
        kept = index.ownership.keep(self.geometry.id_bytes, owned, _WORD_S)
        lost = [number for number, ours in zip(owned, kept, strict=True) if not ours]
        for number in lost:
            self.store.files.drop(number, unlink=False)
        if lost:
            logger.warning(
                "%d segments of %s were taken over by another node", len(lost), self.store.directory
            )
        if set(self.store.slots.owned()) <= set(owned):  # a new one is no older than that
            self._sure_until = began + index.ownership.trusted_s
        self._kept_at = began

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
        self.keep_segments(index)
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
        self.keep_segments(index)  # or it would be another's file that goes
        empty = self.store.slots.take_empty(retired=retired, keep=keep)
        for number in empty:
            self.store.files.drop(number, unlink=True)
        if empty:
            index.forget_segments(self.geometry.id_bytes, empty, timeout_s)
        return len(empty)

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
        if now:
            there = set(self.store.files.numbers())
            index.ownership.forget_lost(self.geometry, there, _WORD_S)
        numbers = self._take_orphans(index)
        if not numbers:
            return 0
        try:
            taken, dirty = self._recover(index, numbers, deadline)
        except BaseException:
            for number in numbers:
                self.store.files.unlock(number)
            with contextlib.suppress(IndexUnavailableError):
                index.ownership.give_up(self.geometry.id_bytes, numbers, _WORD_S)
            raise
        for number in numbers:
            left = [slot.slot for slot in dirty if slot.segment == number]
            self.store.files.own(number, taken[number], left)
        return len(numbers)

    def _take_orphans(self, index: Index) -> list[int]:
        """Lock the segments whose owner is gone, as far as index and locks tell."""
        name, ownership = self.geometry.id_bytes, index.ownership
        strangers = self.store.files.strangers()
        may = ownership.may_take(name, strangers, _WORD_S)
        began = time.monotonic()
        locked = self.store.files.lock_orphans(
            number for number, free in zip(strangers, may, strict=True) if free
        )
        try:
            taken = ownership.take(name, locked, _WORD_S)
            self._trust(began, ownership.trusted_s)
        except BaseException:
            taken = [False] * len(locked)
            raise
        finally:
            for number, ours in zip(locked, taken, strict=True):
                if not ours:
                    self.store.files.unlock(number)
        return [number for number, ours in zip(locked, taken, strict=True) if ours]

    def _recover(
        self, index: Index, numbers: Sequence[int], deadline: float
    ) -> tuple[dict[int, dict[int, int]], set[Slot]]:
        """Make index and store agree about these segments.

        Returns:
            Generations of the blocks in them by segment and slot, and the free slots in which a
            valid header may still stand.
        """
        taken: dict[int, dict[int, int]] = {number: {} for number in numbers}
        for entry in index.entries(self.geometry):
            place = entry.placement
            if place.segment in taken:
                taken[place.segment][place.slot] = place.generation
        freed = index.freed(self.geometry, numbers)
        released = {(f.slot, f.generation) for f in freed}
        stale: list[Slot] = []
        unpublished: list[tuple[Slot, Header]] = []
        for slot, header in self.store.scan(
            numbers, skip=lambda seg, n: n in taken[seg], unread=stale
        ):
            if (slot, header.generation) in released:
                stale.append(slot)
            else:
                unpublished.append((slot, header))
        for slot, header, published in self._publish_whole(index, unpublished, deadline):
            if published:
                taken[slot.segment][slot.slot] = header.generation
            else:
                stale.append(slot)
        dirty = set(stale) - set(self.store.invalidate(stale, deadline))
        # What was freed after the entries were read is still in `taken`: upkeep takes it back.
        settled = [
            f
            for f in freed
            if taken[f.slot.segment].get(f.slot.slot) != f.generation and f.slot not in dirty
        ]
        index.forget_freed(settled, max(0.1, deadline - time.monotonic()))
        return taken, dirty

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
