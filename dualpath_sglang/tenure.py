"""Which segments of a pool are this process's: how it comes by them, and keeps them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence

from dualpath_sglang.index import Index, IndexUnavailableError, Record
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
from dualpath_storage.segments import new_number

logger = logging.getLogger(__name__)

_VERIFY_BYTES = 32 << 20
_ADOPT_EVERY_S = 5.0
_KEEP_EVERY_S = 5.0
_WORD_S = 1.0
"""For a word about owners: others may wait for whoever has it to say."""


class Tenure:
    """The segments of one pool that this process owns. Thread-safe as far as the store is.

    Where an index notes owners, what was noted is certain for a while, and must be noted again by
    then.

    Args:
        trusted_s: how long a segment is certainly this process's after it was noted, or made
            without a word to anybody.
    """

    def __init__(self, store: BlockStore, trusted_s: float) -> None:
        self._store = store
        self._trusted_s = trusted_s
        self._sure_until = math.inf
        self._adopted_at = self._kept_at = float("-inf")

    @property
    def _geometry(self) -> Geometry:
        return self._store.geometry

    # -- keeping ----------------------------------------------------------------------------

    @property
    def sure(self) -> bool:
        """Whether what this process owns is certainly still its own: else nothing is done to it."""
        return time.monotonic() < self._sure_until or not self._store.slots.owned()

    def keep_when_due(self, index: Index) -> None:
        """:meth:`keep` every few seconds, and whenever there is doubt."""
        if time.monotonic() - self._kept_at >= _KEEP_EVERY_S or not self.sure:
            self.keep(index)

    def keep(self, index: Index) -> None:
        """Renew the lease on own segments; those that others have taken over are theirs.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        owned = self._store.slots.owned()
        began = time.monotonic()
        kept = index.ownership.keep(self._geometry.id_bytes, owned, _WORD_S)
        lost = [number for number, ours in zip(owned, kept, strict=True) if not ours]
        for number in lost:
            self._store.files.drop(number, unlink=False)
        if lost:
            where = self._store.directory
            logger.warning("%d segments of %s were taken over by another node", len(lost), where)
        if set(self._store.slots.owned()) <= set(owned):  # a new one is no older than that
            self._sure_until = began + self._trusted_s
        self._kept_at = began

    def _trust(self, began: float) -> None:
        """A segment is noted as this process's by a call that began then, or was made then."""
        if not self._store.slots.owned():  # else the others were noted earlier
            self._sure_until = began + self._trusted_s

    # -- new ones ---------------------------------------------------------------------------

    def add(self, index: Index, deadline: float) -> bool:
        """Own one more segment, if there may be one.

        Raises:
            IndexUnavailableError: nobody can be told whose it is; there is none then.
        """
        if not self._store.files.may_add():
            return False
        name, number, ownership = self._geometry.id_bytes, new_number(), index.ownership
        began = time.monotonic()
        if not all(ownership.keep(name, [number], _WORD_S)):
            return False
        self._trust(began)
        if self._store.files.add(max(0.0, deadline - time.monotonic()), number):
            return True
        with contextlib.suppress(IndexUnavailableError):
            ownership.forget(name, [number], _WORD_S)
        return False

    def made_alone(self) -> None:
        """Segments may be made now of which nobody can be told."""
        self._trust(time.monotonic())

    # -- segments whose writer died ---------------------------------------------------------

    def adopt(self, index: Index, deadline: float, *, now: bool = False) -> int:
        """Own the segments whose writer is gone, at most every few seconds; how many.

        A whole block that its writer had not yet published is published; a torn one is blanked.

        Raises:
            IndexUnavailableError: the index cannot answer now; nothing is owned then.
        """
        if time.monotonic() - self._adopted_at < _ADOPT_EVERY_S and not now:
            return 0
        self._adopted_at = time.monotonic()
        if now:
            there = set(self._store.files.numbers())
            index.ownership.forget_lost(self._geometry, there, _WORD_S)
        numbers = self._take_orphans(index)
        if not numbers:
            return 0
        try:
            taken, dirty = self._recover(index, numbers, deadline)
        except BaseException:
            for number in numbers:
                self._store.files.unlock(number)
            with contextlib.suppress(IndexUnavailableError):
                index.ownership.give_up(self._geometry.id_bytes, numbers, _WORD_S)
            raise
        for number in numbers:
            left = [slot.slot for slot in dirty if slot.segment == number]
            self._store.files.own(number, taken[number], left)
        return len(numbers)

    def _take_orphans(self, index: Index) -> list[int]:
        """Lock the segments whose owner is gone, as far as index and locks tell."""
        name, ownership = self._geometry.id_bytes, index.ownership
        strangers = self._store.files.strangers()
        may = ownership.may_take(name, strangers, _WORD_S)
        began = time.monotonic()
        locked = self._store.files.lock_orphans(
            number for number, free in zip(strangers, may, strict=True) if free
        )
        try:
            taken = ownership.take(name, locked, _WORD_S)
            self._trust(began)
        except BaseException:
            taken = [False] * len(locked)
            raise
        finally:
            for number, ours in zip(locked, taken, strict=True):
                if not ours:
                    self._store.files.unlock(number)
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
        for entry in index.entries(self._geometry):
            place = entry.placement
            if place.segment in taken:
                taken[place.segment][place.slot] = place.generation
        freed = index.freed(self._geometry, numbers)
        released = {(f.slot, f.generation) for f in freed}
        stale: list[Slot] = []
        unpublished: list[tuple[Slot, Header]] = []
        for slot, header in self._store.scan(
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
        dirty = set(stale) - set(self._store.invalidate(stale, deadline))
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
        size = self._geometry.block_bytes
        step = max(1, _VERIFY_BYTES // size)
        area = aligned(min(step, max(1, len(found))) * size)
        for first in range(0, len(found), step):
            part = found[first : first + step]
            items = [
                ReadItem(
                    header.key,
                    Placement(slot.segment, slot.slot, header.generation),
                    pieces_of(area[i * size : (i + 1) * size], self._geometry),
                )
                for i, (slot, header) in enumerate(part)
            ]
            statuses = self._store.read(items, deadline)
            whole = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
            records = [Record(part[i][1].key, part[i][1].parent, items[i].placement) for i in whole]
            results = index.publish(self._geometry, records, max(0.1, deadline - time.monotonic()))
            new = {i for i, published in zip(whole, results, strict=True) if published}
            for i, (slot, header) in enumerate(part):
                yield slot, header, i in new
