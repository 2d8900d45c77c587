"""The answer to one fetch: blocks held in the node's memory while their layers are sent.

A fetch for which there is no room in one piece is answered in windows, runs of blocks one after
the other; layers come in their order within each. While one window is sent, the next is read, as
far as there is room beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.block_cache import BlockCache, CachedBlock
from dualpath_sglang.node.block_reader import BlockReader
from dualpath_sglang.node.landings import Landings
from dualpath_sglang.node.layer_ranges import send_ranges
from dualpath_sglang.node.sending import Sending
from dualpath_sglang.pool import Pool
from dualpath_sglang.transport.base import FetchRequest, Missing, Piece
from dualpath_storage import Placement


@dataclass(slots=True)
class _Window:
    """Blocks that are held, by their number in the request, and those that are missing."""

    blocks: dict[int, CachedBlock]
    missing: list[int] = field(default_factory=list)


class AgentFetch:
    """See :class:`~dualpath_sglang.transport.base.Served`; a context, that lets go of everything.

    Args:
        cache: where the store's blocks are.
        blocks: the node's memory.
        reader: brings blocks there.
    """

    def __init__(
        self,
        cache: KVCache,
        blocks: BlockCache,
        reader: BlockReader,
        pool: Pool,
        request: FetchRequest,
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._reader = reader
        self._pool = pool
        self._request = request
        self._deadline = time.monotonic() + request.timeout_s
        self._landings = Landings()
        self._changed = threading.Event()
        self._heard: set[Landings] = set()
        self._cancelled = threading.Event()
        self._next = 0
        self._places: dict[int, Placement | None] = {}
        self._held: list[_Window] = []
        self._before_release: Callable[[], None] = lambda: None

    def begin(self) -> bool:
        """Take what fits into memory, and have it read; False when not one block does.

        Raises:
            TimeoutError: the store hangs.
        """
        return self._take(0.0)

    def hold_until(self, taken: Callable[[], None]) -> None:
        """Called before blocks are let go of: returns once nobody looks at their memory any more.

        For a transport that passes on places, not bytes.
        """
        self._before_release = taken

    def __enter__(self) -> AgentFetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for landings in self._heard:
            landings.leave(self._changed)
        for window in self._held:
            self._let_go(window)
        self._held.clear()

    def __iter__(self) -> Iterator[Piece | Missing]:
        while self._held and not self._cancelled.is_set():
            window = self._held[0]
            if self._next < len(self._request.keys):
                self._take(0.0)  # ahead, if there is room
            if window.missing:
                yield Missing(window.missing)
            yield from self._send(window)
            if self._cancelled.is_set():
                return
            self._before_release()
            self._blocks.unpin(
                reversed(window.blocks.values())
            )  # the head of a chain stays longest
            del self._held[0]
            if not self._held and self._next < len(self._request.keys):
                self._wait_for_room()

    def cancel(self) -> None:
        """Nobody wants it any more. From any thread."""
        self._cancelled.set()
        self._changed.set()

    def _let_go(self, window: _Window) -> None:
        """The head of the chain last, so that it stays longest."""
        self._blocks.unpin(reversed(window.blocks.values()))

    # -- windows ----------------------------------------------------------------------------

    def _send(self, window: _Window) -> Iterator[Piece | Missing]:
        of, request = self._pool.geometry, self._request
        return iter(
            Sending(
                self._blocks.memory.bytes,
                of.layer_bytes,
                window.blocks,
                send_ranges(self._reader.ranges(of), request.first_layer, request.end_layer),
                self._deadline,
                self._changed,
                self._cancelled.is_set,
            )
        )

    def _wait_for_room(self) -> None:
        while not self._cancelled.is_set():
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if self._take(min(left_s, 0.2)):
                return

    def _take(self, timeout_s: float) -> bool:
        """Hold the blocks of one more window; False when there is no room for any of them."""
        keys, of = self._request.keys, self._pool.geometry
        stop = len(keys)
        if self._next:  # no more can be in the next window
            stop = min(stop, self._next + self._blocks.capacity_for(of))
        numbers = range(self._next, stop)
        found = self._blocks.find(of, [keys[i] for i in numbers])
        there = {i: block for i, block in zip(numbers, found, strict=True) if block is not None}
        try:
            window = self._window(numbers, there, timeout_s)
        except BaseException:
            self._blocks.unpin(there.values())
            raise
        count = len(window.blocks) + len(window.missing)
        if count == 0:
            return False
        self._next += count
        self._held.append(window)
        self._cache.touch(self._pool, [keys[i] for i in there])
        for block in window.blocks.values():
            if not block.whole and block.landings not in self._heard:
                self._heard.add(block.landings)
                block.landings.listen(self._changed)
        return True

    def _window(self, numbers: range, there: dict[int, CachedBlock], timeout_s: float) -> _Window:
        """The next window. Of the blocks that are held only its own are still held then.

        Args:
            there: those that are in memory, held.
        """
        if self._request.cached_only:
            self._keep(there, {i for i, block in there.items() if self._landed([block])})
            return _Window(dict(there), [i for i in numbers if i not in there])
        absent = [i for i in numbers if i not in there]
        self._locate([i for i in absent if i not in self._places])
        places = {i: place for i in absent if (place := self._places[i]) is not None}
        end = self._end_of_window(numbers, there, places)
        self._keep(there, range(numbers.start, end))
        wanted = [i for i in places if i < end]
        if self._reader.stalled and (wanted or not self._landed(there.values())):
            raise TimeoutError
        names = [self._request.keys[i] for i in wanted]
        blocks, new = self._blocks.add(self._pool.geometry, names, self._landings, timeout_s)
        if new:
            self._read([blocks[n] for n in new], [places[wanted[n]] for n in new], blocks)
        if len(blocks) < len(wanted):
            end = wanted[len(blocks)]
            self._keep(there, range(numbers.start, end))
        got = {**there, **dict(zip(wanted, blocks, strict=False))}
        held = {i: got.get(i) for i in range(numbers.start, end)}
        return _Window(
            {i: block for i, block in held.items() if block is not None},
            [i for i, block in held.items() if block is None],
        )

    def _landed(self, blocks: Iterable[CachedBlock]) -> bool:
        """Whether all that is asked for of these is in memory."""
        return all(block.landed >= self._request.end_layer for block in blocks)

    def _keep(self, there: dict[int, CachedBlock], numbers: Container[int]) -> None:
        """Let go of the others."""
        others = [i for i in there if i not in numbers]
        self._blocks.unpin([there.pop(i) for i in others])

    def _read(
        self,
        reading: Sequence[CachedBlock],
        places: Sequence[Placement],
        blocks: Sequence[CachedBlock],
    ) -> None:
        try:
            self._reader.start(self._pool, reading, places, self._landings)
        except BaseException:
            self._blocks.settle(reading)
            self._blocks.unpin(blocks)
            raise

    def _end_of_window(
        self, numbers: range, there: dict[int, CachedBlock], places: dict[int, Placement]
    ) -> int:
        """Number after the last block of the next window.

        All, when there is room for all; else what takes half of the cache's memory, so that the
        next one is read while it is sent.
        """
        if self._next == 0 and len(places) <= self._blocks.room_for(self._pool.geometry):
            return numbers.stop
        most = max(1, self._blocks.capacity_for(self._pool.geometry) // 2)
        held = [i for i in numbers if i in there or i in places]
        return held[most] if len(held) > most else numbers.stop

    def _locate(self, numbers: Sequence[int]) -> None:
        if numbers:
            keys = [self._request.keys[i] for i in numbers]
            self._places.update(zip(numbers, self._cache.locate(self._pool, keys), strict=True))
