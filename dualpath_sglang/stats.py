"""What the cache counts. Everything is a plain number that only grows, until asked for usage."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from dualpath_storage import ReadStatus


@dataclass(slots=True)
class CacheStats:
    """A snapshot of one process's counters.

    ``misses`` is by reason (:class:`~dualpath_storage.ReadStatus` value, or ``index``); a block
    that is looked up and is absent counts there too. Bytes are payload; seconds are summed over
    threads.
    """

    lookups: int = 0
    hit_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    pending_blocks: int = 0
    present_blocks: int = 0
    dropped_blocks: int = 0
    failed_blocks: int = 0
    evicted_blocks: int = 0
    repaired_blocks: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    capacity_bytes: int = 0
    used_bytes: int = 0


class Counters:
    """Thread-safe counters behind :class:`CacheStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self.removals = 0
        """Blocks that left the index through this process."""

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more of a field of :class:`CacheStats`."""
        if amount:
            with self._lock:
                self._counts[name] += amount
                if name in ("evicted_blocks", "repaired_blocks"):
                    self.removals += amount

    def miss(self, reason: str, blocks: int = 1) -> None:
        """Count missed blocks by reason."""
        if blocks:
            with self._lock:
                self._misses[reason] += blocks

    def reads(self, statuses: list[ReadStatus]) -> None:
        """Count the outcomes of one read."""
        by_status = Counter(statuses)
        with self._lock:
            self._counts["hit_blocks"] += by_status.pop(ReadStatus.OK, 0)
            for status, blocks in by_status.items():
                self._misses[status.value] += blocks

    def snapshot(self) -> CacheStats:
        """The counters now; bytes, seconds and usage are for the caller to fill in."""
        with self._lock:
            return CacheStats(**self._counts, misses=dict(self._misses))
