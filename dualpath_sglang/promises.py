"""What this process has promised to somebody, and therefore does not evict for a while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_PROMISES = 4096
"""A bound against callers who never release; the oldest promise goes first."""


class Promises:
    """Pages under promise, by the name of whoever it was given to. Thread-safe.

    A page is never evicted before its descendants, so one promise for the last page of a prefix
    keeps all of it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._lock = threading.Lock()

    def give(self, name: str, unit_key: bytes, ttl_s: float) -> None:
        """Promise a page (unit and key) for ``ttl_s`` seconds, in place of the name's last one."""
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = (unit_key, self._clock() + ttl_s)
            if len(self._held) > MAX_PROMISES:
                self._held.popitem(last=False)

    def release(self, name: str) -> None:
        """The name needs its page no more, if it had one."""
        with self._lock:
            self._held.pop(name, None)

    def held(self) -> frozenset[bytes]:
        """Every page under a promise that has not run out."""
        with self._lock:
            now = self._clock()
            for name in [n for n, (_, end) in self._held.items() if end <= now]:
                del self._held[name]
            return frozenset(unit_key for unit_key, _ in self._held.values())
