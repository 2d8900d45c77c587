"""Full Blocks in the memory of a node, for whoever fetches them; the least recently used go first.

A block is read once however many want it. While it is being read, or anybody sends it, it stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dualpath_storage import Geometry
from dualpath_storage.memory import aligned


class NoRoomError(Exception):
    """What the cache holds is in use, and no more fits beside it."""


class CachedBlock:
    """One Full Block. Its layers come one by one; who waits for one holds the cache's condition.

    Args:
        name: geometry id and key.
        memory: of the whole block.
        layers: of its geometry.
    """

    __slots__ = ("checksums", "failed", "landed", "memory", "name", "users")

    def __init__(self, name: tuple[bytes, bytes], memory: memoryview, layers: int) -> None:
        self.name = name
        self.memory = memory
        self.checksums: list[int] = [0] * layers
        self.landed = bytearray(layers)
        self.failed = False
        self.users = 0


class BlockCache:
    """Thread-safe.

    Args:
        capacity_bytes: most memory for blocks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.changed = threading.Condition()
        """Notified whenever a layer lands or a block fails."""
        self.hits = 0
        """Blocks that were there, or on their way, when somebody wanted them."""
        self._blocks: OrderedDict[tuple[bytes, bytes], CachedBlock] = OrderedDict()
        self._spare: dict[int, list[memoryview]] = {}
        self._allocated_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Memory that blocks take, spare memory included."""
        return self._allocated_bytes

    def pin(self, geometry: Geometry, keys: Sequence[bytes]) -> tuple[list[CachedBlock], list[int]]:
        """Blocks that stay until :meth:`unpin`, and the positions of those that are new.

        Whoever gets a new one has it read, and pins it once more for the reading.

        Raises:
            NoRoomError: there is no room for all of them.
        """
        with self.changed:
            pinned: list[CachedBlock] = []
            new: list[int] = []
            try:
                for i, key in enumerate(keys):
                    name = (geometry.id_bytes, key)
                    block = self._blocks.get(name)
                    if block is None or block.failed:
                        memory = self._memory(geometry.block_bytes)
                        block = CachedBlock(name, memory, geometry.layers)
                        self._blocks[name] = block
                        block.users += 1  # of the reading
                        new.append(i)
                    else:
                        self.hits += 1
                    block.users += 1
                    self._blocks.move_to_end(name)
                    pinned.append(block)
            except NoRoomError:
                for i in new:
                    pinned[i].users -= 1
                    pinned[i].failed = True
                self._unpin(pinned)
                raise
            return pinned, new

    def unpin(self, blocks: Iterable[CachedBlock]) -> None:
        """Let go of blocks."""
        with self.changed:
            self._unpin(blocks)

    def settle(self, blocks: Iterable[CachedBlock]) -> None:
        """The reading of these is over: what has not landed by now never will."""
        with self.changed:
            for block in blocks:
                if not all(block.landed):
                    block.failed = True
                self._unpin([block])
            self.changed.notify_all()

    def clear(self) -> None:
        """Forget every block that nobody uses."""
        with self.changed:
            for block in [b for b in self._blocks.values() if not b.users]:
                self._give_back(block)
            for size, spare in self._spare.items():
                self._allocated_bytes -= size * len(spare)
            self._spare.clear()

    def _unpin(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            block.users -= 1
            assert block.users >= 0
            if block.failed and not block.users:
                self._give_back(block)

    def _memory(self, size: int) -> memoryview:
        spare = self._spare.get(size)
        if spare:
            return spare.pop()
        while self._allocated_bytes + size > self.capacity_bytes:
            self._make_room(size)
            spare = self._spare.get(size)
            if spare:
                return spare.pop()
        self._allocated_bytes += size
        return aligned(size)[:size]

    def _make_room(self, size: int) -> None:
        for other, spare in self._spare.items():
            if spare and other != size:
                spare.pop()
                self._allocated_bytes -= other
                return
        oldest = next((block for block in self._blocks.values() if not block.users), None)
        if oldest is None:
            raise NoRoomError
        self._give_back(oldest)

    def _give_back(self, block: CachedBlock) -> None:
        if self._blocks.get(block.name) is block:  # a failed one may have a successor
            del self._blocks[block.name]
        self._spare.setdefault(len(block.memory), []).append(block.memory)
