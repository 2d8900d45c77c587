"""Reads blocks again that have come under suspicion, so that damage is found all at once.

A load ends at the first bad block. Where there is one there are often more, of a segment that was
cut short or overwritten, and each would cost another request its hit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import pieces_of
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 8 << 20
_MAX_SUSPECTS = 64


class Scrubber:
    """A thread that reads what it is given, and drops what is damaged from the index."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._suspects: deque[tuple[Pool, Sequence[bytes]]] = deque(maxlen=_MAX_SUSPECTS)
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def suspect(self, pool: Pool, keys: Sequence[bytes]) -> None:
        """Have these blocks read soon. The oldest of too many suspects is let go."""
        with self._wake:
            if self._thread is None:  # hardly anybody ever needs it
                self._thread = threading.Thread(
                    target=self._work, name="dualpath-scrub", daemon=True
                )
                self._thread.start()
            self._suspects.append((pool, keys))
            self._wake.notify()

    def close(self) -> None:
        """End the thread, after the read that it is at."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._suspects and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                pool, keys = self._suspects.popleft()
            try:
                self._check(pool, keys)
            except Exception:
                logger.exception("Blocks under suspicion could not be read")

    def _check(self, pool: Pool, keys: Sequence[bytes]) -> None:
        geometry = pool.geometry
        size = align_up(geometry.block_bytes)
        step = max(1, SCRATCH_BYTES // size)
        memory = aligned(min(step, len(keys)) * size)
        blocks = [
            pieces_of(memory[i * size : i * size + geometry.block_bytes], geometry)
            for i in range(min(step, len(keys)))
        ]
        for begin in range(0, len(keys), step):
            if self._closed:
                return
            part = keys[begin : begin + step]
            self._cache.read(pool, part, blocks[: len(part)])
