"""What of some blocks is sent next: earlier layers first, in pieces that grow, of what is there.

The first layer comes alone, then more at once, as they are read: layers that are sent together
cost less. A piece has the same layers of neighbouring blocks. Nothing waits for a later layer: of
a block that lags, what is there is sent, and others go on without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from dualpath_sglang.node.block_cache import CachedBlock
from dualpath_sglang.transport.base import Missing, Piece, Span

PIECE_BYTES = 2 << 20


class Sending:
    """The blocks of a window of a request, as they land.

    Args:
        memory: of the cache.
        layer_bytes: of a Layer Block.
        blocks: by their number in the request.
        ranges: of layers that are sent together if they are there, see
            :func:`~dualpath_sglang.node.layer_ranges.send_ranges`.
        deadline: monotonic seconds.
        changed: is set whenever any of them lands or fails, or :attr:`cancelled` changes.
        cancelled: whether nobody wants them any more.
    """

    def __init__(
        self,
        memory: memoryview,
        layer_bytes: int,
        blocks: dict[int, CachedBlock],
        ranges: Sequence[tuple[int, int]],
        deadline: float,
        changed: threading.Event,
        cancelled: Callable[[], bool],
    ) -> None:
        self._memory = memory
        self._layer_bytes = layer_bytes
        self._blocks = blocks
        self._ranges = ranges
        self._deadline = deadline
        self._changed = changed
        self._cancelled = cancelled
        self._sent = dict.fromkeys(blocks, ranges[0][0])
        """By number: the layer that comes next."""
        self._late = False

    def __iter__(self) -> Iterator[Piece | Missing]:
        """All of it; ends early when it is cancelled.

        Raises:
            TimeoutError: the deadline came first, or the store does not give what it has.
        """
        left = [list(self._blocks), *([] for _ in self._ranges[1:])]
        while any(left):
            self._changed.clear()
            moved = False
            for part in self._some(left):
                if self._cancelled():
                    return
                yield part
                moved = True
            if self._cancelled():
                return
            left_s = max(0.0, self._deadline - time.monotonic())
            if any(left) and not moved and not self._changed.wait(left_s):
                raise TimeoutError
        if self._late:
            raise TimeoutError  # the store may have it, and does not answer

    def _some(self, left: list[list[int]]) -> Iterator[Piece | Missing]:
        """What is there of the earliest range of which anything is."""
        for i, (_, end) in enumerate(self._ranges):
            if not left[i]:
                continue
            failed: list[int] = []
            lagging: list[int] = []
            done: list[int] = []
            sent = False
            for piece in self._runs(left[i], end, failed, lagging, done):
                sent = True
                yield piece
            left[i] = lagging
            if done and i + 1 < len(left):
                left[i + 1] = sorted([*left[i + 1], *done]) if left[i + 1] else done
            if missing := [number for number in failed if self._blocks[number].missing]:
                sent = True
                yield Missing(missing)
            self._late |= len(missing) < len(failed)
            if sent:
                return

    def _runs(
        self,
        numbers: Sequence[int],
        end: int,
        failed: list[int],
        lagging: list[int],
        done: list[int],
    ) -> Iterator[Piece]:
        """Pieces of these blocks up to a layer; the numbers go where they belong."""
        run: list[int] = []
        begin = stop = room = 0
        for number in numbers:
            block, first = self._blocks[number], self._sent[number]
            ready = min(block.landed, end)
            if ready <= first:
                (failed if block.failed and block.landed <= first else lagging).append(number)
                continue
            (done if ready == end else lagging).append(number)
            if run and (number != run[-1] + 1 or (first, ready) != (begin, stop) or not room):
                yield self._piece(run, begin, stop)
                run = []
            if not run:
                begin, stop = first, ready
                room = max(1, PIECE_BYTES // ((stop - begin) * self._layer_bytes))
            run.append(number)
            room -= 1
        if run:
            yield self._piece(run, begin, stop)

    def _piece(self, run: Sequence[int], first: int, end: int) -> Piece:
        memory, size = self._memory, (end - first) * self._layer_bytes
        checksums: list[int] = []
        buffers: list[memoryview] = []
        offsets: list[int] = []
        lead = first * self._layer_bytes
        for number in run:
            block = self._blocks[number]
            at = block.offset + lead
            checksums += block.checksums[first:end]
            buffers.append(memory[at : at + size])
            offsets.append(at)
            self._sent[number] = end
        return Piece(Span(first, end, run[0], len(run)), checksums, buffers, offsets)
