"""Reads in flight: the workers, the staging memory, and who waits for it.

Used by the streamer's thread alone; what a worker has done comes back as a message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.streaming.batch import Request
from dualpath_sglang.streaming.estimate import RateMeter
from dualpath_sglang.streaming.landing import DONE, Fence, Landed
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.reads import Read
from dualpath_sglang.streaming.staging import Piece, Staging
from dualpath_sglang.streaming.stats import StreamStats
from dualpath_storage.memory import Arena
from dualpath_storage.workers import Workers

_CALLERS = 4


class Pipeline:
    """See the module.

    Args:
        memory: the staging memory.
        post: leaves a message for the streamer's thread.
        arrived: is called there with a read that is back and still wanted; what it returns says
            when the piece may be used again.
        stats: counts the reads.
    """

    def __init__(
        self,
        cache: KVCache,
        options: StreamOptions,
        memory: memoryview,
        post: Callable[[Callable[[], None]], None],
        arrived: Callable[[Read], Landed],
        stats: StreamStats,
    ) -> None:
        self.staging = Staging(memory)
        self.meter = RateMeter()
        self._cache = cache
        self.options = options
        self._depth = options.queue_depth
        self._workers = Workers(options.queue_depth, "dualpath-stream-read")
        # Reads that hang in the system must not keep up what could be done about it.
        self._callers = Workers(_CALLERS, "dualpath-stream-call")
        self._post = post
        self._arrived = arrived
        self._stats = stats
        self._again: deque[Read] = deque()
        self._held: Read | None = None  # waits for staging memory; nothing overtakes it
        self._reading: set[Read] = set()
        self._late: set[Read] = set()  # given up at a deadline, not back yet
        self._copying: deque[tuple[Fence, Piece]] = deque()

    @property
    def piece_bytes(self) -> int:
        """Most bytes of one read."""
        return min(self.options.piece_bytes, self.staging.total_bytes // 2)

    @property
    def rate(self) -> float | None:
        """Bytes a second that this node's store may be expected to do.

        0 when it hangs, None when nobody has measured.
        """
        return 0.0 if self.stalled else self.meter.hope(time.monotonic())

    @property
    def in_flight(self) -> int:
        """Reads that are in a worker's hands, or ready for one."""
        return len(self._reading)

    @property
    def stalled(self) -> bool:
        """Whether so many late reads are still out that the store cannot be relied on."""
        return len(self._late) >= max(1, self._depth // 2)

    @property
    def copying(self) -> bool:
        """Whether a device still reads pieces."""
        return bool(self._copying)

    def call(self, task: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Run something that may block in a worker, and ``then`` in the streamer's thread."""

        def run(arena: Arena) -> None:
            del arena
            task()

        self._callers.submit(run, lambda: None if then is None else self._post(then))

    def fill(self, next_read: Callable[[], Read | None]) -> None:
        """Keep the workers busy, and as many reads again ready for them."""
        while len(self._reading) < 2 * self._depth:
            read = self._held or (self._again.popleft() if self._again else next_read())
            self._held = None
            if read is None:
                return
            if not read.part.request.live:
                continue
            if read.extra_header:
                if len(self._reading) >= self._depth:
                    self._held = read  # by the time a worker is free the header may be known
                    return
                read = read.renewed()
            piece = self.staging.take(read.size_bytes)
            if piece is None:
                self._held = read
                return
            self._submit(read, piece)

    def again(self, read: Read) -> None:
        """Read this before anything new."""
        self._again.append(read)

    def _submit(self, read: Read, piece: Piece) -> None:
        read.prepare(piece)
        if not self._reading:  # what was read before may have been given up
            self.meter.pause()
        self._reading.add(read)
        self._stats.reads += 1
        self._workers.submit(
            partial(read.run, self._cache), lambda: self._post(partial(self._on_read, read))
        )

    def _on_read(self, read: Read) -> None:
        if read not in self._reading:
            return  # given up before it began
        full = len(self._reading) >= self._depth
        self._reading.remove(read)
        landed = DONE
        try:
            if not read.abandoned:
                now = time.monotonic()
                self.meter.note(read.payload_bytes, now, full=full)
                if read.seconds > 0:
                    self.meter.at_least(read.payload_bytes / read.seconds, now)
                self._stats.read_s += read.seconds
                landed = self._arrived(read)
            elif read in self._late:
                self._late.remove(read)
                self._stats.retired_bytes -= read.piece_bytes
        finally:
            self._give(read, landed)

    def abandon(self, request: Request, *, late: bool) -> None:
        """Nobody wants the reads of a request any more; ``late``: its deadline has passed."""
        for read in [r for r in self._reading if r.part.request is request]:
            if read.abandon():
                self._reading.remove(read)
                self._give(read, DONE)
            elif late:
                self._stats.abandoned_reads += 1
                self._stats.retired_bytes += read.piece_bytes
                self._late.add(read)

    def _give(self, read: Read, landed: Landed) -> None:
        assert read.piece is not None
        self.give(read.piece, landed)

    def give(self, piece: Piece, landed: Landed = DONE) -> None:
        """Take a piece back, once a device has read it too."""
        if landed.copied is not None:
            self._copying.append((landed.copied, piece))
        else:
            self.staging.give(piece)

    def reclaim(self) -> None:
        """Take back the pieces that a device has read."""
        while self._copying and self._copying[0][0].finished():
            self.staging.give(self._copying.popleft()[1])

    def close(self, timeout_s: float) -> None:
        """Stop the workers. One that hangs in the system is left, with its memory."""
        end = time.monotonic() + timeout_s
        self._workers.close(timeout_s)
        self._callers.close(max(0.0, end - time.monotonic()))
