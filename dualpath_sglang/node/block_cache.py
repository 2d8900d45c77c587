"""Full Blocks in the memory of a node, for whoever fetches them; the least recently used go first.

A block is read once however many want it. While it is being read, or anybody sends it, it stays.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from dualpath_sglang.node.shared_memory import SharedMemory
from dualpath_storage import Geometry
from dualpath_storage.geometry import align_up
from dualpath_storage.header import HEADER_BYTES

if TYPE_CHECKING:
    from dualpath_sglang.node.landings import Landings

Name: TypeAlias = tuple[bytes, bytes]
"""Geometry id and key."""


class CachedBlock:
    """One Full Block, in memory that is laid out as its slot is. Its layers come in order.

    Args:
        image: the memory: the header page, and the payload.
        offset: where the payload begins in the cache's memory.
        layers: of its geometry.
        landings: tells who waits for its layers.
    """

    __slots__ = (
        "checksums",
        "failed",
        "image",
        "landed",
        "landings",
        "layers",
        "missing",
        "name",
        "offset",
        "users",
    )

    def __init__(
        self, name: Name, image: memoryview, offset: int, layers: int, landings: Landings
    ) -> None:
        self.name = name
        self.image = image
        self.offset = offset
        self.layers = layers
        self.landings = landings
        self.checksums: array[int] = array("Q", bytes(8 * layers))
        self.landed = 0
        """Layers that are there, checked: the first so many."""
        self.failed = False
        """No more of them come."""
        self.missing = False
        """Whether it failed because the store does not have it; else it may be tried again."""
        self.users = 0

    @property
    def whole(self) -> bool:
        """Whether all layers are there."""
        return self.landed == self.layers


class BlockCache:
    """Thread-safe.

    Args:
        capacity_bytes: most memory for blocks: their headers and what rounds them up to pages
            are counted.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.memory = SharedMemory(capacity_bytes)
        self.capacity_bytes = self.memory.size_bytes
        self.hits = 0
        """Blocks that were there, or on their way, when somebody wanted them."""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        self._blocks: dict[Name, CachedBlock] = {}
        self._idle: OrderedDict[Name, CachedBlock] = OrderedDict()
        self._pinned_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Memory that blocks take."""
        return self.memory.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Memory of blocks that somebody reads or sends."""
        return self._pinned_bytes

    @property
    def count(self) -> int:
        """Blocks."""
        return len(self._blocks)

    def capacity_for(self, geometry: Geometry) -> int:
        """How many blocks of a geometry could be in it, were it empty."""
        return self.capacity_bytes // image_bytes(geometry)

    def room_for(self, geometry: Geometry) -> int:
        """How many blocks of a geometry fit beside those that somebody uses now."""
        return (self.capacity_bytes - self._pinned_bytes) // image_bytes(geometry)

    def find(self, geometry: Geometry, keys: Sequence[bytes]) -> list[CachedBlock | None]:
        """Blocks that are there, or on their way. They stay until :meth:`unpin`."""
        found: list[CachedBlock | None] = []
        unit = geometry.id_bytes
        with self._lock:
            for key in keys:
                block = self._blocks.get((unit, key))
                if block is not None and not block.failed:
                    self._pin(block)
                    found.append(block)
                else:
                    found.append(None)
            self.hits += len(keys) - found.count(None)
        return found

    def add(
        self, geometry: Geometry, keys: Sequence[bytes], landings: Landings, timeout_s: float = 0.0
    ) -> tuple[list[CachedBlock], list[int]]:
        """The first of these blocks, as many as there is room for, and which are new.

        They stay until :meth:`unpin`. Whoever gets a new one has it read, and calls
        :meth:`settle` when that is over. When there is room for all but for what others use, the
        rest can be had once they let go of it.

        Args:
            landings: of the new ones.
            timeout_s: waits so long for the first.
        """
        names = [(geometry.id_bytes, key) for key in keys]
        size = image_bytes(geometry)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                blocks, new = self._add(names, size, geometry.layers, landings)
                left_s = deadline - time.monotonic()
                if blocks or not names or left_s <= 0:
                    return blocks, new
                self._waiting += 1
                self._room.wait(left_s)
                self._waiting -= 1

    def unpin(self, blocks: Iterable[CachedBlock]) -> None:
        """Let go of blocks."""
        with self._lock:
            self._unpin(blocks)

    def settle(self, blocks: Sequence[CachedBlock]) -> None:
        """The reading of these is over: what has not landed by now never will."""
        with self._lock:
            for block in blocks:
                block.failed |= not block.whole
            self._unpin(blocks)

    def give_up(self, blocks: Sequence[CachedBlock]) -> bool:
        """Settle these if nobody but who reads them wants them; whether that is so."""
        with self._lock:
            if any(block.users > 1 for block in blocks):
                return False
            for block in blocks:
                block.failed |= not block.whole
            self._unpin(blocks)
            return True

    def forget(self) -> None:
        """Forget every block that nobody uses."""
        with self._lock:
            while self._idle:
                self._forget(self._idle.popitem()[1])

    def clear(self) -> None:
        """The same, and give the memory back to the system."""
        self.forget()
        with self._lock:
            self.memory.release()

    def close(self) -> None:
        """Forget everything."""
        self.clear()
        self.memory.close()

    # -- with the lock held -----------------------------------------------------------------

    def _add(
        self, names: Sequence[Name], size: int, layers: int, landings: Landings
    ) -> tuple[list[CachedBlock], list[int]]:
        room = self.capacity_bytes - self._pinned_bytes
        blocks: list[CachedBlock] = []
        new: list[int] = []
        for i, name in enumerate(names):
            block = self._blocks.get(name)
            if block is None or block.failed:
                offset = self._memory(size) if room >= size else None
                if offset is None:
                    break
                image = self.memory.bytes[offset : offset + size]
                block = CachedBlock(name, image, offset + HEADER_BYTES, layers, landings)
                self._blocks[name] = block
                self._pin(block)  # for the reading
                new.append(i)
                room -= size
            elif not block.users:
                room -= size
            self._pin(block)
            blocks.append(block)
        self.hits += len(blocks) - len(new)
        return blocks, new

    def _pin(self, block: CachedBlock) -> None:
        if not block.users:
            self._pinned_bytes += len(block.image)
            self._idle.pop(block.name, None)
        block.users += 1

    def _unpin(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            block.users -= 1
            assert block.users >= 0
            if block.users:
                continue
            self._pinned_bytes -= len(block.image)
            if block.failed:
                self._forget(block)
            else:
                self._idle[block.name] = block
        if self._waiting:
            self._room.notify_all()

    def _memory(self, size: int) -> int | None:
        """A run of memory, if need be that of blocks that nobody uses."""
        offset = self.memory.take(size)
        while offset is None and self._idle:
            self._forget(self._idle.popitem(last=False)[1])
            offset = self.memory.take(size)
        return offset

    def _forget(self, block: CachedBlock) -> None:
        if self._blocks.get(block.name) is block:  # a failed one may have a successor
            del self._blocks[block.name]
        self.memory.give(block.offset - HEADER_BYTES, len(block.image))


def image_bytes(geometry: Geometry) -> int:
    """Memory that a block takes."""
    return align_up(geometry.slot_bytes)
