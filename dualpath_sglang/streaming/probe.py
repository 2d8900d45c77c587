"""What the device needs for full bandwidth, measured on the store's own blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.estimate import RateMeter
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage import BlockStore, Placement, ReadStatus
from dualpath_storage.memory import Arena, aligned
from dualpath_storage.ranges import RangeItem, RangeShape
from dualpath_storage.workers import Task, Workers

logger = logging.getLogger(__name__)

_DEFAULT_IO_BYTES = 256 << 10
_MOST_BYTES = 2 << 20
_GOOD_ENOUGH = 0.85
_BLOCKS = 1024
_LEAST_BLOCKS = 2  # a read in flight


@dataclass(frozen=True, slots=True)
class Measured:
    """The smallest I/O that comes near full bandwidth, and that bandwidth."""

    io_bytes: int
    bytes_per_s: float


class Probe:
    """Measures once, in the background and while nothing else is read.

    Args:
        post: leaves a message for the streamer's thread, which is the one that calls.
        meter: learns the rate.
    """

    def __init__(
        self,
        cache: KVCache,
        options: StreamOptions,
        post: Callable[[Callable[[], None]], None],
        meter: RateMeter,
    ) -> None:
        self.io_bytes = options.io_bytes or _DEFAULT_IO_BYTES
        """Bytes an I/O that give full bandwidth, as far as known."""
        self._cache = cache
        self._options = options
        self._post = post
        self._meter = meter
        self._begun = options.io_bytes is not None or options.probe_s == 0

    def begin(self, pool: Pool) -> None:
        """Measure on the blocks of ``pool``, unless that was done or the operator gave a size."""
        if not self._begun:
            self._begun = True
            threading.Thread(
                target=self._run, args=(pool,), name="dualpath-stream-probe", daemon=True
            ).start()

    def _run(self, pool: Pool) -> None:
        found: Measured | None = None
        try:
            found = measure(self._cache, pool, self._options.queue_depth, self._options.probe_s)
        except Exception:
            logger.exception("Measuring %s failed", pool.store.directory)
        self._post(partial(self._on_measured, found))

    def _on_measured(self, found: Measured | None) -> None:
        if found is None:
            self._begun = False  # too little there: once more after the next load
            return
        self.io_bytes = found.io_bytes
        self._meter.set(found.bytes_per_s, time.monotonic())
        logger.info(
            "Streaming in I/Os of %d KiB: %.2f GB/s with %d in flight",
            found.io_bytes >> 10,
            found.bytes_per_s / 1e9,
            self._options.queue_depth,
        )


def measure(cache: KVCache, pool: Pool, depth: int, limit_s: float) -> Measured | None:
    """Read the first layers of some blocks, 1, 2, 4, ... of them, ``depth`` reads at a time.

    Returns:
        None when there are too few blocks to say, or they are not there any more.
    """
    blocks = cache.sample(pool, _BLOCKS)
    if len(blocks) < _LEAST_BLOCKS * depth:
        return None
    workers = Workers(depth, "dualpath-stream-probe")
    try:
        return _measure(pool.store, blocks, workers, depth, limit_s)
    finally:
        workers.close(limit_s)


def _measure(
    store: BlockStore,
    blocks: Sequence[tuple[bytes, Placement]],
    workers: Workers,
    depth: int,
    limit_s: float,
) -> Measured | None:
    shapes = _shapes(store)
    rates: list[tuple[int, float]] = []
    turn = 0
    for shape in shapes:
        # Go on where the last size ended: what was just read may be in some cache.
        own = [*blocks[turn % len(blocks) :], *blocks[: turn % len(blocks)]]
        count, took_s = _read_for(limit_s / len(shapes), store, shape, own, workers, depth)
        if count:
            rates.append((shape.payload_bytes, count * shape.payload_bytes / took_s))
        turn += count
    if not rates:
        return None
    best = max(rate for _, rate in rates)
    size = next(size for size, rate in rates if rate >= _GOOD_ENOUGH * best)
    return Measured(size, best)


def _shapes(store: BlockStore) -> list[RangeShape]:
    shapes: list[RangeShape] = []
    layers = 1
    while True:
        shape = RangeShape(store.geometry, 0, layers, header=True)
        if shapes and shape.stride > _MOST_BYTES:
            return shapes
        shapes.append(shape)
        if layers == store.geometry.layers:
            return shapes
        layers = min(2 * layers, store.geometry.layers)


def _read_for(
    limit_s: float,
    store: BlockStore,
    shape: RangeShape,
    blocks: Sequence[tuple[bytes, Placement]],
    workers: Workers,
    depth: int,
) -> tuple[int, float]:
    """How many blocks were read, and in how many seconds; each block at most once."""
    todo: Iterator[tuple[bytes, Placement]] = iter(blocks)
    good: list[int] = []
    lock = threading.Lock()
    began = time.monotonic()
    end = began + limit_s

    def task(arena: Arena) -> None:
        del arena
        area = aligned(shape.stride)
        count = 0
        while time.monotonic() < end:
            with lock:
                item = next(todo, None)
            if item is None:
                break
            read = store.read_range([RangeItem(*item)], shape, area)
            count += read[0].status is ReadStatus.OK
        good.append(count)

    tasks: list[Task] = [task] * depth
    workers.run(tasks, end)
    return sum(good), max(time.monotonic() - began, 1e-6)
