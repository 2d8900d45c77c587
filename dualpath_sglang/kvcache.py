"""The KV cache of one store, for any engine: look up, read, write, evict.

Nothing here raises for a missing, damaged or late block: reads say so per block, writes say what
became of each. When the index cannot answer, everything misses until it can again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Index, IndexMisconfiguredError, IndexUnavailableError, Report
from dualpath_sglang.index.keeper import IndexKeeper
from dualpath_sglang.index.source import EmbeddedSource, IndexSource
from dualpath_sglang.node.report import Node, Reporter
from dualpath_sglang.pool import Pool
from dualpath_sglang.promises import Promises
from dualpath_sglang.read_queue import ReadQueue, SharedQueue
from dualpath_sglang.reader import ReadBatch, Reader
from dualpath_sglang.root import StallWatch, open_root
from dualpath_sglang.stats import CacheStats, Counters
from dualpath_sglang.upkeep import Upkeep
from dualpath_sglang.writer import Writer, WriteResult
from dualpath_storage import (
    BlockStore,
    Geometry,
    Pieces,
    Placement,
    ReadStatus,
    Space,
    StoreError,
    StoreOptions,
)
from dualpath_storage.backends import Backend
from dualpath_storage.paths import geometries
from dualpath_storage.workers import Workers

__all__ = ["KVCache", "WriteResult"]

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 120.0
_ADOPT_TIMEOUT_S = 60.0
_GIVE_UP_TIMEOUT_S = 1.0


def _deadline(timeout_s: float | None, default_s: float) -> float:
    return time.monotonic() + (default_s if timeout_s is None else timeout_s)


class KVCache:
    """Full Blocks of any number of geometries in one root. Thread-safe.

    Args:
        options: where and how.
        index: where the metadata lives; a file beside the store by default.
        node: who this process is to others; without, they are told nothing.
        machine: the read queue of this machine, where what is read here counts too.
        backend: how to reach the files, when not as the options say.

    Raises:
        StoreError: the root cannot be used as asked.
    """

    def __init__(
        self,
        options: StoreOptions,
        backend: Backend | None = None,
        *,
        index: IndexSource | None = None,
        node: Node | None = None,
        machine: SharedQueue | None = None,
    ) -> None:
        self.options, self._backend = open_root(options, backend)
        self.root = options.root
        options = self.options
        self._source = index or EmbeddedSource()
        self._reporter = None if node is None else Reporter(node)
        self._space = Space(options)
        self._counters = Counters()
        self.read_queue = ReadQueue(machine)
        """What is to be read; whoever reads by himself counts here too."""
        self._pools: dict[str, Pool] = {}
        self._lock = threading.Lock()
        self._promises = Promises()
        self._evictor = Evictor(
            self._space,
            self._backend,
            self._attached,
            self.geometries,
            self._counters,
            self._promises.held,
        )
        self._reader = Reader(options, self._counters)
        self._writer = Writer(self._evictor, durable=options.durability == "fdatasync")
        self._readers = Workers(options.io_threads, "dualpath-read")
        self._writers = Workers(options.io_threads, "dualpath-write")
        self._stalls = StallWatch(options, self._readers, self._writers)
        self._keeper = IndexKeeper(self.root, self._open_index, self._settle)
        try:
            self._keeper.begin()
        except IndexMisconfiguredError as error:
            self._readers.close()
            self._writers.close()
            raise StoreError(f"The index of {self.root} cannot be used: {error}.") from error
        self._closed = False
        self._upkeep = Upkeep(
            options,
            self._keeper,
            self._index_or_none,
            self._attached,
            self._writer,
            self._evictor,
            self._tell,
            serving=node is not None,
        )

    # -- pools ------------------------------------------------------------------------------

    def attach(self, geometry: Geometry, *, writer: bool = True) -> Pool:
        """Begin to use the blocks of a geometry.

        Args:
            writer: whether this process will write them, and takes over the segments of writers
                that died. Several processes may; each has segments of its own.

        Raises:
            StoreError: its directory cannot be made.
        """
        writer = writer and not self.options.read_only
        with self._lock:
            pool = self._pools.get(geometry.id)
            if pool is None:
                pool = self._pools[geometry.id] = Pool(
                    self._store(geometry), writer=writer, trusted_s=self._source.trusted_s
                )
            pool.writer |= writer
        if writer:
            try:
                pool.store.files.create_directory()
            except OSError as error:
                logger.warning("Cannot make %s: %s", pool.store.directory, error)
            with self._index_or_none() as index:
                if index is not None:
                    pool.adopt(index, time.monotonic() + _ADOPT_TIMEOUT_S, now=True)
        return pool

    def _store(self, geometry: Geometry) -> BlockStore:
        return BlockStore(
            self.root,
            geometry,
            self._backend,
            self._space,
            self._readers,
            self._writers,
            self.options.max_io_bytes,
        )

    def stores(self) -> Iterator[BlockStore]:
        """Every geometry under the root, attached here or not; closes each before the next."""
        for geometry in self.geometries():
            store = self._store(geometry)
            yield store
            store.close()

    def geometries(self) -> list[Geometry]:
        """Every geometry under the root. One that cannot be read is left out, with a warning."""
        return geometries(self.root)

    @property
    def index(self) -> Index:
        """The index itself, for tools that look at blocks one by one.

        Raises:
            IndexUnavailableError: there is none now.
        """
        index = self._keeper.index
        if index is None:
            raise IndexUnavailableError(f"The index of {self.root} is missing or damaged")
        return index

    @property
    def epoch(self) -> int:
        """Grows whenever this process takes blocks out of the index."""
        return self._counters.removals

    # -- looking up -------------------------------------------------------------------------

    def lookup(self, pool: Pool, keys: Sequence[bytes]) -> list[bool]:
        """Whether each block is present. A promise only until it is evicted or found damaged."""
        with self._index_or_none() as index:
            if index is not None:
                found = [place is not None for place in index.lookup(pool.geometry, keys)]
                self._count_lookup(len(keys), sum(found))
                return found
        self._counters.miss("index", len(keys))
        return [False] * len(keys)

    def prefix(self, pool: Pool, keys: Sequence[bytes]) -> int:
        """Length of the leading run of blocks that are present.

        Blocks that an index on the network called present within the last two seconds are not
        asked for again.
        """
        with self._index_or_none() as index:
            if index is not None:
                run = self._prefix(pool, keys, index)
                self._count_lookup(len(keys), run)
                return run
        self._counters.miss("index", len(keys))
        return 0

    def _prefix(self, pool: Pool, keys: Sequence[bytes], index: Index) -> int:
        if not index.shared:
            return index.prefix(pool.geometry, keys)
        epoch = self.epoch
        known, _ = pool.known.leading_run(keys, epoch)
        run = known
        if known < len(keys):
            run += index.prefix(pool.geometry, keys[known:])
            pool.known.seen(keys[known:run], None, epoch)
        return run

    def locate(self, pool: Pool, keys: Sequence[bytes]) -> list[Placement | None]:
        """Where each block lies, for somebody who reads by himself and then calls :meth:`report`.

        Not counted as a lookup. All None when the index cannot answer.
        """
        with self._index_or_none() as index:
            if index is not None:
                return index.lookup(pool.geometry, keys)
        return [None] * len(keys)

    def sample(self, pool: Pool, count: int) -> list[tuple[bytes, Placement]]:
        """Up to ``count`` blocks, in no order that means anything."""
        with self._index_or_none() as index:
            if index is not None:
                entries = itertools.islice(index.entries(pool.geometry), count)
                return [(entry.key, entry.placement) for entry in entries]
        return []

    def promise(self, name: str, pool: Pool, key: bytes, ttl_s: float = 60.0) -> None:
        """Keep the page ``key`` and all its ancestors from this process's eviction.

        Args:
            name: who asks; holds one promise at a time, until :meth:`release` or ``ttl_s``.

        What other processes evict, and :meth:`clear`, is not held up.
        """
        self._promises.give(name, pool.geometry.unit + key, ttl_s)

    def release(self, name: str) -> None:
        """End the promise of ``name``, if there is one."""
        self._promises.release(name)

    def _count_lookup(self, asked: int, found: int) -> None:
        self._counters.add("lookups")
        self._counters.miss(ReadStatus.ABSENT.value, asked - found)

    def touch(self, pool: Pool, keys: Sequence[bytes]) -> None:
        """Note the use of a chain of keys, parents first. Written down later, in a batch."""
        if keys:
            self._upkeep.touch(pool.geometry.unit, keys)

    # -- reading ----------------------------------------------------------------------------

    def read(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        pieces: Sequence[Pieces],
        *,
        layers: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read blocks into memory.

        Args:
            keys: which ones.
            pieces: the memory of each, see :data:`dualpath_storage.Pieces`.
            layers: only the Layer Blocks ``[first, end)``; all by default.
            timeout_s: seconds after which no further I/O is begun.

        Returns:
            True for a block that is whole and passed its checksums. The memory of any other is
            garbage. Nothing writes to the memory after the return.
        """
        assert len(keys) == len(pieces)
        deadline = _deadline(timeout_s, self.options.read_timeout_s)
        batch = ReadBatch(keys, pieces, deadline, layers)
        with batch.queued(pool.geometry, self.read_queue), self._index_or_none() as index:
            if index is not None:
                self._reader.read(pool, index, batch)
        if not batch.answered:
            self._counters.miss("index", len(keys))
            return [False] * len(keys)
        self._counters.reads(batch.statuses)
        good = [status is ReadStatus.OK for status in batch.statuses]
        self.touch(pool, [key for key, ok in zip(keys, good, strict=True) if ok])
        return good

    def report(
        self, pool: Pool, reads: Sequence[tuple[bytes, Placement | None, ReadStatus]]
    ) -> None:
        """What came of blocks that the caller read by himself: key, where from, and outcome.

        Good ones (a chain, parents first) count as used; damaged ones leave the index if they
        still stand in it as they were read.
        """
        statuses = [status for _, _, status in reads]
        self._counters.reads(statuses)
        self.touch(pool, [key for key, _, status in reads if status is ReadStatus.OK])
        found = {
            i: place
            for i, (_, place, status) in enumerate(reads)
            if place is not None and status.damaged
        }
        if found:
            with self._index_or_none() as index:
                if index is not None:
                    keys = [key for key, _, _ in reads]
                    self._reader.remove_damaged(pool, index, keys, found, statuses)

    # -- writing ----------------------------------------------------------------------------

    def write(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        pieces: Sequence[Pieces],
        *,
        parent: bytes | None = None,
        timeout_s: float | None = None,
    ) -> list[WriteResult]:
        """Store blocks that are not there yet.

        Args:
            keys: one chain; the parent of ``keys[i]`` is ``keys[i - 1]``.
            pieces: the memory of each block.
            parent: the parent of ``keys[0]``, when known.
            timeout_s: seconds after which no further I/O is begun.

        Returns:
            What became of each. A block is findable only once it is STORED, and whole by then.
        """
        assert len(keys) == len(pieces)
        deadline = _deadline(timeout_s, self.options.write_timeout_s)
        batch = self._writer.batch(keys, pieces, parent, deadline)
        if pool.writer and keys:
            with self._index_or_none() as index:
                if not self._stalls.stalled and not self._closed and pool.tenure.sure:
                    self._writer.write(pool, index, batch)
        for name in WriteResult:
            field = "written" if name is WriteResult.STORED else name.value
            self._counters.add(f"{field}_blocks", batch.results.count(name))
        present = WriteResult.PRESENT
        self.touch(pool, [k for k, r in zip(keys, batch.results, strict=True) if r is present])
        return batch.results

    # -- eviction ---------------------------------------------------------------------------

    def evict(self, need_bytes: int, timeout_s: float | None = None) -> int:
        """Take out least recently used pages until ``need_bytes`` are free; blocks taken out."""
        deadline = _deadline(timeout_s, self.options.write_timeout_s)
        with self._index_or_none() as index:
            if index is not None and not self._cannot_write:
                return len(self._evictor.evict(index, need_bytes, deadline))
        return 0

    def clear(self, *, namespace: str | None = None, units: Iterable[bytes] | None = None) -> int:
        """Remove every block of a namespace, of some units, or (with neither) of the store.

        Returns:
            Blocks removed.
        """
        wanted = None if units is None else set(units)
        removed = 0
        with self._index_or_none() as index:
            if index is None or self._cannot_write:
                return 0
            for geometry in self.geometries():
                if namespace is not None and geometry.namespace != namespace:
                    continue
                if wanted is not None and geometry.unit not in wanted:
                    continue
                timeout_s = self.options.write_timeout_s
                freed = index.clear(geometry, timeout_s)
                removed += len(freed)
                self._counters.removals += len(freed)
                pool = self._pools.get(geometry.id)
                if pool is not None:
                    pool.take_back(freed)
                    pool.give_up_empty(index, timeout_s)
                self._evictor.remove_orphans(index, geometry, time.monotonic() + timeout_s)
        return removed

    # -- condition --------------------------------------------------------------------------

    def nodes(self) -> dict[str, Report] | None:
        """What the processes that use the store last told; None when nobody can say now."""
        with self._index_or_none() as index:
            if index is not None:
                return index.nodes()
        return None

    def stats(self) -> CacheStats:
        """Counters of this process, and the usage of the root."""
        stats = self._counters.snapshot()
        for pool in self._attached():
            io = pool.store.io
            stats.read_bytes += io.read_bytes
            stats.read_s += io.read_s
            stats.written_bytes += io.written_bytes
            stats.write_s += io.write_s
        with contextlib.suppress(OSError):
            stats.capacity_bytes = self._space.capacity_bytes
            stats.used_bytes = self._space.used_bytes()
        return stats

    def close(self) -> None:
        """Write down what is pending and release every file, lock and thread.

        No other call may be under way, and none may follow.
        """
        if self._closed:
            return
        self._upkeep.stop()
        self.maintain()
        self._closed = True
        self._give_up_segments()
        self._readers.close()
        self._writers.close()
        for pool in self._attached():
            pool.store.close()
        self._keeper.close()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up_segments(self) -> None:
        with self._index_or_none() as index:
            if index is not None:
                for pool in self._attached():
                    owned = pool.store.slots.owned()
                    index.ownership.give_up(pool.geometry.id_bytes, owned, _GIVE_UP_TIMEOUT_S)

    @property
    def _cannot_write(self) -> bool:
        """What leaves the index must leave the store too, or a scan brings it back."""
        return self.options.read_only or self._writer.refused

    def _attached(self) -> list[Pool]:
        with self._lock:
            return list(self._pools.values())

    # -- upkeep -----------------------------------------------------------------------------

    def maintain(self) -> None:
        """What happens every second by itself: touches, freed slots, a lost index."""
        self._upkeep.run()

    def _tell(self, index: Index) -> None:
        if self._reporter is not None:
            self._reporter.tell(index, self._figures)

    def _figures(self) -> dict[str, int]:
        stats = self.stats()
        geometries = [pool.geometry for pool in self._attached()]
        return {
            # Of this rank: what a page of so many tokens takes, all pools together.
            "page_tokens": max((of.page_tokens for of in geometries), default=0),
            "block_bytes": sum(of.block_bytes for of in geometries),
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "pending_blocks": self._writer.pending,
            "read_queue_bytes": self.read_queue.bytes,
            "read_queue_tokens": self.read_queue.tokens,
            "segments": sum(len(pool.store.slots.owned()) for pool in self._attached()),
        }

    def _open_index(self) -> Index:
        read_only = self.options.read_only
        if not read_only:
            self.root.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        return self._source.open(
            self.root, self.stores, read_only=read_only, timeout_s=_OPEN_TIMEOUT_S
        )

    def _settle(self, index: Index) -> None:
        for pool in self._attached():
            if pool.writer:
                pool.adopt(index, time.monotonic() + _ADOPT_TIMEOUT_S, now=True)
                pool.reconcile(index, _ADOPT_TIMEOUT_S)

    def _index_or_none(self) -> contextlib.AbstractContextManager[Index | None]:
        """The index, or None when it or the store cannot be used; swallows its failures."""
        return self._keeper.guarded(None if self._stalls.look() else self._keeper.index)
