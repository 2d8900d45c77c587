"""Reads Full Blocks for other nodes and hands them on by layer: first half of the DE read path.

A fetch is answered from the node's memory as far as the blocks are there; the rest is read, first
layers of all blocks first, and sent as it lands. Checksums are those that stand in the headers:
what the receiver checks is what the writer wrote.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.block_cache import BlockCache
from dualpath_sglang.node.block_reader import BlockReader
from dualpath_sglang.node.fetch import AgentFetch
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.transport.base import End, FetchRequest, Load, Served
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
"""Also how long others wait for whoever looks: a store that hangs must not keep up those who ask
for what is known."""


class Agent:
    """See :class:`dualpath_sglang.transport.base.Source`.

    Args:
        cache: the store; closed by whoever opened it.
        memory_bytes: most memory for blocks. Taken as it is needed.
        options: of the reads: how many in flight, bytes of the first I/O of a block, tries.

    Raises:
        MemoryError: the system does not have so much memory.
    """

    def __init__(
        self, cache: KVCache, memory_bytes: int, options: StreamOptions | None = None
    ) -> None:
        self.blocks = BlockCache(memory_bytes)
        self._cache = cache
        self._reader = BlockReader(cache, self.blocks, options or StreamOptions())
        self._pools: dict[bytes, Pool] = {}
        self._looked_at = float("-inf")
        self._lock = threading.Lock()
        self._notices = Notices(logger)

    @property
    def shared_file(self) -> tuple[int, int] | None:
        """Descriptor and size of the file that its blocks lie in; None when it shares none."""
        fd = self.blocks.memory.fd
        return None if fd is None else (fd, self.blocks.memory.size_bytes)

    def load(self) -> Load:
        """What is still to be read from storage, by all processes of the machine."""
        return Load(*self._cache.read_queue.of_machine())

    @property
    def read_rate(self) -> float | None:
        """Bytes a second that it reads from the store; None when nothing was measured yet."""
        return self._reader.rate

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to answer a fetch."""
        pool = self._pool(request.geometry_id)
        if pool is None or request.end_layer > pool.geometry.layers:
            return End.UNKNOWN
        if not self.blocks.capacity_for(pool.geometry):
            self._notices.warn(
                "A fetch is refused: the memory has %d bytes, and a page of the pool %s needs %d",
                self.blocks.capacity_bytes,
                pool.geometry.pool,
                pool.geometry.slot_bytes,
            )
            return End.FAILED
        fetch = AgentFetch(self._cache, self.blocks, self._reader, pool, request)
        return fetch if fetch.begin() else End.BUSY

    def _pool(self, geometry_id: bytes) -> Pool | None:
        """Of a geometry; None when there is none, or the store does not say in time."""
        pool = self._pools.get(geometry_id)
        if pool is not None or not self._lock.acquire(timeout=_LOOK_EVERY_S):
            return pool
        try:
            now = time.monotonic()
            if geometry_id not in self._pools and now - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = now
                for geometry in self._cache.geometries():
                    attached = self._cache.attach(geometry, writer=False)
                    self._pools.setdefault(geometry.id_bytes, attached)
            return self._pools.get(geometry_id)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End every read. No fetch may be under way."""
        self._reader.close()
        self.blocks.close()
