"""One read of one piece, on its way through a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.streaming.batch import Batch, Part
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.plan import layer_ranges
from dualpath_sglang.streaming.staging import Piece
from dualpath_storage import Placement, ReadStatus
from dualpath_storage.memory import Arena
from dualpath_storage.ranges import RangeItem, RangeRead, RangeShape


class Read:
    """Layers ``[first_layer, end_layer)`` of blocks ``[begin, end)`` of a part.

    The streamer prepares and submits it; a worker runs it; the streamer looks at what came. It may
    be given up at any time: one that has not begun never will, one that has keeps its piece until
    the system lets go of it.

    Args:
        attempt: 0, or how many times these blocks have failed; then they are looked up again.
    """

    def __init__(
        self,
        batch: Batch,
        part: Part,
        begin: int,
        end: int,
        first_layer: int,
        end_layer: int,
        attempt: int = 0,
    ) -> None:
        self.batch = batch
        self.part = part
        self.begin = begin
        self.end = end
        self.first_layer = first_layer
        self.end_layer = end_layer
        self.attempt = attempt
        self.abandoned = False
        self.piece: Piece | None = None
        self.results: list[RangeRead] | None = None
        self.seconds = 0.0
        self._once = threading.Lock()  # taken by whoever comes first, the worker or the end
        self._items: list[RangeItem] = []
        # Headers come with the first layers; a block that failed may lie elsewhere by now.
        checksums = part.checksums[begin:end]
        header = attempt > 0 or first_layer == 0 or any(c is None for c in checksums)
        self.shape = RangeShape(part.load.pool.geometry, first_layer, end_layer, header)

    @property
    def count(self) -> int:
        """Blocks."""
        return self.end - self.begin

    @property
    def size_bytes(self) -> int:
        """Staging memory that it needs."""
        return self.count * self.shape.stride

    @property
    def extra_header(self) -> bool:
        """Whether the header costs an I/O of its own, only because no earlier read is back yet."""
        return self.shape.header and self.first_layer > 0 and self.attempt == 0

    @property
    def piece_bytes(self) -> int:
        """Staging memory that it holds."""
        return 0 if self.piece is None else self.piece.size_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the layers."""
        return self.count * self.shape.payload_bytes

    def renewed(self) -> Read:
        """The same with what is known of the blocks by now."""
        layers = (self.first_layer, self.end_layer)
        return Read(self.batch, self.part, self.begin, self.end, *layers)

    def again(self, block: int) -> Read:
        """The same of one block, once more."""
        return Read(
            self.batch,
            self.part,
            block,
            block + 1,
            self.first_layer,
            self.end_layer,
            self.attempt + 1,
        )

    def prepare(self, piece: Piece) -> None:
        """Give it memory, and the places as they are known now."""
        part = self.part
        self.piece = piece
        self._items = [
            RangeItem(
                part.key(block),
                part.places[block],
                None if self.shape.header else part.checksums[block],
            )
            for block in range(self.begin, self.end)
        ]

    def run(self, cache: KVCache, arena: Arena) -> None:
        """Do it, in a worker."""
        del arena
        if not self._once.acquire(blocking=False):
            return
        began = time.perf_counter()
        pool = self.part.load.pool
        assert self.piece is not None
        if self.attempt:
            places = cache.locate(pool, [item.key for item in self._items])
            if places[0] is None:
                self.results = [RangeRead(ReadStatus.ABSENT)]
                return
            self._items = [RangeItem(self._items[0].key, places[0])]
        self.results = pool.store.read_range(self._items, self.shape, self.piece.memory)
        self.seconds = time.perf_counter() - began

    def abandon(self) -> bool:
        """Nobody wants it any more; True when it never begins, so that its memory is free."""
        self.abandoned = True
        return self._once.acquire(blocking=False)

    def place(self, block: int) -> Placement:
        """Where a block was looked for."""
        return self._items[block - self.begin].placement

    def good_runs(self) -> Iterator[tuple[int, int]]:
        """Blocks ``[begin, end)`` that are there, side by side in the piece."""
        assert self.results is not None
        begin = self.begin
        for block, result in enumerate(self.results, self.begin):
            if result.status is not ReadStatus.OK:
                if begin < block:
                    yield begin, block
                begin = block + 1
        if begin < self.end:
            yield begin, self.end

    def bad_blocks(self) -> Iterator[tuple[int, ReadStatus]]:
        """Blocks that are not, and why."""
        assert self.results is not None
        for block, result in enumerate(self.results, self.begin):
            if result.status is not ReadStatus.OK:
                yield block, result.status

    def memory_of(self, block: int) -> memoryview:
        """The piece from a block on."""
        assert self.piece is not None
        return self.piece.memory[(block - self.begin) * self.shape.stride :]


def reads_of_rest(
    batch: Batch, part: Part, blocks: Sequence[int], options: StreamOptions, most_bytes: int
) -> list[Read]:
    """Reads of what is still missing of some blocks, none of them whole.

    Args:
        most_bytes: of one piece.
    """
    geometry = part.load.pool.geometry
    reads: list[Read] = []
    for begin, end, first in part.progress.runs(blocks):
        ranges = layer_ranges(
            geometry.layers - first,
            geometry.layer_bytes,
            options.first_io_bytes,
            options.io_bytes or most_bytes,
            most_bytes,
        )
        fair = -(-(end - begin) // options.queue_depth)
        for low, high in ((first + a, first + b) for a, b in ranges):
            stride = RangeShape(geometry, low, high, header=True).stride
            step = max(1, min(most_bytes // stride, fair))
            reads += [
                Read(batch, part, at, min(at + step, end), low, high)
                for at in range(begin, end, step)
            ]
    return reads
