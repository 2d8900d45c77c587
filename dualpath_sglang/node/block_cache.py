"""Full Blocks in the memory of a node, for whoever fetches them; the least recently used go first.

A block is read once however many want it. While it is being read, or anybody sends it, it stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

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

    __slots__ = ("checksums", "failed", "landed", "memory", "missing", "name", "users")

    def __init__(self, name: tuple[bytes, bytes], memory: memoryview, layers: int) -> None:
        self.name = name
        self.memory = memory
        self.checksums: list[int] = [0] * layers
        self.landed = bytearray(layers)
        self.failed = False
        self.missing = False
        """Whether it failed because the store does not have it; else it may be tried again."""
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
        self._blocks: dict[tuple[bytes, bytes], CachedBlock] = {}
        self._idle: OrderedDict[tuple[bytes, bytes], CachedBlock] = OrderedDict()
        self._spare: dict[int, list[memoryview]] = {}
        self._allocated_bytes = 0
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Memory that blocks take, spare memory included."""
        return self._allocated_bytes

    @property
    def pinned_bytes(self) -> int:
        """Memory of blocks that somebody reads or sends."""
        return self._used_bytes

    def pin(self, geometry: Geometry, keys: Sequence[bytes]) -> tuple[list[CachedBlock], list[int]]:
        """Blocks that stay until :meth:`unpin`, and the positions of those that are new.

        Whoever gets a new one has it read, and calls :meth:`settle` when that is over.

        Raises:
            NoRoomError: there is no room for all of them; nothing was given up for them.
        """
        names = [(geometry.id_bytes, key) for key in keys]
        with self.changed:
            if self._used_bytes + self._unused_bytes(geometry, names) > self.capacity_bytes:
                raise NoRoomError
            pinned: list[CachedBlock] = []
            new: list[int] = []
            try:
                for i, name in enumerate(names):
                    block = self._blocks.get(name)
                    if block is None or block.failed:
                        memory = self._memory(geometry.block_bytes)
                        block = self._blocks[name] = CachedBlock(name, memory, geometry.layers)
                        self._pin(block)  # for the reading
                        new.append(i)
                    else:
                        self.hits += 1
                    self._pin(block)
                    pinned.append(block)
            except BaseException:  # the system has no memory
                for i in new:
                    pinned[i].failed = True
                self._unpin([*pinned, *(pinned[i] for i in new)])
                raise
            return pinned, new

    def unpin(self, blocks: Iterable[CachedBlock]) -> None:
        """Let go of blocks."""
        with self.changed:
            self._unpin(blocks)

    def settle(self, blocks: Iterable[CachedBlock], missing: Container[int] = ()) -> None:
        """The reading of these is over: what has not landed by now never will.

        Args:
            missing: positions of those that the store does not have.
        """
        with self.changed:
            for i, block in enumerate(blocks):
                if not all(block.landed):
                    block.failed, block.missing = True, i in missing
                self._unpin([block])
            self.changed.notify_all()

    def clear(self) -> None:
        """Forget every block that nobody uses."""
        with self.changed:
            while self._idle:
                self._give_back(self._idle.popitem()[1])
            for size, spare in self._spare.items():
                self._allocated_bytes -= size * len(spare)
            self._spare.clear()

    # -- with the lock held -----------------------------------------------------------------

    def _unused_bytes(self, geometry: Geometry, names: Iterable[tuple[bytes, bytes]]) -> int:
        """Memory of those that nobody uses now, or that are to be made."""
        count = 0
        for name in dict.fromkeys(names):
            block = self._blocks.get(name)
            count += block is None or block.failed or not block.users
        return count * geometry.block_bytes

    def _pin(self, block: CachedBlock) -> None:
        if not block.users:
            self._used_bytes += len(block.memory)
            self._idle.pop(block.name, None)
        block.users += 1

    def _unpin(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            block.users -= 1
            assert block.users >= 0
            if block.users:
                continue
            self._used_bytes -= len(block.memory)
            if block.failed:
                self._give_back(block)
            else:
                self._idle[block.name] = block

    def _memory(self, size: int) -> memoryview:
        spare = self._spare.get(size)
        while not spare and self._allocated_bytes + size > self.capacity_bytes:
            self._make_room(size)
            spare = self._spare.get(size)
        if spare:
            return spare.pop()
        memory = aligned(size)[:size]
        self._allocated_bytes += size
        return memory

    def _make_room(self, size: int) -> None:
        for other, spare in self._spare.items():
            if spare and other != size:
                spare.pop()
                self._allocated_bytes -= other
                return
        self._give_back(self._idle.popitem(last=False)[1])

    def _give_back(self, block: CachedBlock) -> None:
        if self._blocks.get(block.name) is block:  # a failed one may have a successor
            del self._blocks[block.name]
        self._spare.setdefault(len(block.memory), []).append(block.memory)
