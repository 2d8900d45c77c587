"""What this process has accepted to read from storage and has not read yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadQueue:
    """Two counters, told to other nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._tokens = 0

    @property
    def bytes(self) -> int:
        """Payload bytes."""
        return self._bytes

    @property
    def tokens(self) -> int:
        """Tokens whose KV is among them."""
        return self._tokens

    def add(self, size: int, tokens: int = 0) -> None:
        """So much more was accepted, or with negative numbers read or given up."""
        with self._lock:
            self._bytes += size
            self._tokens += tokens

    @contextlib.contextmanager
    def holding(self, size: int, tokens: int) -> Iterator[None]:
        """Count a read as long as it takes."""
        self.add(size, tokens)
        try:
            yield
        finally:
            self.add(-size, -tokens)
