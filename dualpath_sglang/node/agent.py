"""Reads Full Blocks for other nodes and hands them on by layer: first half of the DE read path.

A fetch is answered from the node's memory as far as the blocks are there; the rest is read by a
:class:`~dualpath_sglang.streaming.streamer.LayerStreamer`, first layers of all blocks first, and
sent as it lands. Checksums are those that stand in the headers: what the receiver checks is what
the writer wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.block_cache import BlockCache, CachedBlock, NoRoomError
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.landing import DONE, Fence, Landed, Staged
from dualpath_sglang.streaming.load import Load as StreamLoad
from dualpath_sglang.streaming.load import LoadRequest, Outcome, PoolLoad
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_sglang.transport.base import End, FetchRequest, Load, Missing, Piece, Served, Span
from dualpath_storage import Geometry, StoreError
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_GROUP = 16
"""Blocks of one request of the streamer: they fail together."""
_PIECE_BYTES = 1 << 20
_READ_S = 60.0
_LOOK_EVERY_S = 1.0


class Agent:
    """See :class:`dualpath_sglang.transport.base.Source`.

    Args:
        cache: the store; closed by whoever opened it.
        memory_bytes: most memory for blocks.
        options: of the reads.
    """

    def __init__(
        self, cache: KVCache, memory_bytes: int, options: StreamOptions | None = None
    ) -> None:
        self.blocks = BlockCache(memory_bytes)
        self._cache = cache
        self._streamer = LayerStreamer(cache, options)
        self._names = itertools.count()
        self._pools: dict[bytes, Pool] = {}
        self._looked_at = float("-inf")
        self._lock = threading.Lock()
        self._notices = Notices(logger)

    def load(self) -> Load:
        """What is still to be read from storage, by all processes of the machine."""
        return Load(*self._cache.read_queue.of_machine())

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to answer a fetch."""
        pool = self._pool(request.geometry_id)
        if pool is None or request.end_layer > pool.geometry.layers:
            return End.UNKNOWN
        try:
            self._streamer.check(pool.geometry)
        except StoreError as error:
            self._notices.warn("A fetch is refused: %s", error)
            return End.FAILED
        deadline = time.monotonic() + request.timeout_s
        places = self._cache.locate(pool, request.keys)
        there = [i for i, place in enumerate(places) if place is not None]
        try:
            blocks, new = self.blocks.pin(pool.geometry, [request.keys[i] for i in there])
        except NoRoomError:
            return End.BUSY
        if new:
            reading = [blocks[i] for i in new]
            try:
                self._read(pool, [request.keys[there[i]] for i in new], reading)
            except BaseException:
                self.blocks.settle(reading)
                self.blocks.unpin(blocks)
                raise
        by_number = dict(zip(there, blocks, strict=True))
        fetch = _Fetch(self.blocks, pool.geometry, request, by_number, deadline)
        return self._serving(fetch, blocks)

    @contextlib.contextmanager
    def _serving(self, fetch: _Fetch, blocks: Sequence[CachedBlock]) -> Iterator[Served]:
        try:
            yield fetch
        finally:
            self.blocks.unpin(blocks)

    def _pool(self, geometry_id: bytes) -> Pool | None:
        with self._lock:
            if geometry_id not in self._pools:
                now = time.monotonic()
                if now - self._looked_at < _LOOK_EVERY_S:
                    return None
                self._looked_at = now
                for geometry in self._cache.geometries():
                    self._pools.setdefault(
                        geometry.id_bytes, self._cache.attach(geometry, writer=False)
                    )
            return self._pools.get(geometry_id)

    def _read(self, pool: Pool, keys: Sequence[bytes], blocks: Sequence[CachedBlock]) -> None:
        """Have new blocks read; not by the deadline of a fetch, for others may wait too."""
        layers = pool.geometry.layers
        landing = _CacheLanding(self.blocks, blocks)
        groups = {
            f"fetch-{next(self._names)}": range(first, min(first + _GROUP, len(keys)))
            for first in range(0, len(keys), _GROUP)
        }
        requests = [
            LoadRequest(
                name, [PoolLoad(pool, landing, [keys[i] for i in group], group, range(layers))]
            )
            for name, group in groups.items()
        ]
        begun: list[StreamLoad] = []
        starting = threading.RLock()

        def on_layer(layer: int, fences: Sequence[Fence]) -> None:
            del fences
            if layer < layers - 1:
                return
            with starting:  # nothing lands after the last layer
                results = begun[0].wait(0.0) if begun else {}
            missed = [n for n, result in results.items() if result.outcome is Outcome.MISS]
            self.blocks.settle(blocks, {i for name in missed for i in groups[name]})

        deadline = time.monotonic() + _READ_S
        with starting:
            begun.append(
                self._streamer.start(requests, layers=layers, deadline=deadline, on_layer=on_layer)
            )

    def close(self) -> None:
        """End every read. No fetch may be under way."""
        self._streamer.close()
        self.blocks.clear()


