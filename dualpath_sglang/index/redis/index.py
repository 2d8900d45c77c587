"""The index in Redis; what its keys are is said in :mod:`dualpath_sglang.index.redis`.

Every change is a script, so that nobody sees half of one. Long batches are several scripts, sent
in one round trip, children before their parents.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from dualpath_sglang.index.base import (
    Entry,
    Freed,
    IndexDamagedError,
    IndexUnavailableError,
    Record,
    Report,
)
from dualpath_sglang.index.owners import Owner, Ownership
from dualpath_sglang.index.redis import walking
from dualpath_sglang.index.redis.access import WRITE_BATCH, Access, batches
from dualpath_sglang.index.redis.checking import first_fault
from dualpath_sglang.index.redis.client import Script
from dualpath_sglang.index.redis.cluster_state import ClusterState
from dualpath_sglang.index.redis.evicting import Eviction, freed_rows
from dualpath_sglang.index.redis.faults import UnansweredError
from dualpath_sglang.index.redis.ownership import RedisOwnership
from dualpath_storage import Geometry, Placement, Slot

PLACE = struct.Struct(">?IIQ")
_RECORD = struct.Struct(">32s32sIIQ")
_PAIR = struct.Struct(">32sQ")
_BLOCK = struct.Struct(">IIQ")
_SEGMENT = struct.Struct(">I")
_WANTED = struct.Struct(">16sI")

_LOOKUP = Script.of("begin", "find", "lookup")
_PREFIX = Script.of("begin", "find", "prefix")
_PRESENT = Script.of("begin", "present")
_PUBLISH = Script.of("begin", "units", "publish")
_TOUCH = Script.of("begin", "units", "touch")
_REMOVE = Script.of("begin", "names", "units", "remove")
_TAKE = Script.of("begin", "names", "units", "pages", "take")
_FREED = Script.of("begin", "freed")
_FORGET_FREED = Script.of("begin", "forget_freed")
_FORGET_SEGMENTS = Script.of("begin", "forget_segments")

_READ_TIMEOUT_S = 1.0
"""For what is asked in the background or on the way to a write."""
_DOUBT_S = 60.0
_MOST_DOUBTS = 512
_SEGMENT_ROUNDS = 4


class RedisIndex:
    """See :class:`dualpath_sglang.index.base.Index`. Thread-safe.

    Its snapshots are of single rows: :meth:`entries` has every row that stands all the while, and
    those that come or go meanwhile or not.

    Args:
        access: the keys of the store; closed with the index.
        lookup_timeout_s: how long a lookup may take, for each 1024 keys of it.
        watch: called in :meth:`upkeep`; raises when the store is not that store any more.
        owner: this process, as an owner of segments.
    """

    name = "redis"
    shared = True

    def __init__(
        self,
        access: Access,
        lookup_timeout_s: float = 0.005,
        watch: Callable[[], None] = lambda: None,
        *,
        owner: Owner,
    ) -> None:
        self._watch = watch
        self._owners = RedisOwnership(access, owner)
        self.ownership: Ownership = self._owners
        self._access = access
        self._lookup_timeout_s = lookup_timeout_s
        self._doubts: deque[tuple[float, Geometry, list[tuple[bytes, int]]]] = deque(
            maxlen=_MOST_DOUBTS
        )
        self._settling = threading.Lock()
        self.cluster = ClusterState(access)
        """What the nodes tell each other beside the index."""

    @property
    def token(self) -> bytes:
        """Names this index, from its beginning until Redis is emptied or it is begun anew."""
        return self._access.token

    def _now(self) -> int:
        """Microseconds for the scripts; 0 for Redis' own clock, so that nodes need not agree."""
        return 0

    # -- reading ----------------------------------------------------------------------------

    def lookup(self, geometry: Geometry, keys: Sequence[bytes]) -> list[Placement | None]:
        places: list[Placement | None] = []
        for reply, count in self._ask(_LOOKUP, geometry, keys):
            if isinstance(reply, bytes):
                places += [
                    Placement(*rest) if there else None for there, *rest in PLACE.iter_unpack(reply)
                ]
            else:
                places += [None] * count
        return places

    def prefix(self, geometry: Geometry, keys: Sequence[bytes]) -> int:
        run = 0
        for reply, count in self._ask(_PREFIX, geometry, keys):
            there = int(reply) if isinstance(reply, bytes) else 0
            run += there
            if there < count:
                break
        return run

    def _ask(
        self, script: Script, geometry: Geometry, keys: Sequence[bytes]
    ) -> list[tuple[bytes | int | None, int]]:
        parts = list(batches(len(keys)))
        if not parts:
            return []
        end = time.monotonic() + len(parts) * self._lookup_timeout_s
        name = geometry.id_bytes
        calls = [(name, b"".join(keys[part])) for part in parts]
        replies = self._access.run(geometry.unit, script, calls, end) or [None] * len(parts)
        return [(reply, p.stop - p.start) for reply, p in zip(replies, parts, strict=True)]

    def present(self, unit: bytes, key: bytes) -> bool:
        end = time.monotonic() + self._lookup_timeout_s
        return self._access.run(unit, _PRESENT, [(key,)], end) == [b"yes"]

    def entries(self, geometry: Geometry | None = None) -> Iterator[Entry]:
        return walking.entries(self._access, geometry, _READ_TIMEOUT_S)

    def counts(self) -> dict[bytes, int]:
        counts: dict[bytes, int] = {}
        for geometry_id, _, blocks, _ in walking.survey(self._access, _READ_TIMEOUT_S):
            counts[geometry_id] = counts.get(geometry_id, 0) + blocks
        return counts

    def segment_uses(self) -> dict[tuple[bytes, int], int]:
        uses: dict[tuple[bytes, int], int] = {}
        for geometry_id, segment, _, used in walking.survey(self._access, _READ_TIMEOUT_S):
            name = (geometry_id, segment)
            uses[name] = max(uses.get(name, 0), used)
        return uses

    def chain_segments(self, unit: bytes, key: bytes) -> set[tuple[bytes, int]]:
        return walking.chain_segments(self._access, unit, key, _READ_TIMEOUT_S)

    def freed(self, geometry: Geometry, segments: Iterable[int]) -> list[Freed]:
        packed = [_SEGMENT.pack(segment) for segment in segments]
        name = geometry.id_bytes
        calls = [(name, b"".join(packed[part])) for part in batches(len(packed), 64)]
        if not calls:
            return []
        end = time.monotonic() + _READ_TIMEOUT_S
        replies = self._access.run(geometry.unit, _FREED, calls, end) or []
        return [
            Freed(name, Slot(segment, slot), generation)
            for reply in replies
            for segment, slot, generation in _BLOCK.iter_unpack(reply)
        ]

    def wanted(self, geometry: Geometry) -> list[int]:
        end = time.monotonic() + _READ_TIMEOUT_S
        (names,) = self._access.call_store([("SMEMBERS", self._access.key("wanted"))], end)
        rows = sorted(_WANTED.unpack(name) for name in names)
        return [segment for geometry_id, segment in rows if geometry_id == geometry.id_bytes]

    # -- writing ----------------------------------------------------------------------------

    def claim(
        self, geometry: Geometry, keys: Sequence[bytes], owner: str, ttl_s: float
    ) -> list[bool]:
        return self.cluster.claim(geometry, keys, owner, ttl_s)

    def release(self, geometry: Geometry, keys: Sequence[bytes], owner: str) -> None:
        self.cluster.release(geometry, keys, owner)

    def publish(
        self, geometry: Geometry, records: Sequence[Record], timeout_s: float
    ) -> list[bool]:
        end = self._write_until(timeout_s)
        self._believe({(r.key, r.placement.generation) for r in records}, end)
        parts = list(batches(len(records), WRITE_BATCH))
        # The children go first, and are used earlier than the parents that follow.
        calls = [
            (
                geometry.id_bytes,
                self._now(),
                len(records) - part.stop,
                b"".join(
                    _RECORD.pack(r.key, r.parent, *_placed(r.placement)) for r in records[part]
                ),
            )
            for part in reversed(parts)
        ]
        if not calls:
            return []
        try:
            replies = self._access.run(geometry.unit, _PUBLISH, calls, end)
            if replies is None or 1 in replies:
                self._access.register(geometry.unit, geometry.id_bytes, end)
                replies = self._access.run(geometry.unit, _PUBLISH, calls, end)
        except UnansweredError:
            pairs = [(record.key, record.placement.generation) for record in records]
            self._doubts.append((time.monotonic(), geometry, pairs))
            raise
        if replies is None or 1 in replies:
            raise IndexDamagedError("The index in Redis was emptied meanwhile")
        return [flag == 0x31 for reply in reversed(replies) for flag in reply]

    def touch(self, unit: bytes, chain: Sequence[bytes], timeout_s: float) -> None:
        end = self._write_until(timeout_s)
        calls = [
            (self._now(), len(chain) - part.stop, b"".join(chain[part]))
            for part in reversed(list(batches(len(chain), WRITE_BATCH)))
        ]
        if calls:
            self._access.run(unit, _TOUCH, calls, end)

    def remove(
        self, geometry: Geometry, blocks: Sequence[tuple[bytes, int]], timeout_s: float
    ) -> list[Freed]:
        end = self._write_until(timeout_s)
        freed: list[Freed] = []
        for part in batches(len(blocks), 64 * WRITE_BATCH):
            freed += self._remove(geometry, blocks[part], end)
        return freed

    def _remove(
        self, geometry: Geometry, blocks: Sequence[tuple[bytes, int]], end: float
    ) -> list[Freed]:
        name = geometry.id_bytes
        calls = [
            (name, b"".join(_PAIR.pack(*pair) for pair in blocks[part]))
            for part in batches(len(blocks), WRITE_BATCH)
        ]
        replies = self._access.run(geometry.unit, _REMOVE, calls, end) or []
        return [
            Freed(name, Slot(segment, slot), generation)
            for reply in replies
            for segment, slot, generation in _BLOCK.iter_unpack(reply)
        ]

    def evict(
        self,
        size: dict[bytes, int],
        need_bytes: int,
        timeout_s: float,
        *,
        keep: tuple[bytes, bytes] | None = None,
        prefer: Collection[tuple[bytes, int]] | None = None,
        promised: Collection[bytes] = (),
        models: Collection[bytes] | None = None,
    ) -> list[Freed]:
        end = self._write_until(timeout_s)
        eviction = Eviction(self._access, size, keep, promised, models, end)
        freed = eviction.run(need_bytes, prefer)
        if not freed and prefer is not None and not eviction.refused:
            freed = eviction.run(need_bytes, None)
        return freed

    def evict_segment(
        self,
        geometry_id: bytes,
        segment: int,
        timeout_s: float,
        *,
        promised: Collection[bytes] = (),
    ) -> list[Freed]:
        end = self._write_until(timeout_s)
        unit = self._access.unit_of(geometry_id, end)
        freed: list[Freed] = []
        for turn in range(_SEGMENT_ROUNDS):  # again for what was published meanwhile
            doomed: list[bytes] = []
            if unit is not None:
                doomed = walking.descent(self._access, unit, geometry_id, segment, end)
                if any(unit + key in promised for key in doomed):
                    return freed
            if turn == 0:
                self._want(geometry_id, segment, end)
            if unit is None or not doomed:
                break
            calls = [(b"".join(doomed[part]),) for part in batches(len(doomed), WRITE_BATCH)]
            for reply in self._access.run(unit, _TAKE, calls, end) or []:
                freed += freed_rows(reply)
        return freed

    def _want(self, geometry_id: bytes, segment: int, end: float) -> None:
        name = _WANTED.pack(geometry_id, segment)
        self._access.call_store([("SADD", self._access.key("wanted"), name)], end)

    def forget_segments(
        self, geometry_id: bytes, segments: Iterable[int], timeout_s: float
    ) -> None:
        end = self._write_until(timeout_s)
        numbers = list(segments)
        if not numbers:
            return
        unit = self._access.unit_of(geometry_id, end)
        if unit is not None:
            packed = [_SEGMENT.pack(number) for number in numbers]
            calls = [(geometry_id, b"".join(packed[part])) for part in batches(len(packed), 64)]
            self._access.run(unit, _FORGET_SEGMENTS, calls, end)
        self.ownership.forget(geometry_id, numbers, end - time.monotonic())
        names = [_WANTED.pack(geometry_id, number) for number in numbers]
        self._access.call_store([("SREM", self._access.key("wanted"), *names)], end)

    def forget_freed(self, freed: Sequence[Freed], timeout_s: float) -> None:
        end = self._write_until(timeout_s)
        by_geometry: dict[bytes, list[bytes]] = {}
        for row in freed:
            packed = _BLOCK.pack(row.slot.segment, row.slot.slot, row.generation)
            by_geometry.setdefault(row.geometry_id, []).append(packed)
        for geometry_id, rows in by_geometry.items():
            unit = self._access.unit_of(geometry_id, end)
            if unit is not None:
                calls = [(geometry_id, b"".join(rows[part])) for part in batches(len(rows))]
                self._access.run(unit, _FORGET_FREED, calls, end)

    def drop_segments(
        self, geometry: Geometry, segments: Iterable[int], timeout_s: float
    ) -> list[Freed]:
        gone = set(segments)
        return self._free_all(geometry, lambda entry: entry.placement.segment in gone, timeout_s)

    def clear(self, geometry: Geometry, timeout_s: float) -> list[Freed]:
        return self._free_all(geometry, lambda _: True, timeout_s)

    def _free_all(
        self, geometry: Geometry, doomed: Callable[[Entry], bool], timeout_s: float
    ) -> list[Freed]:
        end = self._write_until(timeout_s)
        found = [
            (entry.key, entry.placement.generation)
            for entry in walking.entries(self._access, geometry, timeout_s)
            if doomed(entry)
        ]
        return self.remove(geometry, sorted(found), end - time.monotonic())

    def _write_until(self, timeout_s: float) -> float:
        if self._access.read_only:
            raise IndexUnavailableError("The index in Redis is open for reading only")
        return time.monotonic() + timeout_s

    # -- housekeeping -----------------------------------------------------------------------

    def filled(self, timeout_s: float = _READ_TIMEOUT_S) -> bool:
        """Whether somebody has filled this index from the store, as whoever finds it empty must."""
        return self._access.filled(time.monotonic() + timeout_s)

    def set_filled(self, timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Note that the index has all that is in the store."""
        self._access.set_filled(self._write_until(timeout_s))

    def start_over(self, timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Empty the index at once and for all: whoever has it open finds it damaged."""
        self._access.start_over(self._write_until(timeout_s))

    def report(self, node: str, fields: Report, ttl_s: float) -> None:
        self.cluster.report(node, fields, ttl_s)

    def nodes(self) -> dict[str, Report]:
        return self.cluster.nodes()

    def secret(self, offered: bytes = b"") -> bytes:
        return self.cluster.secret(offered)

    def upkeep(self) -> None:
        self._watch()
        self._access.check(time.monotonic() + _READ_TIMEOUT_S)
        self._owners.heard()
        if not self._access.read_only:
            self._settle_doubts()

    def _settle_doubts(self) -> None:
        """Take back publishes of which no answer came: their slots have been used otherwise.

        For a while, since Redis may carry one out only when it wakes up.
        """
        for _ in range(len(self._doubts)):
            with self._settling:
                if not self._doubts:
                    return
                since, geometry, pairs = self._doubts[0]
                self._remove(geometry, pairs, time.monotonic() + _READ_TIMEOUT_S)
                self._doubts.popleft()
                if time.monotonic() - since < _DOUBT_S:
                    self._doubts.append((since, geometry, pairs))

    def _believe(self, again: set[tuple[bytes, int]], end: float) -> None:
        """What is published once more may have been published the first time."""
        if not self._doubts:
            return
        if not self._settling.acquire(timeout=max(0.0, end - time.monotonic())):
            raise IndexUnavailableError("Redis is still asked to take back what it did not answer")
        try:
            kept = [row for row in self._doubts if again.isdisjoint(row[2])]
            self._doubts.clear()
            self._doubts.extend(kept)
        finally:
            self._settling.release()

    def check(self, timeout_s: float = 60.0) -> None:
        """Look at every row while nobody writes.

        Raises:
            IndexDamagedError: one is malformed or contradicts another.
        """
        fault = first_fault(self._access, timeout_s)
        if fault is not None:
            raise IndexDamagedError(f"The index in Redis has a {fault}")

    def close(self) -> None:
        self._access.client.close()


def _placed(place: Placement) -> tuple[int, int, int]:
    return place.segment, place.slot, place.generation
