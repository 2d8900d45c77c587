"""What this process, and its machine, has accepted to read from storage and has not read yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class SharedQueue(Protocol):
    """The queue of all processes of a machine. Never raises."""

    def put(self, size: int, tokens: int) -> None:
        """What this process has to read by now."""
        ...

    def total(self) -> tuple[int, int]:
        """Bytes and tokens of all living processes."""
        ...


class ReadQueue:
    """Two counters, told to other nodes. Thread-safe.

    Args:
        machine: where they are told to the other processes of this machine too.
    """

    def __init__(self, machine: SharedQueue | None = None) -> None:
        self._lock = threading.Lock()
        self._machine = machine
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

    def of_machine(self) -> tuple[int, int]:
        """Bytes and tokens of all processes of the machine, as far as they are known."""
        if self._machine is None:
            return self._bytes, self._tokens
        return self._machine.total()

    def add(self, size: int, tokens: int = 0) -> None:
        """So much more was accepted, or with negative numbers read or given up."""
        with self._lock:
            self._bytes += size
            self._tokens += tokens
            if self._machine is not None:
                self._machine.put(self._bytes, self._tokens)

    @contextlib.contextmanager
    def holding(self, size: int, tokens: int) -> Iterator[None]:
        """Count a read as long as it takes."""
        self.add(size, tokens)
        try:
            yield
        finally:
            self.add(-size, -tokens)
