"""Reading blocks by the index, and taking those out of it that turn out damaged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.index import Index, IndexUnavailableError
from dualpath_sglang.pool import Pool
from dualpath_sglang.read_queue import ReadQueue
from dualpath_sglang.stats import Counters
from dualpath_storage import Geometry, Pieces, Placement, ReadItem, ReadStatus, Slot, StoreOptions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadBatch:
    """Blocks to be read, and what has become of them so far.

    Args:
        keys: which ones.
        pieces: the memory of each.
        deadline: monotonic seconds after which nothing is begun.
        layers: only the Layer Blocks ``[first, end)``; None for all.
    """

    keys: Sequence[bytes]
    pieces: Sequence[Pieces]
    deadline: float
    layers: tuple[int, int] | None = None
    statuses: list[ReadStatus] = field(init=False)
    answered: bool = False
    """Whether the index could say where they are."""

    def __post_init__(self) -> None:
        self.statuses = [ReadStatus.ABSENT] * len(self.keys)

    def queued(
        self, geometry: Geometry, queue: ReadQueue
    ) -> contextlib.AbstractContextManager[None]:
        """Counts it in a queue while it lasts."""
        first, end = self.layers or (0, geometry.layers)
        count = len(self.keys)
        size = count * (end - first) * geometry.layer_bytes
        return queue.holding(size, count * geometry.page_tokens)


class Reader:
    """Reads batches of blocks from pools. Thread-safe.

    Args:
        options: whether damaged blocks may be taken out, and how long that may wait.
        counters: counts them.
    """

    def __init__(self, options: StoreOptions, counters: Counters) -> None:
        self._options = options
        self._counters = counters

    def read(self, pool: Pool, index: Index, batch: ReadBatch) -> None:
        """Read what is present into its memory, and note in the batch what became of each block.

        Raises:
            IndexUnavailableError: the index cannot answer now; what was noted before holds.
        """
        keys, statuses = batch.keys, batch.statuses
        wanted = list(range(len(keys)))
        # A block may move between the lookup and the read; a second look finds it.
        while wanted:
            places = index.lookup(pool.geometry, [keys[i] for i in wanted])
            found = {i: p for i, p in zip(wanted, places, strict=True) if p is not None}
            items = [ReadItem(keys[i], p, batch.pieces[i]) for i, p in found.items()]
            read = pool.store.read(items, batch.deadline, batch.layers)
            for i, status in zip(found, read, strict=True):
                statuses[i] = status
            self.remove_damaged(pool, index, keys, found, statuses)
            moved = [i for i in found if statuses[i] is ReadStatus.GENERATION]
            wanted = [] if batch.answered else moved
            batch.answered = True

    def remove_damaged(
        self,
        pool: Pool,
        index: Index,
        keys: Sequence[bytes],
        found: Mapping[int, Placement],
        statuses: list[ReadStatus],
    ) -> None:
        """Take damaged blocks out; one that was evicted while it was read is only moved.

        Args:
            found: where the blocks were read, by their position in ``keys`` and ``statuses``.
            statuses: becomes GENERATION for the moved ones.
        """
        bad = [i for i in found if statuses[i].damaged]
        if not bad or self._options.read_only:
            return
        try:
            freed = index.remove(
                pool.geometry,
                [(keys[i], found[i].generation) for i in bad],
                self._options.lookup_timeout_s,
            )
            # A slot that the device cannot read is not used again.
            broken = {
                Slot(found[i].segment, found[i].slot)
                for i in bad
                if statuses[i] is ReadStatus.IO_ERROR
            }
            index.forget_freed(
                [row for row in freed if row.slot in broken], self._options.lookup_timeout_s
            )
        except IndexUnavailableError as error:
            logger.warning("Damaged blocks stay in the index for now: %s", error)
            return
        pool.take_back([row for row in freed if row.slot not in broken])
        self._counters.add("repaired_blocks", len(freed))
        taken_out = {row.slot for row in freed}
        for i in bad:
            if Slot(found[i].segment, found[i].slot) not in taken_out:
                statuses[i] = ReadStatus.GENERATION
        damaged = [i for i in bad if statuses[i] is not ReadStatus.GENERATION]
        if damaged:
            logger.warning(
                "%d damaged blocks in %s, first %s: %s",
                len(damaged),
                pool.store.directory,
                keys[damaged[0]].hex(),
                statuses[damaged[0]].value,
            )