class _Fetch:
    """See :class:`Served`.

    Args:
        there: blocks by their number in the request; the others are missing.
        deadline: monotonic seconds.
    """

    def __init__(
        self,
        cache: BlockCache,
        geometry: Geometry,
        request: FetchRequest,
        there: dict[int, CachedBlock],
        deadline: float,
    ) -> None:
        self._cache = cache
        self._deadline = deadline
        self._geometry = geometry
        self._request = request
        self._there = there
        self._cancelled = False

    def __iter__(self) -> Iterator[Piece | Missing]:
        request, size = self._request, self._geometry.layer_bytes
        count = len(request.keys)
        if lacking := [i for i in range(count) if i not in self._there]:
            yield Missing(lacking)
        step = max(1, _PIECE_BYTES // size)
        for layer in range(request.first_layer, request.end_layer):
            for first in range(0, count, step):
                numbers = range(first, min(first + step, count))
                failed = self._wait(layer, numbers)
                if self._cancelled:
                    return
                if failed:
                    for i in failed:
                        del self._there[i]
                    yield Missing(failed)
                yield from self._pieces(layer, numbers)

    def _wait(self, layer: int, numbers: Sequence[int]) -> list[int]:
        """Until a layer of these blocks is there; those that failed.

        Raises:
            TimeoutError: the deadline came first.
        """
        blocks = [(i, self._there[i]) for i in numbers if i in self._there]

        def settled() -> bool:
            return self._cancelled or all(b.landed[layer] or b.failed for _, b in blocks)

        with self._cache.changed:
            left_s = max(0.0, self._deadline - time.monotonic())
            if not self._cache.changed.wait_for(settled, left_s):
                raise TimeoutError
        failed = [(i, block) for i, block in blocks if not block.landed[layer]]
        if not all(block.missing for _, block in failed) and not self._cancelled:
            raise TimeoutError  # the store may have it, and does not answer
        return [i for i, _ in failed]

    def _pieces(self, layer: int, numbers: Sequence[int]) -> Iterator[Piece]:
        """Runs of blocks that are there."""
        begin = layer * self._geometry.layer_bytes
        end = begin + self._geometry.layer_bytes
        for there, run in itertools.groupby(numbers, lambda i: i in self._there):
            if there:
                chosen = list(run)
                blocks = [self._there[i] for i in chosen]
                yield Piece(
                    Span(layer, layer + 1, chosen[0], len(chosen)),
                    [block.checksums[layer] for block in blocks],
                    [block.memory[begin:end] for block in blocks],
                )

    def cancel(self) -> None:
        with self._cache.changed:
            self._cancelled = True
            self._cache.changed.notify_all()


class _CacheLanding:
    """Puts what was read into the node's memory."""

    def __init__(self, cache: BlockCache, blocks: Sequence[CachedBlock]) -> None:
        self._cache = cache
        self._blocks = blocks

    def target(self, pages: Sequence[int], after: object | None) -> _CacheTarget:
        assert after is None
        return _CacheTarget(self._cache, [self._blocks[page] for page in pages])


class _CacheTarget:
    def __init__(self, cache: BlockCache, blocks: Sequence[CachedBlock]) -> None:
        self._cache = cache
        self._blocks = blocks

    def land(self, staged: Staged) -> Landed:
        shape = staged.shape
        size = shape.geometry.layer_bytes
        begin, end = shape.first * size, shape.end * size
        for i in range(staged.count):
            block = self._blocks[staged.begin + i]
            at = i * shape.stride + shape.lead
            block.memory[begin:end] = staged.memory[at : at + end - begin]
            block.checksums[shape.first : shape.end] = staged.checksums[i][shape.first : shape.end]
        with self._cache.changed:
            for block in self._blocks[staged.begin : staged.begin + staged.count]:
                block.landed[shape.first : shape.end] = b"\1" * (shape.end - shape.first)
            self._cache.changed.notify_all()
        return DONE
