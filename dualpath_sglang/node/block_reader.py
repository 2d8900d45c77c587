"""Reads Full Blocks from the store into the cache of a node, earlier layers of all blocks first.

Blocks that lie side by side are read in groups, range by range: the next range of a group waits
until the one before is there, so the layers of a block land in their order. Among all ranges that
wait, of whatever fetch, the one of the earliest layer is next; but every fourth time the oldest.
A group that nobody wants any more before its turn comes is not read.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.block_cache import BlockCache, CachedBlock
from dualpath_sglang.node.landings import Landings
from dualpath_sglang.node.layer_ranges import read_ranges
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.estimate import RateMeter
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage import Geometry, Placement, ReadStatus
from dualpath_storage.header import HEADER_BYTES
from dualpath_storage.images import ImageItem
from dualpath_storage.memory import Arena
from dualpath_storage.ranges import RangeRead
from dualpath_storage.workers import Workers

logger = logging.getLogger(__name__)

_READ_S = 60.0
"""What has not begun by then is not read any more, whoever waits for it."""
_OLDEST_EVERY = 4
_GROUP = 16
"""Blocks at the most: what every turn costs is worth it for so many."""
_TOLD_BYTES = 2 << 20
"""Whoever waits is told whenever so much has landed."""
_HANGS_S = 10.0
"""A read that takes so long cannot be relied on."""


@dataclass(slots=True, eq=False)
class _Read:
    """Blocks of one fetch.

    Args:
        keys: of all, in the order of the chain.
        left: groups that are still to be read.
        places: of those that were read well, for the cache's books.
    """

    pool: Pool
    keys: Sequence[bytes]
    landings: Landings
    ranges: Sequence[tuple[int, int]]
    deadline: float
    left: int = 0
    places: dict[bytes, Placement] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class _Group:
    """Neighbours among them, on their way.

    Args:
        range: index of the one that is next.
        headers: checksums of each block, once its header has come.
        over: whether all of them are settled.
    """

    read: _Read
    blocks: list[CachedBlock]
    places: list[Placement]
    range: int = 0
    headers: list[array[int] | None] = field(default_factory=list)
    over: bool = False


class BlockReader:
    """Thread-safe.

    Args:
        cache: the store.
        blocks: where they go.
        options: of the reads: how many in flight, bytes of the first I/O of a block.
    """

    def __init__(self, cache: KVCache, blocks: BlockCache, options: StreamOptions) -> None:
        self._cache = cache
        self._blocks = blocks
        self._options = options
        self._lock = threading.Lock()
        self._turns = itertools.count(1)
        self._order = itertools.count()
        self._heap: list[tuple[int, int, _Group]] = []
        self._waiting: dict[int, _Group] = {}
        self._closed = False
        self._busy = 0
        self._meter = RateMeter()
        self._workers = Workers(options.queue_depth, "dualpath-agent-read")

    @property
    def rate(self) -> float | None:
        """Bytes a second that the store brings; None when nothing was measured yet."""
        with self._lock:
            return self._meter.rate(time.monotonic())

    @property
    def stalled(self) -> bool:
        """Whether so many reads hang that others would wait in vain."""
        return self._workers.older_than(_HANGS_S) >= max(1, self._options.queue_depth // 2)

    def ranges(self, geometry: Geometry) -> list[tuple[int, int]]:
        """Layers that are read, and so land, together."""
        return read_ranges(geometry.layers, geometry.layer_bytes, self._options.first_io_bytes)

    def start(
        self,
        pool: Pool,
        blocks: Sequence[CachedBlock],
        places: Sequence[Placement],
        landings: Landings,
    ) -> None:
        """Have new blocks of the cache read; each is settled when that is over.

        Not by the deadline of a fetch, for others may wait too.
        """
        of = pool.geometry
        keys = [block.name[1] for block in blocks]
        read = _Read(pool, keys, landings, self.ranges(of), time.monotonic() + _READ_S)
        groups = _groups(read, blocks, places, self._options.queue_depth)
        read.left = len(groups)
        size = len(blocks) * of.block_bytes
        self._cache.read_queue.add(size, len(blocks) * of.page_tokens)
        for group in groups:
            self._put(group)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what has not begun, and stop. A read that hangs in the system keeps its memory."""
        self._closed = True
        self._workers.close(timeout_s)

    # -- turns ------------------------------------------------------------------------------

    def _put(self, group: _Group) -> None:
        with self._lock:
            order = next(self._order)
            self._waiting[order] = group
            heapq.heappush(self._heap, (group.range, order, group))
        self._workers.submit(self._turn, lambda: None)

    def _take(self) -> _Group:
        with self._lock:
            self._busy += 1
            if next(self._turns) % _OLDEST_EVERY == 0:
                return self._waiting.pop(next(iter(self._waiting)))
            while True:
                _, order, group = heapq.heappop(self._heap)
                if self._waiting.pop(order, None) is not None:
                    return group

    def _turn(self, arena: Arena) -> None:
        group = self._take()
        try:
            again = self._advance(group, arena)
        except BaseException:
            if not group.over:
                self._end(group)
            raise
        finally:
            with self._lock:
                self._busy -= 1
        if again:
            self._put(group)

    def _advance(self, group: _Group, arena: Arena) -> bool:
        """Read the next range of a group; whether there is one more."""
        read = group.read
        if self._closed or time.monotonic() >= read.deadline:
            self._end(group)
            return False
        if self._blocks.give_up(group.blocks):
            group.over = True
            self._count(group)
            return False
        first, end = read.ranges[group.range]
        if group.range == 0:
            group.headers = [None] * len(group.blocks)
        items = [
            ImageItem(block.name[1], place, block.image, header)
            for block, place, header in zip(group.blocks, group.places, group.headers, strict=True)
        ]
        size = (end - first) * read.pool.geometry.layer_bytes
        step = max(1, _TOLD_BYTES // size)
        bad: dict[int, RangeRead] = {}
        for at in range(0, len(items), step):
            results = read.pool.store.read_images(items[at : at + step], first, end)
            for i, result in enumerate(results, at):
                if result.status is not ReadStatus.OK:
                    bad[i] = result
                    continue
                block = group.blocks[i]
                assert result.checksums is not None
                if first == 0:
                    group.headers[i] = block.checksums = result.checksums
                block.landed = end
            read.landings.tell()
        good = len(group.blocks) - len(bad)
        self._cache.read_queue.add(-good * size)
        self._measure(good * size)
        for i, result in bad.items():
            self._repair(group, i, first, result, arena)
        if bad:
            self._drop(group, bad)
        group.range += 1
        if group.blocks and group.range < len(read.ranges):
            return True
        self._end(group)
        return False

    def _measure(self, size: int) -> None:
        """So much was read; it says what the store brings when all workers have had to do."""
        with self._lock:
            full = self._busy + len(self._waiting) >= self._options.queue_depth
            self._meter.note(size, time.monotonic(), full=full)

    # -- what is not as it should be --------------------------------------------------------

    def _repair(self, group: _Group, i: int, first: int, result: RangeRead, arena: Arena) -> None:
        """Look a block up anew and read what is left of it, by way of memory of our own.

        The layers that are there already may be on their way to somebody.
        """
        read, block = group.read, group.blocks[i]
        store, of, key = read.pool.store, read.pool.geometry, block.name[1]
        place: Placement | None = group.places[i]
        for _ in range(self._options.retries):
            (place,) = self._cache.locate(read.pool, [key])
            if place is None:
                result = RangeRead(ReadStatus.ABSENT)
                break
            scratch = arena.payload(of.slot_bytes)[: of.slot_bytes]
            (result,) = store.read_images([ImageItem(key, place, scratch)], 0, of.layers)
            if result.status is ReadStatus.OK:
                assert result.checksums is not None
                at = HEADER_BYTES + first * of.layer_bytes if first else 0
                block.image[at:] = scratch[at:]
                block.checksums = block.checksums[:first] + result.checksums[first:]
                block.landed = of.layers
                break
        block.missing = result.status is not ReadStatus.OK
        self._cache.read_queue.add(-(of.layers - first) * of.layer_bytes)
        if block.missing:
            self._cache.report(read.pool, [(key, place, result.status)])
            return
        assert place is not None
        with read.lock:
            read.places[key] = place

    def _drop(self, group: _Group, which: Collection[int]) -> None:
        """These are over, in whatever way; the rest of the group goes on without them."""
        over = [group.blocks[i] for i in which]
        kept = [i for i in range(len(group.blocks)) if i not in which]
        group.blocks = [group.blocks[i] for i in kept]
        group.places = [group.places[i] for i in kept]
        group.headers = [group.headers[i] for i in kept]
        self._cache.read_queue.add(0, -len(over) * group.read.pool.geometry.page_tokens)
        self._blocks.settle(over)
        group.read.landings.tell()

    # -- the end ----------------------------------------------------------------------------

    def _end(self, group: _Group) -> None:
        """Nothing more of a group is read."""
        group.over = True
        self._blocks.settle(group.blocks)
        group.read.landings.tell()
        self._count(group)

    def _count(self, group: _Group) -> None:
        """Note what became of a group, and tell the cache when it was the last."""
        read, of = group.read, group.read.pool.geometry
        layers = sum(of.layers - block.landed for block in group.blocks)
        self._cache.read_queue.add(-layers * of.layer_bytes, -len(group.blocks) * of.page_tokens)
        with read.lock:
            for block, place in zip(group.blocks, group.places, strict=True):
                if block.whole:
                    read.places[block.name[1]] = place
            read.left -= 1
            if read.left:
                return
        good = [(key, read.places[key], ReadStatus.OK) for key in read.keys if key in read.places]
        if good:
            self._cache.report(read.pool, good)


def _groups(
    read: _Read, blocks: Sequence[CachedBlock], places: Sequence[Placement], depth: int
) -> list[_Group]:
    """Blocks in the order in which they lie in the store, cut so that all workers have some."""
    order = sorted(range(len(places)), key=lambda i: (places[i].segment, places[i].slot))
    fair = -(-len(order) // depth)
    step = max(1, min(fair, _GROUP))
    return [
        _Group(read, [blocks[i] for i in some], [places[i] for i in some])
        for some in (order[at : at + step] for at in range(0, len(order), step))
    ]
