"""The index as one LMDB file beside the store: many processes, one machine, no server.

What its rows are is said in :mod:`dualpath_sglang.index.rows`.

A reader sees one snapshot. Writers take turns by a file lock with a deadline, which the kernel
releases when its holder dies, so that LMDB's own lock, which has no deadline, is never waited for.
Commits are not synced: a killed process loses nothing, and after a crash of the machine (another
boot id, not closed cleanly) the file is thrown away and rebuilt from the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from dualpath_sglang.index.base import (
    Entry,
    Freed,
    IndexDamagedError,
    IndexUnavailableError,
    Record,
    Report,
)
from dualpath_sglang.index.environment import Environment
from dualpath_sglang.index.leaves import Leaves, newest_use
from dualpath_sglang.index.owners import FileLocks, Ownership
from dualpath_sglang.index.passes import most_passes
from dualpath_sglang.index.rows import (
    BLOCK,
    FORMAT,
    FREED,
    GENERATION,
    TABLES,
    UNIT,
    WANTED,
    first_fault,
    freed_row,
    lru_name,
    table_rows,
)
from dualpath_storage import NO_PARENT, Geometry, Placement, Slot

_BATCH = 4096  # rows changed in one transaction at the most
_GUARD_EVERY = 1024  # rows read between two looks at the file


def boot_id() -> bytes:
    """Names this boot of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


