"""What a cache does by itself: a lost index, late publishes, touches, freed slots, the capacity."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from dualpath_sglang.evictor import Evictor
from dualpath_sglang.index import Index
from dualpath_sglang.index.keeper import IndexKeeper
from dualpath_sglang.pool import Pool
from dualpath_sglang.writer import Writer
from dualpath_storage import StoreOptions

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_MAX_TOUCHES = 4096


class Upkeep:
    """A thread that sees to a cache every second. Thread-safe.

    Args:
        keeper: of the index.
        index: the index for a while, None when it cannot be used; swallows its failures.
        pools: those that are attached.
        tell: tells other nodes about this one; may raise what the index raises.
        serving: whether this is a server.
    """

    def __init__(
        self,
        options: StoreOptions,
        keeper: IndexKeeper,
        index: Callable[[], AbstractContextManager[Index | None]],
        pools: Callable[[], Sequence[Pool]],
        writer: Writer,
        evictor: Evictor,
        tell: Callable[[Index], None],
        *,
        serving: bool,
    ) -> None:
        self._options = options
        self._keeper = keeper
        self._index = index
        self._pools = pools
        self._writer = writer
        self._evictor = evictor
        self._tell = tell
        self._serving = serving
        self._touches: list[tuple[bytes, tuple[bytes, ...]]] = []
        self._lock = threading.Lock()
        self.running = threading.Lock()
        """Held while :meth:`run` is at it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dualpath-upkeep", daemon=True)
        self._thread.start()

    def touch(self, unit: bytes, keys: Sequence[bytes]) -> None:
        """Write the use of a chain down later, in a batch."""
        with self._lock:
            if len(self._touches) < _MAX_TOUCHES:
                self._touches.append((unit, tuple(keys)))

    def run(self) -> None:
        """All of it, once."""
        with self.running:
            self._keeper.ensure()
            with self._lock:
                touches, self._touches = self._touches, []
            timeout_s = self._options.lookup_timeout_s
            with self._index() as index:
                if index is None:
                    return
                if not self._options.read_only:  # before the index doubts what had no answer
                    self._writer.publish_late(index, timeout_s)
                index.upkeep()
                self._tell(index)
                if self._options.read_only:
                    return
                for unit, chain in touches:
                    index.touch(unit, chain, timeout_s)
                for pool in self._pools():
                    if pool.writer:
                        freed = pool.maintain(index, timeout_s)
                        for other in self._pools():
                            other.take_back(freed)
                # Tools that only look have no say in the capacity.
                if self._serving or self._writer.used:
                    self._evictor.shrink(index, timeout_s)
                self._evictor.relieve(index, timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Do it no more unless asked."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self.run()
            except Exception:
                logger.exception("Upkeep of %s failed; it goes on", self._options.root)
