"""The other side of a read: what other nodes bring, and who takes over from whom.

Used by the streamer's thread alone. A hit's blocks are dealt out once, when they have been located.
A side that fails, or from which nothing has come for a while, is replaced: what it still owes is
asked of the other one, once. Whatever lands first counts. This machine's own agent, which only
gives what it has in memory, is no side: what it does not bring is dealt out as if it had not been
asked.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualpath_sglang.read_queue import ReadQueue
from dualpath_sglang.scheduling.paths import Share, Side
from dualpath_sglang.streaming.batch import Batch, Part, Request
from dualpath_sglang.streaming.estimate import too_slow
from dualpath_sglang.streaming.hedging import By
from dualpath_sglang.streaming.landing import DONE, Landed, Packed, Staged
from dualpath_sglang.streaming.load import Outcome
from dualpath_sglang.streaming.other_paths import LOCAL, Blame, OtherPaths
from dualpath_sglang.streaming.pipeline import Pipeline
from dualpath_sglang.streaming.reads import Read, reads_of_rest
from dualpath_sglang.streaming.remote_read import RemoteRead
from dualpath_sglang.streaming.staging import Piece
from dualpath_sglang.streaming.stats import StreamStats
from dualpath_sglang.transport.base import MAX_BLOCKS, End, Span
from dualpath_storage import Geometry, ReadStatus

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.005
_AGAIN_S = 0.1
"""When nobody can be asked now, but perhaps then."""
_RESCUES = 4
"""Fetches of a part, at a time, of blocks that this node cannot read: the others wait and go
together, for an agent takes on only so many fetches."""


@dataclass(slots=True)
class _Local:
    """What this node reads of a part: since when nothing has come (monotonic seconds)."""

    batch: Batch
    since: float
    hangs: bool = False
    """Whether it was found late, and nothing has come since."""


class RemoteSide:
    """See the module.

    Args:
        paths: the other nodes.
        queue: what this node is to read.
        post: leaves a message for the streamer's thread.
        land: puts checked layers into the pages, and notes it.
        end: of a request that cannot be loaded, or is to be no more: how, and why.
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
        end: Callable[[Batch, Request, Outcome, str], None],
        advance: Callable[[Batch], None],
        stats: StreamStats,
        hedge_after: float,
    ) -> None:
        self._paths = paths
        self._pipeline = pipeline
        self._queue = queue
        self._post = post
        self._land = land
        self._end = end
        self._advance = advance
        self._stats = stats
        self._hedge_after = hedge_after
        self._reads: dict[RemoteRead, None] = {}
        self._local: dict[Part, _Local] = {}
        """Parts of which this node reads something."""
        self._asking: Counter[str] = Counter()
        """By side: bytes that a worker is about to ask it for."""
        self._unread: dict[Part, list[int]] = {}
        """Blocks that this node cannot read and that another is to be asked for."""
        self._looked = -math.inf

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
            if not blocks:
                continue
            side = Side(LOCAL, queued, own.rate)
            hinted = self._hinted(part, range(blocks))
            nearby = self._nearby(geometry, hinted)
            shares: Sequence[Share]
            if nearby is not None:
                shares, hinted = [Share(nearby, 0, blocks)], None  # what it lacks is dealt again
            elif hinted is not None and {*hinted} == {LOCAL}:
                shares, hinted = [Share(LOCAL, 0, blocks)], None
            elif hinted is not None:
                shares = []
            else:
                shares = self._paths.shares(geometry, blocks, side, self._asking)
            part.local_blocks = sum(share.count for share in shares if share.side == LOCAL)
            queued += part.local_blocks * geometry.block_bytes
            others = (blocks - part.local_blocks) * geometry.block_bytes
            request.queued_bytes -= others
            self._queue.add(-others)
            part.progress.ask(By.LOCAL, range(part.local_blocks))
            if part.local_blocks:
                self._local[part] = _Local(batch, now)
            for share in shares:
                if share.side != LOCAL:
                    blocks_of = range(share.first, share.first + share.count)
                    self._ask(batch, part, blocks_of, share.side, cached_only=nearby is not None)
            if hinted is not None:
                self._deal_hinted(batch, part, range(blocks), hinted)
        for request in {part.request: None for part in parts}:
            self._queue.add(0, request.local_tokens - request.queued_tokens)
            request.queued_tokens = request.local_tokens

    def _deal_again(self, batch: Batch, part: Part, blocks: Sequence[int]) -> None:
        """What this machine's agent does not have in memory: decide who reads it."""
        hinted = self._hinted(part, blocks)
        if hinted is None:
            self._share_out(batch, part, blocks)
        else:
            self._deal_hinted(batch, part, blocks, hinted)

    def _share_out(self, batch: Batch, part: Part, blocks: Sequence[int]) -> None:
        own = Side(LOCAL, self._queue.of_machine()[0], self._pipeline.rate)
        geometry = part.load.pool.geometry
        for share in self._paths.shares(geometry, len(blocks), own, self._asking):
            some = blocks[share.first : share.first + share.count]
            if share.side == LOCAL:
                self._read_locally(batch, part, some, batch.put)
            else:
                self._ask(batch, part, some, share.side)

    # -- hints ------------------------------------------------------------------------------

    def _hinted(self, part: Part, blocks: Sequence[int]) -> Sequence[str | None] | None:
        """By block: who reads it by the request's hint; None when there is none to follow."""
        hint = part.request.load.hint
        if hint is None:
            return None
        keys = [part.key(block) for block in blocks]
        return self._paths.hinted(part.load.pool.geometry, keys, hint)

    def _nearby(self, geometry: Geometry, hinted: Sequence[str | None] | None) -> str | None:
        """This machine's agent, to be asked for what it has in memory before anybody else.

        Not when it is to read anything itself: then it is asked for that at once.
        """
        nearby = self._paths.nearby(geometry)
        return None if hinted is not None and nearby in hinted else nearby

    def _deal_hinted(
        self, batch: Batch, part: Part, blocks: Sequence[int], hinted: Sequence[str | None]
    ) -> None:
        """Ask whom the hint says; what nobody can be asked for is dealt out as without one."""
        groups: dict[str | None, list[int]] = {}
        for block, side in zip(blocks, hinted, strict=True):
            groups.setdefault(side, []).append(block)
        for side, some in groups.items():
            if side is None:
                part.request.replaced = True
                self._share_out(batch, part, some)
            elif side == LOCAL:
                self._read_locally(batch, part, some, batch.put)
            else:
                self._ask(batch, part, some, side)

    def _ask(
        self,
        batch: Batch,
        part: Part,
        blocks: Sequence[int],
        side: str,
        *,
        cached_only: bool = False,
        rescue: bool = False,
    ) -> None:
        part.progress.ask(By.REMOTE, blocks)
        for at in range(0, len(blocks), MAX_BLOCKS):
            some = blocks[at : at + MAX_BLOCKS]
            self._fetch(batch, part, some, side, cached_only=cached_only, rescue=rescue)

    def _fetch(
        self,
        batch: Batch,
        part: Part,
        blocks: Sequence[int],
        side: str,
        *,
        cached_only: bool,
        rescue: bool,
    ) -> None:
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
            rescue=rescue,
        )
        self._reads[read] = None
        self._asking[side] += read.total_bytes
        self._stats.remote_fetches += 1

        def begin() -> None:
            going = self._paths.begin(side, read.request, read, read)
            if going is not None:
                read.going(going)

        def begun() -> None:
            self._asking[side] -= read.total_bytes
            if not self._asking[side]:
                del self._asking[side]
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
                    self._replace(read, [read.blocks[span.first + i] for i in bad])
        except Exception:
            logger.exception("A piece of request %s cannot land", part.request.load.rid)
            if part.request.live:
                self._end(batch, part.request, Outcome.ERROR, "")
        finally:
            # What was copied last was copied in one order with what was copied before, by the one
            # device that has the part's pages: its fence stands for the whole piece.
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
            size = len(blocks) * shape.stride
            read.landed_bytes += size  # before the request ends, if this was all of it
            landed = self._land(read.batch, read.part, staged, blocks)
            self._stats.remote_bytes += size
            if self._paths.is_own(read.side):
                self._stats.own_agent_bytes += size
        return landed

    def remote_missing(self, read: RemoteRead, blocks: Sequence[int]) -> None:
        """The node does not have these."""
        if read.part.request.live:
            self._replace(read, blocks)
            self._advance(read.batch)

    def remote_ended(self, read: RemoteRead, end: End) -> None:
        """Nothing more comes of this read."""
        if read not in self._reads:
            return  # it was replaced, or nobody wants it
        left = read.part.progress.unfinished(sorted(read.wanted))
        if left:
            self._stats.remote_failed += 1
            logger.debug("%s ended %s with %d blocks left", read.side, end.name, len(left))
            self._replace(read, left)
        self._over(read)

    def _over(self, read: RemoteRead) -> None:
        """Nothing more of this read is waited for."""
        self._reads.pop(read, None)  # or the request has ended over it
        if read.part.request.live:
            self._rescue(read.batch, read.part)
        self._advance(read.batch)

    def local_came(self, part: Part) -> None:
        """This node has read something of a part."""
        local = self._local.get(part)
        if local is not None:
            local.since, local.hangs = time.monotonic(), False

    def local_failed(self, batch: Batch, part: Part, block: int) -> bool:
        """This node cannot read a block; whether another is asked for it."""
        more, lost = part.progress.failed(By.LOCAL, [block])
        if not more:
            return not lost
        part.request.replaced = True
        if part not in self._unread and self._paths.substitute(part.load.pool.geometry) is None:
            return False
        part.progress.ask(By.REMOTE, more)
        self._unread.setdefault(part, []).extend(more)
        self._rescue(batch, part)
        return True

    def hangs(self, request: Request) -> bool:
        """Whether nothing of this node's share has come for so long that others were asked."""
        return any(part in self._local and self._local[part].hangs for part in request.parts)

    # -- who takes over ---------------------------------------------------------------------

    def _rescue(self, batch: Batch, part: Part) -> None:
        """Ask another node for blocks that this one cannot read, if it is their turn."""
        if part not in self._unread:
            return
        if sum(read.rescue and read.part is part for read in self._reads) >= _RESCUES:
            return
        blocks = part.progress.unfinished(sorted(self._unread.pop(part)))
        side = self._paths.substitute(part.load.pool.geometry)
        if side is None:
            self._take_over(batch, part, blocks)
        elif blocks:
            self._ask(batch, part, blocks, side, rescue=True)

    def _replace(self, read: RemoteRead, blocks: Sequence[int]) -> None:
        """Somebody else is to bring some blocks of a read, if that was not seen to already."""
        if read not in self._reads:
            return
        part = read.part
        read.forget(blocks)
        if not read.cached_only:
            self._take_over(read.batch, part, blocks)
        elif left := part.progress.unfinished(sorted(blocks)):
            part.progress.unask(By.REMOTE, left)
            self._deal_again(read.batch, part, left)

    def _take_over(self, batch: Batch, part: Part, blocks: Sequence[int]) -> None:
        """Another node does not bring these: this one reads them, unless it has failed to."""
        more, lost = part.progress.failed(By.REMOTE, sorted(blocks))
        if lost:
            self._end(batch, part.request, Outcome.MISS, ReadStatus.ABSENT.value)
        elif more:
            part.request.replaced = True
            # What is late goes before anything new.
            size = self._read_locally(batch, part, more, self._pipeline.again)
            self._stats.hedged_bytes += size

    def _read_locally(
        self, batch: Batch, part: Part, blocks: Sequence[int], put: Callable[[Read], None]
    ) -> int:
        """Have this node read what is missing of some blocks; how much that is."""
        part.progress.ask(By.LOCAL, blocks)
        self._local[part] = _Local(batch, time.monotonic())
        reads = reads_of_rest(
            batch, part, blocks, self._pipeline.options, self._pipeline.piece_bytes
        )
        size = sum(read.payload_bytes for read in reads)
        for read in sorted(reads, key=lambda read: read.first_layer):
            put(read)
        part.request.queued_bytes += size
        self._queue.add(size)
        return size

    # -- time -------------------------------------------------------------------------------

    def patience_s(self) -> float:
        """Until :meth:`watch` may find a side late."""
        now = time.monotonic()
        times = [self._late_at(read.batch, read.heard) for read in self._reads]
        times += [self._late_at(local.batch, local.since) for local in self._local.values()]
        return max(0.0, self._looked + _LOOK_EVERY_S - now, min(times, default=math.inf) - now)

    def watch(self) -> None:
        """Replace sides that are late."""
        now = time.monotonic()
        if now < self._looked + _LOOK_EVERY_S:
            return  # it looks at everything under way, and is called for everything that comes
        self._looked = now
        for read in [read for read in self._reads if self._is_late(read, now)]:
            if read in self._reads and read.part.request.live:
                self._replace_late(read)
        for part, local in list(self._local.items()):
            if now >= self._late_at(local.batch, local.since):
                self._look_at_local(part, local, now)

    def _replace_late(self, read: RemoteRead) -> None:
        left = read.part.progress.unfinished(sorted(read.wanted))
        if left:
            logger.debug("%s is late with %d blocks", read.side, len(left))
            self._stats.hedges += 1
            self._paths.blame(read.side, Blame.LATE)
            self._replace(read, left)
        self._drop(read)
        self._over(read)

    def _look_at_local(self, part: Part, local: _Local, now: float) -> None:
        """This node has brought nothing of a part for long."""
        local.since = math.inf  # until something comes
        waiting = part.progress.waiting(By.LOCAL)
        if not waiting:
            return
        local.hangs = True
        side = self._paths.substitute(part.load.pool.geometry)
        if side is None:
            local.since = now + _AGAIN_S - self._patience_of(local.batch)
        else:
            self._stats.hedges += 1
            part.request.replaced = True
            self._ask(local.batch, part, waiting, side)

    def _late_at(self, batch: Batch, heard: float) -> float:
        """When a side from which nothing has come since then is late."""
        return heard + self._patience_of(batch)

    def _patience_of(self, batch: Batch) -> float:
        return self._hedge_after * (batch.load.deadline - batch.load.began)

    def _is_late(self, read: RemoteRead, now: float) -> bool:
        if now >= self._late_at(read.batch, read.heard):
            return True
        end, done = read.batch.load.deadline, read.landed_bytes
        return now >= self._late_at(read.batch, read.began) and too_slow(
            read.began, now, end, done=done, total=read.total_bytes
        )

    # -- the end ----------------------------------------------------------------------------

    def abandon(self, request: Request) -> None:
        """A request has ended: nobody wants what is still under way for it."""
        for read in [read for read in self._reads if read.part.request is request]:
            self._reads.pop(read)
            if not read.complete:  # then its end is on its way
                self._drop(read)
        for part in request.parts:
            self._local.pop(part, None)
            self._unread.pop(part, None)

    def _drop(self, read: RemoteRead) -> None:
        read.turn_away()
        self._pipeline.call(read.give_up)
