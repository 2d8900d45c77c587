"""Compares the index with the store, block by block and both ways. Safe beside running servers.

| what is found | what it is |
|---|---|
| an indexed block that does not read back whole | damage: a miss until it is written again |
| a valid header that the index does not know | freed, in writing, or left by a killed writer |

The second kind is only counted: nothing that the index does not know is ever served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dualpath_sglang.index import Entry, Index, IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import (
    BlockStore,
    Geometry,
    Header,
    Placement,
    ReadItem,
    ReadStatus,
    pieces_of,
)
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned
from dualpath_storage.paths import geometry_directories

_BATCH_BYTES = 32 << 20
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Damage:
    """An indexed block that does not read back whole.

    Args:
        geometry: None when the block's directory is gone or cannot be read.
        reason: a :class:`~dualpath_storage.ReadStatus` value, or ``geometry``.
        layers: the Layer Blocks whose checksum is wrong, when that is the reason.
    """

    geometry_id: str
    geometry: Geometry | None
    key: bytes
    placement: Placement
    reason: str
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class Tally:
    """Blocks that an audit has seen so far.

    ``blocks`` are to be checked; ``late`` ones could not be read in time; ``vanished`` ones were
    evicted or replaced before they could be; ``unindexed`` ones stand in the store alone.
    """

    blocks: int = 0
    checked_blocks: int = 0
    checked_bytes: int = 0
    damaged_blocks: int = 0
    late_blocks: int = 0
    vanished_blocks: int = 0
    unindexed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Examination:
    """What stands in the slot of one indexed block.

    Args:
        header: None when it does not check.
        layers: whether each Layer Block passes its checksum; empty without a right header.
    """

    status: ReadStatus
    header: Header | None
    layers: tuple[bool, ...]


class Audit:
    """One pass over a store.

    Args:
        cache: the store, open read-only unless :meth:`repair` is wanted.
        timeout_s: deadline of each batch of reads.

    Without an index every block that stands in the store is checked, and ``index_problem`` says
    why there is none. ``unreadable`` are directories that hold no readable geometry.
    """

    def __init__(self, cache: KVCache, timeout_s: float = 60.0) -> None:
        self.tally = Tally()
        self.index_problem: str | None = None
        self._cache = cache
        self._timeout_s = timeout_s
        self._index: Index | None = None
        try:
            self._index = cache.index
        except IndexUnavailableError as error:
            self.index_problem = str(error)
        known = {geometry.id for geometry in cache.geometries()}
        self.unreadable = [d for d in geometry_directories(cache.root) if d.name not in known]

    def run(self, progress: Callable[[], None] = lambda: None) -> Iterator[Damage]:
        """Check everything; yields what is damaged as it is found.

        Args:
            progress: called after each block, when ``tally`` has changed.

        Raises:
            IndexUnavailableError: the index went away meanwhile.
        """
        rows = self._rows()
        for store in self._cache.stores():
            yield from self._check_store(store, rows.pop(store.geometry.id, []), progress)
        unreadable = {directory.name for directory in self.unreadable}
        for geometry_id, lost in rows.items():
            reason = "geometry" if geometry_id in unreadable else ReadStatus.MISSING.value
            for entry in lost:
                self.tally.damaged_blocks += 1
                yield Damage(geometry_id, None, entry.key, entry.placement, reason)

    def repair(self, damages: Iterable[Damage]) -> int:
        """Take damaged blocks out of the index, each only if it is still the same one.

        Returns:
            Blocks taken out.

        Raises:
            IndexUnavailableError: the index cannot be written now.
        """
        index = self._cache.index
        timeout_s = self._cache.options.write_timeout_s
        freed = 0
        lost: set[tuple[bytes, int]] = set()
        for damage in damages:
            place = damage.placement
            if damage.geometry is None:
                lost.add((bytes.fromhex(damage.geometry_id), place.segment))
            else:
                block = (damage.key, place.generation)
                freed += len(index.remove(damage.geometry, [block], timeout_s))
        for geometry_id, segment in lost:
            freed += len(index.evict_segment(geometry_id, segment, timeout_s))
        return freed

    def _rows(self) -> dict[str, list[Entry]]:
        """Index entries by geometry, in one pass: a long one would keep old pages of the index."""
        rows: dict[str, list[Entry]] = {}
        if self._index is not None:
            for entry in self._index.entries():
                rows.setdefault(entry.geometry_id.hex(), []).append(entry)
                self.tally.blocks += 1
        return rows

    def _check_store(
        self, store: BlockStore, entries: list[Entry], progress: Callable[[], None]
    ) -> Iterator[Damage]:
        geometry = store.geometry
        if self._index is None:
            entries = [_entry(geometry, header, place) for place, header in _headers(store)]
            self.tally.blocks += len(entries)
        entries.sort(key=lambda e: (e.placement.segment, e.placement.slot))
        yield from self._check(store, entries, progress)
        if self._index is None:
            return
        seen = {(e.placement.segment, e.placement.slot) for e in entries}
        fresh: list[Entry] = []
        for place, header in _headers(store, seen):
            if self._index.lookup(geometry, [header.key])[0] == place:
                fresh.append(_entry(geometry, header, place))  # published since the first look
            else:
                self.tally.unindexed_blocks += 1
        self.tally.blocks += len(fresh)
        yield from self._check(store, fresh, progress)
        progress()

    def _check(
        self, store: BlockStore, entries: Sequence[Entry], progress: Callable[[], None]
    ) -> Iterator[Damage]:
        for item, status in _read(store, entries, self._timeout_s):
            if status is ReadStatus.OK:
                self.tally.checked_blocks += 1
            elif (found := self._confirm(store, item, status)) is not None:
                yield found
            self.tally.checked_bytes += store.geometry.block_bytes
            progress()

    def _confirm(self, store: BlockStore, item: ReadItem, status: ReadStatus) -> Damage | None:
        """Look again: a server may have moved, evicted or replaced the block meanwhile."""
        geometry = store.geometry
        for _ in range(_ATTEMPTS):
            place: Placement | None = item.placement
            if self._index is not None:
                place = self._index.lookup(geometry, [item.key])[0]
            if place is None:
                break
            moved = place != item.placement
            if moved or status.damaged:
                item = ReadItem(item.key, place, item.pieces)
                status = store.read([item], self._deadline())[0]
            if status is ReadStatus.OK:
                self.tally.checked_blocks += 1
                return None
            if status is ReadStatus.TIMEOUT:
                self.tally.late_blocks += 1
                return None
            if not moved:
                self.tally.damaged_blocks += 1
                layers = _bad_layers(store, item, self._deadline(), status)
                return Damage(geometry.id, geometry, item.key, place, status.value, layers)
        self.tally.vanished_blocks += 1
        return None

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s


def examine(store: BlockStore, entry: Entry, timeout_s: float = 60.0) -> Examination:
    """Read one indexed block, layer by layer where it is not whole."""
    geometry, place = store.geometry, entry.placement
    area = aligned(geometry.block_bytes)
    item = ReadItem(entry.key, place, pieces_of(area[: geometry.block_bytes], geometry))
    deadline = time.monotonic() + timeout_s
    status = store.read([item], deadline)[0]
    found = store.scan([place.segment], skip=lambda _, slot: slot != place.slot)
    header = next((header for _, header in found), None)
    if status not in (ReadStatus.OK, ReadStatus.CHECKSUM):
        return Examination(status, header, ())
    bad = _bad_layers(store, item, deadline, status)
    return Examination(status, header, tuple(i not in bad for i in range(geometry.layers)))


def _read(
    store: BlockStore, entries: Sequence[Entry], timeout_s: float
) -> Iterator[tuple[ReadItem, ReadStatus]]:
    """Read blocks batch by batch; each item's memory is valid until the next is asked for."""
    block, stride = store.geometry.block_bytes, align_up(store.geometry.block_bytes)
    step = min(max(1, _BATCH_BYTES // stride), max(1, len(entries)))
    area = aligned(step * stride)
    pieces = [
        pieces_of(area[i : i + block], store.geometry) for i in range(0, step * stride, stride)
    ]
    for first in range(0, len(entries), step):
        part = entries[first : first + step]
        items = [ReadItem(e.key, e.placement, pieces[i]) for i, e in enumerate(part)]
        statuses = store.read(items, time.monotonic() + timeout_s)
        yield from zip(items, statuses, strict=True)


def _bad_layers(
    store: BlockStore, item: ReadItem, deadline: float, status: ReadStatus
) -> tuple[int, ...]:
    if status is not ReadStatus.CHECKSUM:
        return ()
    layers = range(store.geometry.layers)
    return tuple(
        i for i in layers if store.read([item], deadline, (i, i + 1))[0] is ReadStatus.CHECKSUM
    )


def _headers(
    store: BlockStore, known: set[tuple[int, int]] | None = None
) -> Iterator[tuple[Placement, Header]]:
    """Valid headers and their places, without the slots that are known."""
    known = known or set()
    for slot, header in store.scan(skip=lambda segment, slot: (segment, slot) in known):
        yield Placement(slot.segment, slot.slot, header.generation), header


def _entry(geometry: Geometry, header: Header, place: Placement) -> Entry:
    return Entry(geometry.unit, header.key, geometry.id_bytes, place, 0, header.parent)