class EmbeddedIndex:
    """See :class:`dualpath_sglang.index.base.Index`.

    Args:
        path: the file; created when missing.
        read_only: never write; the file must exist.
        timeout_s: how long to wait for a turn to write what a new file begins with.

    Raises:
        IndexDamagedError: the file is no usable index.
        IndexUnavailableError: it cannot be opened now.
    """

    name = "embedded"
    shared = False

    def __init__(self, path: Path, *, read_only: bool = False, timeout_s: float = 5.0) -> None:
        self.path = path
        self.ownership: Ownership = FileLocks()
        self._read_only = read_only
        self._env = Environment.share(path, TABLES, read_only, timeout_s)
        tables = self._env.tables
        self._blocks, self._units, self._lru = tables["blocks"], tables["units"], tables["lru"]
        self._children, self._freed, self._meta = (
            tables["children"],
            tables["freed"],
            tables["meta"],
        )
        try:
            self._check_meta(timeout_s)
        except BaseException:
            self._env.release()
            raise

    def _check_meta(self, timeout_s: float) -> None:
        with self._env.read() as txn:
            version, boot, clean = (
                txn.get(n, db=self._meta) for n in (b"format", b"boot", b"clean")
            )
        if version is None and not self._read_only:
            with self._env.write(timeout_s) as txn:
                txn.put(b"format", FORMAT, db=self._meta)
                txn.put(b"boot", boot_id(), db=self._meta)
            return
        if version != FORMAT:
            raise IndexDamagedError(f"{self.path} has a format that this version cannot read")
        if boot != boot_id():
            if clean != b"1":
                raise IndexDamagedError(f"{self.path} was in use when the machine went down")
            if not self._read_only:
                with self._write(timeout_s) as txn:
                    txn.put(b"boot", boot_id(), db=self._meta)

    @contextlib.contextmanager
    def _write(self, timeout_s: float) -> Iterator[lmdb.Transaction]:
        if self._read_only:  # a writing one in this process may have opened the file
            raise IndexUnavailableError(f"{self.path} is open for reading only")
        with self._env.write(timeout_s) as txn:
            was_clean = txn.get(b"clean", db=self._meta) == b"1"
            if was_clean:
                txn.put(b"clean", b"0", db=self._meta)
            yield txn
        if was_clean:
            # Before later commits reuse pages of the last durable one: a crash of the machine
            # must never leave a file that is half of each and calls itself clean.
            self._env.sync()

    # -- reading ----------------------------------------------------------------------------

    def lookup(self, geometry: Geometry, keys: Sequence[bytes]) -> list[Placement | None]:
        unit, suffix, unpack = geometry.unit, geometry.id_bytes, BLOCK.unpack
        with self._env.read() as txn:
            rows = [txn.get(unit + key + suffix, db=self._blocks) for key in keys]
            return [None if row is None else Placement(*unpack(row)) for row in rows]

    def present(self, unit: bytes, key: bytes) -> bool:
        with self._env.read() as txn:
            return txn.get(unit + key, db=self._units) is not None

    def prefix(self, geometry: Geometry, keys: Sequence[bytes]) -> int:
        unit, suffix, blocks = geometry.unit, geometry.id_bytes, self._blocks
        with self._env.read() as txn:
            get = txn.get
            for i, key in enumerate(keys):
                if get(unit + key + suffix, db=blocks) is None:
                    return i
        return len(keys)

    def entries(self, geometry: Geometry | None = None) -> Iterator[Entry]:
        with self._env.read() as txn:
            for i, (name, value) in enumerate(table_rows(txn, self._blocks)):
                if i % _GUARD_EVERY == 0:
                    self._env.guard()
                unit, key, geometry_id = name[:8], name[8:40], name[40:]
                if geometry is not None and geometry_id != geometry.id_bytes:
                    continue
                used, parent = UNIT.unpack(
                    txn.get(unit + key, UNIT.pack(0, NO_PARENT), db=self._units)
                )
                placement = Placement(*BLOCK.unpack(value))
                yield Entry(unit, key, geometry_id, placement, used, parent)

    def counts(self) -> dict[bytes, int]:
        counts: dict[bytes, int] = {}
        with self._env.read() as txn:
            for name, _ in table_rows(txn, self._blocks):
                counts[name[40:]] = counts.get(name[40:], 0) + 1
        return counts

    def freed(self, geometry: Geometry, segments: Iterable[int]) -> list[Freed]:
        found: list[Freed] = []
        with self._env.read() as txn:
            if txn.stat(self._freed)["entries"] == 0:
                return []
            for segment in segments:
                prefix = FREED.pack(geometry.id_bytes, segment, 0)[:20]
                found += [freed_row(*row) for row in table_rows(txn, self._freed, prefix)]
        return found

    # -- writing ----------------------------------------------------------------------------

    def claim(
        self, geometry: Geometry, keys: Sequence[bytes], owner: str, ttl_s: float
    ) -> list[bool]:
        """Always: on one machine two writers of one block are rare, and a turn to write is not."""
        del geometry, owner, ttl_s
        return [True] * len(keys)

    def release(self, geometry: Geometry, keys: Sequence[bytes], owner: str) -> None:
        """Nothing was claimed."""

    def publish(
        self, geometry: Geometry, records: Sequence[Record], timeout_s: float
    ) -> list[bool]:
        suffix = geometry.id_bytes
        results = [False] * len(records)
        with self._write(timeout_s) as txn:
            now = self._now(txn) + len(records)
            # Children first: then no parent of the chain enters the order of use only to leave it.
            for i in reversed(range(len(records))):
                record = records[i]
                unit_key = geometry.unit + record.key
                value = BLOCK.pack(
                    record.placement.segment, record.placement.slot, record.placement.generation
                )
                new = txn.put(unit_key + suffix, value, overwrite=False, db=self._blocks)
                results[i] = new
                self._use(txn, unit_key, now - i, record.parent)
                if new:
                    txn.delete(
                        FREED.pack(suffix, record.placement.segment, record.placement.slot),
                        db=self._freed,
                    )
        return results

    def touch(self, unit: bytes, chain: Sequence[bytes], timeout_s: float) -> None:
        with self._write(timeout_s) as txn:
            now = self._now(txn) + len(chain)
            for i, key in enumerate(chain):
                if txn.get(unit + key, db=self._units) is not None:
                    self._use(txn, unit + key, now - i)

    def _now(self, txn: lmdb.Transaction) -> int:
        """Microseconds, later than every use so far even when the clock was set back."""
        return max(time.time_ns() // 1000, newest_use(txn, self._lru) + 1)

    def _use(
        self, txn: lmdb.Transaction, unit_key: bytes, when: int, parent: bytes = NO_PARENT
    ) -> None:
        """Note that a unit was used at ``when`` (us), and its parent once that is known."""
        old = txn.get(unit_key, db=self._units)
        if old is not None:
            before, known = UNIT.unpack(old)
            when = max(when, before)
            txn.delete(lru_name(unit_key, before), db=self._lru)
            if known != NO_PARENT:
                parent = known
        txn.put(unit_key, UNIT.pack(when, parent), db=self._units)
        if self._is_leaf(txn, unit_key):
            txn.put(lru_name(unit_key, when), b"", db=self._lru)
        if parent != NO_PARENT and (old is None or known == NO_PARENT):
            parent_key = unit_key[:8] + parent
            txn.put(parent_key + unit_key[8:], b"", db=self._children)
            row = txn.get(parent_key, db=self._units)
            if row is not None:
                txn.delete(lru_name(parent_key, UNIT.unpack(row)[0]), db=self._lru)

    def _is_leaf(self, txn: lmdb.Transaction, unit_key: bytes) -> bool:
        return next(table_rows(txn, self._children, unit_key), None) is None

    def remove(
        self, geometry: Geometry, blocks: Sequence[tuple[bytes, int]], timeout_s: float
    ) -> list[Freed]:
        freed = []
        with self._write(timeout_s) as txn:
            for key, generation in blocks:
                row = txn.get(geometry.unit + key + geometry.id_bytes, db=self._blocks)
                if row is not None and BLOCK.unpack(row)[2] == generation:
                    freed.append(self._free(txn, geometry.unit + key + geometry.id_bytes, row))
                    self._forget_unit_if_empty(txn, geometry.unit + key)
        return freed

    def _free(self, txn: lmdb.Transaction, name: bytes, row: bytes | memoryview) -> Freed:
        segment, slot, generation = BLOCK.unpack(row)
        txn.delete(name, db=self._blocks)
        freed = Freed(name[40:], Slot(segment, slot), generation)
        txn.put(
            FREED.pack(freed.geometry_id, segment, slot),
            GENERATION.pack(generation),
            db=self._freed,
        )
        return freed

    def _forget_unit_if_empty(self, txn: lmdb.Transaction, unit_key: bytes) -> None:
        if next(table_rows(txn, self._blocks, unit_key), None) is not None:
            return
        row = txn.get(unit_key, db=self._units)
        if row is None:
            return
        used, parent = UNIT.unpack(row)
        txn.delete(unit_key, db=self._units)
        txn.delete(lru_name(unit_key, used), db=self._lru)
        if parent != NO_PARENT:
            parent_key = unit_key[:8] + parent
            txn.delete(parent_key + unit_key[8:], db=self._children)
            if txn.get(parent_key, db=self._units) is not None and self._is_leaf(txn, parent_key):
                self._use(txn, parent_key, used)

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
        kept = b"" if keep is None else keep[0] + keep[1]
        with self._write(timeout_s) as txn:
            if kept and txn.get(kept, db=self._units) is None:
                return []
            stay = {kept, *promised}
            freed = self._evict(txn, size, need_bytes, stay, models, prefer)
            if not freed and prefer is not None:
                freed = self._evict(txn, size, need_bytes, stay, models, None)
        return freed

    def _evict(
        self,
        txn: lmdb.Transaction,
        size: dict[bytes, int],
        need_bytes: int,
        stay: Collection[bytes],
        models: Collection[bytes] | None,
        prefer: Collection[tuple[bytes, int]] | None,
    ) -> list[Freed]:
        freed: list[Freed] = []
        got = 0
        passes = most_passes(txn.stat(self._lru)["entries"])
        leaves = Leaves(txn, self._lru, models)
        while got < need_bytes and len(freed) < _BATCH:
            try:
                unit_key = leaves.first()
            except ValueError as error:
                raise IndexDamagedError(f"{self.path} has a {error}") from error
            if not unit_key:
                break
            if unit_key not in stay:
                if self._lies_in(txn, unit_key, prefer):
                    for row in self._free_unit(txn, unit_key):
                        freed.append(row)
                        got += size.get(row.geometry_id, 0)
                    leaves.taken(unit_key)
                    continue
                passes -= 1
                if passes < 0:
                    break
            leaves.passed(unit_key)
        return freed

    def _lies_in(
        self,
        txn: lmdb.Transaction,
        unit_key: bytes,
        segments: Collection[tuple[bytes, int]] | None,
    ) -> bool:
        return segments is None or any(
            (row[40:], BLOCK.unpack(value)[0]) in segments
            for row, value in table_rows(txn, self._blocks, unit_key)
        )

    def _free_unit(self, txn: lmdb.Transaction, unit_key: bytes) -> list[Freed]:
        rows = list(table_rows(txn, self._blocks, unit_key))
        freed = [self._free(txn, name, value) for name, value in rows]
        self._forget_unit_if_empty(txn, unit_key)
        return freed

    def evict_segment(
        self,
        geometry_id: bytes,
        segment: int,
        timeout_s: float,
        *,
        promised: Collection[bytes] = (),
    ) -> list[Freed]:
        doomed = [
            e.unit + e.key
            for e in self.entries()
            if e.geometry_id == geometry_id and e.placement.segment == segment
        ]
        with self._write(timeout_s) as txn:
            known = set(doomed)
            for unit_key in doomed:  # grows as it goes: their descendants too
                children = {n[:8] + n[40:] for n, _ in table_rows(txn, self._children, unit_key)}
                doomed += children - known
                known |= children
            if any(unit_key in promised for unit_key in doomed):
                return []
            txn.put(WANTED + FREED.pack(geometry_id, segment, 0), b"", db=self._meta)
            return [row for unit_key in reversed(doomed) for row in self._free_unit(txn, unit_key)]

    def wanted(self, geometry: Geometry) -> list[int]:
        prefix = WANTED + geometry.id_bytes
        with self._env.read() as txn:
            return [
                FREED.unpack(name[len(WANTED) :])[1]
                for name, _ in table_rows(txn, self._meta, prefix)
            ]

    def forget_segments(
        self, geometry_id: bytes, segments: Iterable[int], timeout_s: float
    ) -> None:
        with self._write(timeout_s) as txn:
            for segment in segments:
                first = FREED.pack(geometry_id, segment, 0)
                txn.delete(WANTED + first, db=self._meta)
                for name in [name for name, _ in table_rows(txn, self._freed, first[:20])]:
                    txn.delete(name, db=self._freed)

    def chain_segments(self, unit: bytes, key: bytes) -> set[tuple[bytes, int]]:
        found: set[tuple[bytes, int]] = set()
        seen: set[bytes] = set()
        with self._env.read() as txn:
            while key not in seen:
                seen.add(key)
                for name, value in table_rows(txn, self._blocks, unit + key):
                    found.add((name[40:], BLOCK.unpack(value)[0]))
                row = txn.get(unit + key, db=self._units)
                if row is not None:
                    key = UNIT.unpack(row)[1]
        return found

    def segment_uses(self) -> dict[tuple[bytes, int], int]:
        uses: dict[tuple[bytes, int], int] = {}
        for entry in self.entries():
            name = (entry.geometry_id, entry.placement.segment)
            uses[name] = max(uses.get(name, 0), entry.last_used_us)
        return uses

    def forget_freed(self, freed: Sequence[Freed], timeout_s: float) -> None:
        if not freed:
            return
        with self._write(timeout_s) as txn:
            for row in freed:
                name = FREED.pack(row.geometry_id, row.slot.segment, row.slot.slot)
                if txn.get(name, db=self._freed) == GENERATION.pack(row.generation):
                    txn.delete(name, db=self._freed)

    def drop_segments(
        self, geometry: Geometry, segments: Iterable[int], timeout_s: float
    ) -> list[Freed]:
        gone = set(segments)
        return self._free_all(
            [e for e in self.entries(geometry) if e.placement.segment in gone], timeout_s
        )

    def clear(self, geometry: Geometry, timeout_s: float) -> list[Freed]:
        return self._free_all(list(self.entries(geometry)), timeout_s)

    def _free_all(self, entries: Sequence[Entry], timeout_s: float) -> list[Freed]:
        freed = []
        for first in range(0, len(entries), _BATCH):
            with self._write(timeout_s) as txn:
                for entry in entries[first : first + _BATCH]:
                    name = entry.unit + entry.key + entry.geometry_id
                    row = txn.get(name, db=self._blocks)
                    if row is not None and BLOCK.unpack(row)[2] == entry.placement.generation:
                        freed.append(self._free(txn, name, row))
                        self._forget_unit_if_empty(txn, entry.unit + entry.key)
        return freed

    # -- housekeeping -----------------------------------------------------------------------

    def report(self, node: str, fields: Report, ttl_s: float) -> None:
        """Nobody is told: the locks of the segments say who writes on this machine."""
        del node, fields, ttl_s

    def nodes(self) -> dict[str, Report]:
        return {}

    def secret(self, offered: bytes = b"") -> bytes:
        del offered
        return b""

    def upkeep(self) -> None:
        self._env.reap_readers()

    def check(self) -> None:
        """Walk every page and every row.

        Raises:
            IndexDamagedError: one cannot be read or contradicts another.
        """
        self._env.copy_structure()
        with self._env.read() as txn:
            fault = first_fault(txn, self._env.tables)
        if fault is not None:
            raise IndexDamagedError(f"{self.path} has a {fault}")

    def close(self) -> None:
        if not self._read_only:
            with contextlib.suppress(IndexUnavailableError):
                with self._write(1.0) as txn:
                    txn.put(b"clean", b"1", db=self._meta)
                self._env.sync()
        self._env.release()
