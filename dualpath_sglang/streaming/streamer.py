"""Reads batches of prefix hits layer by layer.

One thread owns all state and does everything that touches pages; calls from elsewhere, and workers
that have read something, leave a message in its inbox. So a request is either live, and then its
Layer Blocks land, or it has ended, and then nothing of it is ever written again::

    start() ->  locate (worker) -> plan -> read + check (workers) -> land -> announce layers
                                     ^            |
                                     +-- again ---+   a block that failed, looked up anew

What can go wrong ends in the result of the request: no exception leaves this module.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_sglang.scheduling.paths import Side
from dualpath_sglang.streaming.batch import Batch, Part, Request
from dualpath_sglang.streaming.estimate import Forecast
from dualpath_sglang.streaming.landing import DONE, Landed, Staged
from dualpath_sglang.streaming.load import Load, LoadRequest, LoadResult, OnLayer, Outcome
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.other_paths import LOCAL, Alone, OtherPaths
from dualpath_sglang.streaming.pipeline import Pipeline
from dualpath_sglang.streaming.plan import Turns
from dualpath_sglang.streaming.probe import Probe
from dualpath_sglang.streaming.reads import Read
from dualpath_sglang.streaming.remote_side import RemoteSide
from dualpath_sglang.streaming.stats import StreamStats
from dualpath_storage import Geometry, Placement, ReadStatus, StoreError
from dualpath_storage.memory import aligned
from dualpath_storage.ranges import RangeShape

logger = logging.getLogger(__name__)

_POLL_S = 0.0005  # while a device reads pieces


class LayerStreamer:
    """See the module. Thread-safe; one a process is enough.

    Args:
        cache: where the blocks are.
        memory: page-aligned staging memory (pinned, for a CUDA device); None allocates it.
        paths: other nodes that read for this one.
    """

    def __init__(
        self,
        cache: KVCache,
        options: StreamOptions | None = None,
        *,
        memory: memoryview | None = None,
        paths: OtherPaths | None = None,
    ) -> None:
        self.options = options or StreamOptions()
        self._cache = cache
        self._stats = StreamStats()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pipeline = Pipeline(
            cache,
            self.options,
            memory or aligned(self.options.staging_bytes),
            self._inbox.put,
            self._on_read,
            self._stats,
        )
        self._paths = paths or Alone()
        self._remote = RemoteSide(
            self._paths,
            self._pipeline,
            cache.read_queue,
            self._inbox.put,
            self._land,
            self._end,
            self._advance,
            self._stats,
            self.options.hedge_after,
        )
        self._probe = Probe(cache, self.options, self._inbox.put, self._pipeline.meter)
        self._batches: list[Batch] = []
        self._turns = Turns()
        self._closed = False
        self._start_lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="dualpath-stream", daemon=True)
        self._thread.start()

    # -- for callers ------------------------------------------------------------------------

    def check(self, geometry: Geometry) -> None:
        """Whether blocks of this geometry can be streamed.

        Raises:
            StoreError: one layer of one block does not fit into the staging memory.
        """
        layers = range(geometry.layers)
        need = max(RangeShape(geometry, i, i + 1, header=True).stride for i in layers)
        total = self._pipeline.staging.total_bytes
        if need > total:
            raise StoreError(
                f"The staging memory has {total} bytes, but one layer of one page of the pool "
                f"{geometry.pool} needs {need}."
            )

    def measure(self, pool: Pool) -> None:
        """Measure the device in the background, once, if blocks of ``pool`` are there to read."""
        self._inbox.put(partial(self._measure, pool))

    def start(
        self,
        requests: Sequence[LoadRequest],
        *,
        layers: int,
        deadline: float,
        on_layer: OnLayer | None = None,
    ) -> Load:
        """Begin to load a batch; returns at once.

        Args:
            layers: of the model.
            deadline: monotonic seconds; what has not landed by then has failed.
            on_layer: called from the streamer's thread, once a layer and in order, as soon as the
                layer of every live request has landed, and at the deadline at the latest. When
                the load cannot even begin, from the calling thread.
        """
        load = Load(requests, layers, deadline, on_layer, self._cancel)
        try:
            batch = Batch.of(load)
        except Exception:
            logger.exception("A load is not as it must be")
            batch = Batch(load, [], [0] * layers, 0, fences=[{} for _ in range(layers)])
            for request in requests:
                load.settle(request.rid, LoadResult(Outcome.ERROR, "malformed"))
        else:
            with self._start_lock:
                if not self._closed:
                    self._inbox.put(partial(self._begin, batch))
                    return load
            for state in batch.requests:
                batch.take_out(state, Outcome.ERROR)
                load.settle(state.load.rid, LoadResult(Outcome.ERROR, "closed", state.blocks))
        self._advance(batch)
        return load

    def forecast(self) -> Forecast:
        """What a load would take now; from memory."""
        rate = self._pipeline.meter.rate(time.monotonic())
        if rate is not None:
            rate += self._paths.bytes_per_s
        return Forecast(rate, self._cache.read_queue.bytes, self._stalled)

    def stats(self) -> StreamStats:
        """Counters since the start, and what is under way."""
        staging = self._pipeline.staging
        stats = self._stats.copy()
        stats.staging_bytes = staging.total_bytes
        stats.staging_used_bytes = staging.used_bytes
        stats.staging_peak_bytes = staging.peak_bytes
        stats.queued_bytes = self._cache.read_queue.bytes
        stats.in_flight_reads = self._pipeline.in_flight
        stats.io_bytes = self._probe.io_bytes
        return stats

    def close(self, timeout_s: float = 5.0) -> None:
        """End every load with ERROR, announce their layers, and stop the threads.

        A read that hangs in the system keeps its thread and its memory.
        """
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(self._end_all)
        end = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._pipeline.close(max(0.0, end - time.monotonic()))

    # -- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed or self._batches or not self._inbox.empty():
            try:
                self._step()
            except BaseException:  # a load must never be left without its end
                logger.exception("The streaming thread failed; the loads under way end")
                self._end_all()

    def _step(self) -> None:
        message = None
        with contextlib.suppress(queue.Empty):
            message = self._next_message()
        self._expire()
        self._remote.watch()
        if message is not None:
            message()
        self._pipeline.reclaim()
        self._pipeline.fill(self._next_read)

    def _next_message(self) -> Callable[[], None]:
        if not self._inbox.empty():  # how long it could wait costs a look at all reads
            return self._inbox.get_nowait()
        return self._inbox.get(timeout=self._patience_s())

    def _patience_s(self) -> float | None:
        if self._pipeline.copying:
            return _POLL_S
        if not self._batches:
            return None
        nearest = min(batch.load.deadline for batch in self._batches)
        return max(0.0, min(nearest - time.monotonic(), self._remote.patience_s()))

    def _cancel(self, load: Load, rid: str | None) -> None:
        self._inbox.put(partial(self._on_cancel, load, rid))

    def _on_cancel(self, load: Load, rid: str | None) -> None:
        for batch in [batch for batch in self._batches if batch.load is load]:
            self._end_live(batch, Outcome.CANCELLED, rid)

    def _end_all(self) -> None:
        for batch in list(self._batches):
            self._end_live(batch, Outcome.ERROR)

    def _expire(self) -> None:
        now = time.monotonic()
        for batch in [batch for batch in self._batches if batch.load.deadline <= now]:
            self._end_live(batch, Outcome.TIMEOUT)

    # -- a batch comes ----------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._stats.loads += 1
        self._stats.requests += len(batch.requests)
        for request in batch.requests:
            self._cache.read_queue.add(request.queued_bytes, request.queued_tokens)
        if self._stalled:
            self._end_live(batch, Outcome.TIMEOUT, reason="stalled")
            return
        for request in batch.requests:
            if request.left == 0:
                self._end(batch, request, Outcome.OK)
            else:
                self._locate(batch, request)
        self._advance(batch)

    def _locate(self, batch: Batch, request: Request) -> None:
        """Look the blocks up and put them in order, in a worker: a long chain takes a while."""
        missing: list[tuple[Part, list[bytes]]] = []
        done: list[Part] = []

        def look() -> None:
            for part in request.parts if request.live else ():
                keys = part.load.keys
                places = self._cache.locate(part.load.pool, keys)
                there = [place for place in places if place is not None]
                if len(there) < len(keys):
                    absent = [k for k, p in zip(keys, places, strict=True) if p is None]
                    missing.append((part, absent))
                else:
                    part.arrange(there)
                done.append(part)

        def look_ended() -> None:
            batch.unlocated -= 1
            if request.live:
                self._on_located(batch, request, missing, whole=len(done) == len(request.parts))
            if batch.unlocated == 0:
                parts = [part for r in batch.requests if r.live for part in r.parts]
                self._remote.deal(batch, parts, self._own_side(batch))
                most, io_bytes = self._pipeline.piece_bytes, self._probe.io_bytes
                local = [part for part in parts if part.local_blocks]
                batch.make_plan([(p, p.job(self.options, io_bytes, most)) for p in local])
            self._advance(batch)

        batch.unlocated += 1
        self._pipeline.call(look, look_ended)

    def _own_side(self, batch: Batch) -> Side:
        """This node as one that can read, without what it is to read for the batch."""
        theirs = sum(request.queued_bytes for request in batch.requests)
        queued = max(0, self._cache.read_queue.of_machine()[0] - theirs)
        return Side(LOCAL, queued, self._pipeline.rate)

    @property
    def _stalled(self) -> bool:
        """Whether neither this node's store nor another node can be relied on."""
        return self._pipeline.stalled and not self._paths.ready

    def _on_located(
        self,
        batch: Batch,
        request: Request,
        missing: Sequence[tuple[Part, Sequence[bytes]]],
        *,
        whole: bool,
    ) -> None:
        for part, keys in missing:
            self._report(part, [(key, None, ReadStatus.ABSENT) for key in keys])
        if missing:
            self._end(batch, request, Outcome.MISS, ReadStatus.ABSENT.value)
            return
        try:
            if not whole:
                raise RuntimeError("the lookup failed")
            for part in request.parts:
                part.aim()
        except Exception:
            logger.exception("The pages of request %s cannot be loaded", request.load.rid)
            self._end(batch, request, Outcome.ERROR)

    # -- reading ----------------------------------------------------------------------------

    def _next_read(self) -> Read | None:
        while waiting := [b for b in self._batches if b.plan is not None or b.rest]:
            batch = waiting[self._turns.next(len(waiting))]
            read = batch.next_of_rest()
            if read is not None:
                return read
            for chunk in batch.plan or ():
                part = batch.parts[chunk.job]
                if part.request.live:
                    layers = (chunk.first_layer, chunk.end_layer)
                    return Read(batch, part, chunk.begin, chunk.end, *layers)
            batch.plan = None
        return None

    def _on_read(self, read: Read) -> Landed:
        batch, request = read.batch, read.part.request
        landed = DONE
        try:
            if read.results is None:
                self._end(batch, request, Outcome.ERROR, "read")
            else:
                landed = self._land_read(read)
                self._deal_with_bad(read)
        except Exception:
            logger.exception("A piece of request %s cannot land", request.load.rid)
            if request.live:
                self._end(batch, request, Outcome.ERROR)
        self._advance(batch)
        return landed

    def _land_read(self, read: Read) -> Landed:
        part = read.part
        assert read.results is not None
        self._remote.local_came(part)
        landed = DONE
        for begin, end in read.good_runs():
            checksums = []
            for block in range(begin, end):
                part.places[block] = read.place(block)
                part.checksums[block] = sums = read.results[block - read.begin].checksums
                checksums.append(sums if sums is not None else ())
            size = (end - begin) * read.shape.payload_bytes
            part.request.queued_bytes -= size
            self._cache.read_queue.add(-size)
            self._stats.read_bytes += size
            if read.attempt:
                self._stats.repaired_blocks += end - begin
            staged = Staged(read.memory_of(begin), read.shape, begin, end - begin, checksums)
            landed = self._land(read.batch, part, staged, range(begin, end))
            if not part.request.live:
                break
        return landed

    def _land(self, batch: Batch, part: Part, staged: Staged, blocks: range) -> Landed:
        """Put checked layers into the pages; whoever brought them."""
        assert part.target is not None
        landed = part.target.land(staged)
        batch.note_fences(part, staged.shape.first, landed)
        batch.landed(part, blocks, staged.shape.first, staged.shape.end)
        if part.request.left == 0:
            self._end(batch, part.request, Outcome.OK)
        return landed

    def _deal_with_bad(self, read: Read) -> None:
        part = read.part
        for block, status in read.bad_blocks():
            if read.attempt < self.options.retries:
                self._stats.reread_blocks += 1
                self._pipeline.again(read.again(block))
                continue
            row = (part.key(block), read.place(block), status)
            if part.request.live and self._remote.local_failed(read.batch, part, block):
                part.suspects.append(row)  # it may be this node's fault
                continue
            self._report(part, [row])
            if part.request.live:
                self._end(read.batch, part.request, Outcome.MISS, status.value)

    def _report(
        self, part: Part, rows: Sequence[tuple[bytes, Placement | None, ReadStatus]]
    ) -> None:
        """Tell the cache, in a worker: it may have to wait for its index."""
        self._pipeline.call(partial(self._cache.report, part.load.pool, rows))

    # -- the end of things ------------------------------------------------------------------

    def _end_live(
        self, batch: Batch, outcome: Outcome, rid: str | None = None, reason: str = ""
    ) -> None:
        """End one request of a batch, or all, if they are still live."""
        for request in batch.requests:
            if request.live and rid in (None, request.load.rid):
                self._end(batch, request, outcome, reason)
        self._advance(batch)

    def _end(self, batch: Batch, request: Request, outcome: Outcome, reason: str = "") -> None:
        """A request has its result; nothing of it lands any more. Then :meth:`_advance`."""
        load = batch.load
        seconds = time.monotonic() - load.began
        self._cache.read_queue.add(-request.queued_bytes, -request.queued_tokens)
        batch.take_out(request, outcome)
        late = outcome is Outcome.TIMEOUT or self._remote.hangs(request)
        self._pipeline.abandon(request, late=late)
        self._remote.abandon(request)
        load.settle(
            request.load.rid,
            LoadResult(outcome, reason, request.blocks, request.read_bytes, seconds),
        )
        for part in request.parts:
            if part.suspects and outcome is Outcome.MISS:
                self._report(part, part.suspects)
        if outcome is Outcome.OK:
            self._stats.blocks += request.blocks
            if request.load.hint is not None:
                kind = "replaced" if request.replaced else "honoured"
                self._stats.hinted[kind] = self._stats.hinted.get(kind, 0) + 1
            for part in request.parts:
                self._report(part, part.outcomes())
            return
        failed = self._stats.failed_requests
        failed[outcome.value] = failed.get(outcome.value, 0) + 1
        logger.log(
            logging.DEBUG if outcome is Outcome.CANCELLED else logging.WARNING,
            "The load of request %s ended with %s %s after %.3f s",
            request.load.rid,
            outcome.value,
            reason,
            seconds,
        )

    def _advance(self, batch: Batch) -> None:
        """Announce what is ready, and let go of a batch that is over."""
        load = batch.load
        if load.done:
            return
        for _ in range(batch.ready_layers(len(load.ready_s))):
            layer = load.announce()
            if load.on_layer is not None:
                try:
                    load.on_layer(layer, tuple(batch.fences[layer].values()))
                except Exception:
                    logger.exception("The listener for layer %d failed", layer)
        if batch.over:
            if batch in self._batches:
                self._batches.remove(batch)
            load.finish(tuple(batch.last.values()))
            if batch.parts:
                self._measure(batch.parts[0].load.pool)

    def _measure(self, pool: Pool) -> None:
        if not self._closed and not self._batches:
            self._probe.begin(pool)
