"""Storing the blocks of a chain that are not there yet: room, bytes, then the index."""

from __future__ import annotations

import contextlib
import enum
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Index, IndexUnavailableError, Record
from dualpath_sglang.pool import Claim, Pool
from dualpath_sglang.unpublished import Unpublished
from dualpath_storage import NO_PARENT, Pieces, Placement, Slot, WriteItem, WriteStatus


class WriteResult(enum.Enum):
    """What became of a block that was to be written."""

    STORED = "stored"
    PENDING = "pending"
    """Stored while the index does not answer, and findable once it does again."""
    PRESENT = "present"
    DROPPED = "dropped"
    """Left out on purpose: no room, read-only, or the store does not answer now."""
    FAILED = "failed"


_REFUSED_S = 10.0
"""How long a store that turned read-only is left alone."""

_UNPUBLISHED = {
    WriteStatus.OK: WriteResult.PRESENT,  # another process was first
    WriteStatus.NO_SPACE: WriteResult.DROPPED,
    WriteStatus.READ_ONLY: WriteResult.DROPPED,
}


@dataclass(slots=True)
class Batch:
    """Blocks of one chain to be stored, and what has become of them so far.

    Args:
        keys: the parent of ``keys[i]`` is ``keys[i - 1]``.
        pieces: the memory of each.
        parent: the parent of ``keys[0]``, zeros when unknown.
        generation: names this write in headers and slots.
        deadline: monotonic seconds after which nothing is begun.
    """

    keys: Sequence[bytes]
    pieces: Sequence[Pieces]
    parent: bytes
    generation: int
    deadline: float
    results: list[WriteResult] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [WriteResult.DROPPED] * len(self.keys)

    def parent_of(self, i: int) -> bytes:
        """The parent of ``keys[i]``."""
        return self.keys[i - 1] if i else self.parent

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, and a little for what must be tried all the same."""
        return max(0.1, self.deadline - time.monotonic())


class Writer:
    """Writes batches of blocks into pools. Thread-safe.

    Args:
        evictor: makes room.
        durable: whether each batch is made durable before it can be found.
    """

    def __init__(self, evictor: Evictor, *, durable: bool) -> None:
        self._evictor = evictor
        self._durable = durable
        self.used = False
        """Whether anything was ever to be written."""
        self._late = Unpublished()
        self._refused_until = float("-inf")
        self._owner = secrets.token_hex(8)
        self._generation = 0
        self._lock = threading.Lock()

    def batch(
        self, keys: Sequence[bytes], pieces: Sequence[Pieces], parent: bytes | None, deadline: float
    ) -> Batch:
        """Blocks to be written, with a generation that no other write has."""
        with self._lock:
            self._generation = max(self._generation + 1, time.time_ns())
            return Batch(keys, pieces, parent or NO_PARENT, self._generation, deadline)

    def write(self, pool: Pool, index: Index | None, batch: Batch) -> None:
        """Store what is missing, and note in the batch what became of each block.

        Raises:
            IndexUnavailableError: the index did not answer; what is stored all the same is PENDING.
        """
        self.used = True
        with pool.claim(batch.keys, batch.generation) as claim:
            places: list[Placement | None] = [None] * len(batch.keys)
            away: IndexUnavailableError | None = None
            if index is not None:
                try:
                    places = index.lookup(pool.geometry, batch.keys)
                except IndexUnavailableError as error:
                    index, away = None, error
            missing: dict[bytes, int] = {}
            for i, key in enumerate(batch.keys):
                if places[i] is not None or key not in claim.mine or key in missing:
                    batch.results[i] = WriteResult.PRESENT
                else:
                    missing[key] = i
            if missing and index is not None:
                with self._claimed(pool, index, batch, missing):
                    if missing:
                        self._write(pool, index, batch, list(missing.values()), claim)
            elif missing:
                self._write(pool, None, batch, list(missing.values()), claim)
        if away is not None:
            raise away

    @contextmanager
    def _claimed(
        self, pool: Pool, index: Index, batch: Batch, missing: dict[bytes, int]
    ) -> Iterator[None]:
        """Leave out what another process is writing now, and keep it from writing the rest."""
        keys = list(missing)
        with contextlib.suppress(IndexUnavailableError):  # a claim only saves work
            flags = index.claim(pool.geometry, keys, self._owner, batch.left_s)
            for key, mine in zip(keys, flags, strict=True):
                if not mine:
                    batch.results[missing.pop(key)] = WriteResult.PRESENT
        try:
            yield
        finally:
            with contextlib.suppress(IndexUnavailableError):  # it expires
                index.release(pool.geometry, list(missing), self._owner)

    def publish_late(self, index: Index, timeout_s: float) -> None:
        """Publish what is PENDING.

        Raises:
            IndexUnavailableError: the index does not answer yet.
        """
        self._late.publish(index, timeout_s)

    @property
    def refused(self) -> bool:
        """Whether the store turned out read-only just now."""
        return time.monotonic() < self._refused_until

    @property
    def pending(self) -> int:
        """Blocks that are stored and wait for the index."""
        return self._late.count

    def _write(
        self,
        pool: Pool,
        index: Index | None,
        batch: Batch,
        missing: Sequence[int],
        claim: Claim,
    ) -> None:
        slots = self._room(pool, index, batch, missing)
        taken = [(slot, batch.generation) for slot in slots]
        away: IndexUnavailableError | None = None
        try:
            items = [
                WriteItem(
                    batch.keys[i],
                    batch.parent_of(i),
                    Placement(slot.segment, slot.slot, batch.generation),
                    batch.pieces[i],
                )
                for i, slot in zip(missing, slots, strict=False)  # there may be fewer slots
            ]
            written = self._write_items(pool, items, batch.deadline)
            records = [
                Record(item.key, item.parent, item.placement)
                for item, status in zip(items, written, strict=True)
                if status is WriteStatus.OK
            ]
            new: set[bytes] = set()
            if index is not None:
                try:
                    new = self._publish(pool, index, records, batch.left_s)
                except IndexUnavailableError as error:
                    index, away = None, error
            if index is None:
                claim.kept = self._late.add(pool, records, batch.generation)
        except BaseException:
            pool.store.slots.release(taken, dirty=True)
            raise
        for i, item, status in zip(missing, items, written, strict=False):
            if item.key in new or item.key in claim.kept:
                late = item.key in claim.kept
                batch.results[i] = WriteResult.PENDING if late else WriteResult.STORED
                continue
            batch.results[i] = _UNPUBLISHED.get(status, WriteResult.FAILED)
            if status is WriteStatus.OK and index is None:
                batch.results[i] = WriteResult.DROPPED
            if status is not WriteStatus.IO_ERROR:  # what the device refuses is not used again
                slot = Slot(item.placement.segment, item.placement.slot)
                pool.store.slots.free(slot, batch.generation, dirty=True)
        if away is not None:
            raise away

    def _room(
        self, pool: Pool, index: Index | None, batch: Batch, missing: Sequence[int]
    ) -> list[Slot]:
        if self.refused:
            return []
        if index is not None:
            parent = batch.parent_of(missing[0])
            with contextlib.suppress(IndexUnavailableError):
                return pool.make_room(
                    len(missing), batch.generation, parent, index, self._evictor, batch.deadline
                )
        count = min(len(missing), self._late.room)
        return pool.free_room(count, batch.generation, batch.deadline)

    def _write_items(
        self, pool: Pool, items: Sequence[WriteItem], deadline: float
    ) -> list[WriteStatus]:
        statuses = pool.store.write(items, deadline)
        if WriteStatus.READ_ONLY in statuses:  # nothing is evicted for what cannot be written
            self._refused_until = time.monotonic() + _REFUSED_S
        if self._durable:
            touched = {
                item.placement.segment
                for item, status in zip(items, statuses, strict=True)
                if status is WriteStatus.OK
            }
            if not pool.store.sync(sorted(touched), deadline):
                return [WriteStatus.TIMEOUT] * len(items)
        return statuses

    @staticmethod
    def _publish(
        pool: Pool, index: Index, records: Sequence[Record], timeout_s: float
    ) -> set[bytes]:
        if not records:
            return set()
        published = index.publish(pool.geometry, records, timeout_s)
        return {r.key for r, ok in zip(records, published, strict=True) if ok}
