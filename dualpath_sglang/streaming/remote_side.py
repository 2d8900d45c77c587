"""The other side of a read: what other nodes bring, and who takes over from whom.

Used by the streamer's thread alone. A hit's blocks are dealt out once, when they have been located.
A side that fails, or from which nothing has come for a while, is replaced: what it still owes is
asked of the other one, once. Whatever lands first counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from dualpath_sglang.read_queue import ReadQueue
from dualpath_sglang.scheduling.paths import Share, Side
from dualpath_sglang.streaming.batch import Batch, Part, Request
from dualpath_sglang.streaming.hedging import By
from dualpath_sglang.streaming.landing import DONE, Landed, Packed, Staged
from dualpath_sglang.streaming.other_paths import LOCAL, Blame, OtherPaths
from dualpath_sglang.streaming.pipeline import Pipeline
from dualpath_sglang.streaming.plan import layer_ranges
from dualpath_sglang.streaming.reads import Read
from dualpath_sglang.streaming.remote_read import RemoteRead
from dualpath_sglang.streaming.staging import Piece
from dualpath_sglang.streaming.stats import StreamStats
from dualpath_sglang.transport.base import End, Span
from dualpath_storage import ReadStatus
from dualpath_storage.ranges import RangeShape

logger = logging.getLogger(__name__)

_AHEAD = 0.9
"""Share of the time until the deadline by which a side must be expected to be through."""


class RemoteSide:
    """See the module.

    Args:
        paths: the other nodes.
        queue: what this node is to read.
        post: leaves a message for the streamer's thread.
        land: puts checked layers into the pages, and notes it.
        lost: a block that no side brings: its request ends.
        advance: tells whoever waits for a batch what has changed.
        stats: counts what other nodes brought.
        hedge_after: share of a load's time after which a side that brings nothing is late.
    """

    def __init__(
        self,
        paths: OtherPaths,
        pipeline: Pipeline,
        queue: ReadQueue,
        post: Callable[[Callable[[], None]], None],
        land: Callable[[Batch, Part, Staged, range], Landed],
        lost: Callable[[Batch, Request, str], None],
        advance: Callable[[Batch], None],
        stats: StreamStats,
        hedge_after: float,
    ) -> None:
        self._paths = paths
        self._pipeline = pipeline
        self._queue = queue
        self._post = post
        self._land = land
        self._lost = lost
        self._advance = advance
        self._stats = stats
        self._hedge_after = hedge_after
        self._reads: dict[RemoteRead, None] = {}
        self._local: dict[Part, tuple[Batch, float]] = {}
        """Parts that this node reads from: since when nothing has come."""

    # -- a batch is dealt out ---------------------------------------------------------------

    def deal(self, batch: Batch, parts: Sequence[Part], own: Side) -> None:
        """Decide who reads which blocks, and ask the others.

        Args:
            own: this node, without what it is to read for these parts.
        """
        now = time.monotonic()
        queued = own.queue_bytes
        for part in parts:
            geometry, request, blocks = part.load.pool.geometry, part.request, len(part.load.keys)
            side = Side(LOCAL, queued, own.rate)
            nearby = self._paths.nearby(geometry)
            shares = (
                self._paths.shares(geometry, blocks, side)
                if nearby is None
                else [Share(nearby, 0, blocks)]
            )
            part.local_blocks = sum(share.count for share in shares if share.side == LOCAL)
            queued += part.local_blocks * geometry.block_bytes
            others = (blocks - part.local_blocks) * geometry.block_bytes
            request.queued_bytes -= others
            self._queue.add(-others)
            part.progress.ask(By.LOCAL, range(part.local_blocks))
            if part.local_blocks:
                self._local[part] = (batch, now)
            for share in shares:
                if share.side != LOCAL:
                    blocks_of = range(share.first, share.first + share.count)
                    self._ask(batch, part, blocks_of, share.side, cached_only=nearby is not None)
        for request in {part.request: None for part in parts}:
            self._queue.add(0, request.local_tokens - request.queued_tokens)
            request.queued_tokens = request.local_tokens

    def _deal_again(self, batch: Batch, part: Part, blocks: Sequence[int]) -> None:
        """What this machine's agent does not have in memory: decide who reads it."""
        rate = self._pipeline.rate
        own = Side(LOCAL, self._queue.of_machine()[0], rate)
        for share in self._paths.shares(part.load.pool.geometry, len(blocks), own):
            some = blocks[share.first : share.first + share.count]
            if share.side == LOCAL:
                self._read_locally(batch, part, some)
            else:
                self._ask(batch, part, some, share.side)

    def _ask(
        self,
        batch: Batch,
        part: Part,
        blocks: Sequence[int],
        side: str,
        *,
        cached_only: bool = False,
    ) -> None:
        part.progress.ask(By.REMOTE, blocks)
        read = RemoteRead(
            batch,
            part,
            blocks,
            part.progress.first_layer(blocks),
            side,
            self._pipeline.staging,
            self._post,
            self,
            cached_only=cached_only,
        )
        self._reads[read] = None
        self._stats.remote_fetches += 1

        def begin() -> None:
            going = self._paths.begin(side, read.request, read, read)
            if going is not None:
                read.going(going)

        def begun() -> None:
            if read.refused:
                self.remote_ended(read, End.LOST)

        self._pipeline.call(begin, begun)

    # -- what came (see Listener) -----------------------------------------------------------

    def remote_piece(self, read: RemoteRead, span: Span, piece: Piece, bad: Sequence[int]) -> None:
        """Put what is good of a piece into the pages."""
        batch, part = read.batch, read.part
        landed = DONE
        try:
            if part.request.live:
                read.heard = time.monotonic()
                landed = self._land_piece(read, span, piece, bad)
                if bad:
                    self._stats.remote_bad_blocks += len(bad)
                    self._paths.blame(read.side, Blame.BAD)
                    self._take_over(batch, part, [read.blocks[span.first + i] for i in bad])
        finally:
            self._pipeline.give(piece, landed)
        self._advance(batch)

    def _land_piece(self, read: RemoteRead, span: Span, piece: Piece, bad: Sequence[int]) -> Landed:
        shape = Packed(read.part.load.pool.geometry, span.first_layer, span.end_layer)
        landed = DONE
        for blocks, at in read.runs(span, bad):
            if not read.part.request.live:
                break
            memory = piece.memory[at * shape.stride :]
            staged = Staged(memory, shape, blocks.start, len(blocks))
            landed = self._land(read.batch, read.part, staged, blocks)
            size = len(blocks) * shape.stride
            read.landed_bytes += size
            read.part.request.remote_bytes += size
            self._stats.remote_bytes += size
        return landed

    def remote_missing(self, read: RemoteRead, blocks: Sequence[int]) -> None:
        """The node does not have these."""
        if not read.part.request.live:
            return
        if read.cached_only:
            read.forget(blocks)
            self._deal_again(read.batch, read.part, blocks)
        else:
            self._take_over(read.batch, read.part, blocks)
        self._advance(read.batch)

    def remote_ended(self, read: RemoteRead, end: End) -> None:
        """Nothing more comes of this read."""
        if read not in self._reads:
            return  # it was replaced, or nobody wants it
        del self._reads[read]
        left = read.part.progress.unfinished(read.wanted) if read.part.request.live else []
        if left:
            self._stats.remote_failed += 1
            logger.debug("%s ended %s with %d blocks left", read.side, end.name, len(left))
            self._take_over(read.batch, read.part, left)
            self._advance(read.batch)

    def local_came(self, part: Part) -> None:
        """This node has read something of a part."""
        if part in self._local:
            self._local[part] = (self._local[part][0], time.monotonic())

    def local_failed(self, batch: Batch, part: Part, block: int) -> bool:
        """This node cannot read a block; whether another was asked for it, or is already."""
        more, lost = part.progress.failed(By.LOCAL, [block])
        if not more:
            return not lost
        side = self._paths.substitute(part.load.pool.geometry)
        if side is not None:
            self._ask(batch, part, more, side)
        return side is not None

    # -- who takes over ---------------------------------------------------------------------

    def _take_over(self, batch: Batch, part: Part, blocks: Sequence[int]) -> None:
        """Another node does not bring these: this one reads them, unless it has failed to."""
        more, lost = part.progress.failed(By.REMOTE, sorted(blocks))
        if lost:
            self._lost(batch, part.request, ReadStatus.ABSENT.value)
        elif more:
            self._stats.hedged_bytes += self._read_locally(batch, part, more)

    def _read_locally(self, batch: Batch, part: Part, blocks: Sequence[int]) -> int:
        """Have this node read what is missing of some blocks, before anything new; how much."""
        geometry, request = part.load.pool.geometry, part.request
        part.progress.ask(By.LOCAL, blocks)
        self._local[part] = (batch, time.monotonic())
        most, options = self._pipeline.piece_bytes, self._pipeline.options
        reads: list[Read] = []
        size = 0
        for begin, end, first in part.progress.runs(blocks):
            ranges = layer_ranges(
                geometry.layers - first,
                geometry.layer_bytes,
                options.first_io_bytes,
                options.io_bytes or most,
                most,
            )
            for low, high in ((first + a, first + b) for a, b in ranges):
                fair = -(-(end - begin) // options.queue_depth)
                stride = RangeShape(geometry, low, high, header=True).stride
                step = max(1, min(most // stride, fair))
                reads += [
                    Read(batch, part, at, min(at + step, end), low, high)
                    for at in range(begin, end, step)
                ]
            size += (end - begin) * (geometry.layers - first) * geometry.layer_bytes
        for read in sorted(reads, key=lambda read: read.first_layer):
            self._pipeline.again(read)
        request.queued_bytes += size
        self._queue.add(size)
        return size

    # -- time -------------------------------------------------------------------------------

    def patience_s(self) -> float:
        """Until :meth:`watch` may find a side late."""
        now = time.monotonic()
        times = [self._late_at(read.batch, read.heard) for read in self._reads]
        times += [self._late_at(batch, came) for batch, came in self._local.values()]
        return max(0.0, min(times, default=math.inf) - now)

    def watch(self) -> None:
        """Replace sides that are late."""
        now = time.monotonic()
        for read in list(self._reads):
            if read.part.request.live and self._is_late(read, now):
                logger.debug("%s is late with %d blocks", read.side, len(read.blocks))
                self._stats.hedges += 1
                self._paths.blame(read.side, Blame.LATE)
                self._reads.pop(read)
                self._pipeline.call(read.give_up)
                left = read.part.progress.unfinished(read.wanted)
                self._take_over(read.batch, read.part, left)
                self._advance(read.batch)
        for part, (batch, came) in list(self._local.items()):
            if now < self._late_at(batch, came):
                continue
            self._local[part] = (batch, math.inf)  # until something comes
            waiting = part.progress.waiting(By.LOCAL)
            side = self._paths.substitute(part.load.pool.geometry)
            if waiting and side is not None:
                self._stats.hedges += 1
                self._ask(batch, part, waiting, side)

    def _late_at(self, batch: Batch, heard: float) -> float:
        """When a side from which nothing has come since then is late."""
        budget_s = batch.load.deadline - batch.load.began
        return heard + self._hedge_after * budget_s

    def _is_late(self, read: RemoteRead, now: float) -> bool:
        if now >= self._late_at(read.batch, read.heard):
            return True
        load = read.batch.load
        elapsed_s = now - read.began
        if elapsed_s < self._hedge_after * (load.deadline - load.began) or not read.landed_bytes:
            return False
        through = read.began + elapsed_s * read.total_bytes / read.landed_bytes
        return through > load.began + _AHEAD * (load.deadline - load.began)

    # -- the end ----------------------------------------------------------------------------

    def abandon(self, request: Request) -> None:
        """A request has ended: nobody wants what is still under way for it."""
        for read in [read for read in self._reads if read.part.request is request]:
            self._reads.pop(read)
            self._pipeline.call(read.give_up)
        for part in request.parts:
            self._local.pop(part, None)
