"""How much a server has taken on at a time, over all of its connections."""

from __future__ import annotations

import threading


class Budget:
    """Thread-safe.

    Args:
        most: fetches at a time.
        most_bytes: of their requests.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._count = 0
        self._bytes = 0

    def take(self, size: int) -> bool:
        """Whether one more fetch may be taken on, whose request has so many bytes.

        It then counts until :meth:`give`.
        """
        with self._lock:
            if self._count >= self._most or self._bytes + size > self._most_bytes:
                return False
            self._count += 1
            self._bytes += size
            return True

    def give(self, size: int) -> None:
        """A fetch that was taken on is over."""
        with self._lock:
            self._count -= 1
            self._bytes -= size
