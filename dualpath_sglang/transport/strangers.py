"""Connections that have not proved yet who they are: few places, none of them for long."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Strangers(Generic[T]):
    """Those at the door. When there are too many the oldest has to go: of the same address, if that
    has more than its share. Thread-safe.

    An honest one needs milliseconds. So it is let in though others hold every place, unless as many
    as there are places come after it in that time.

    Args:
        most, most_of_one: places, and those of one address.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._lock = threading.Lock()
        self._here: OrderedDict[T, str] = OrderedDict()
        self._of: Counter[str] = Counter()

    def enter(self, who: T, address: str) -> T | None:
        """One more; who has to go for it, if anybody."""
        with self._lock:
            goes: T | None = None
            if self._of[address] >= self._most_of_one:
                goes = next(one for one, where in self._here.items() if where == address)
            elif len(self._here) >= self._most:
                goes = next(iter(self._here))
            if goes is not None:
                self._remove(goes)
            self._here[who] = address
            self._of[address] += 1
            return goes

    def leave(self, who: T) -> bool:
        """One is let in, or has given up; whether it was still there."""
        with self._lock:
            if who not in self._here:
                return False
            self._remove(who)
            return True

    def _remove(self, who: T) -> None:
        address = self._here.pop(who)
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]


class Refusals:
    """Warnings of connections that were not let in, at most one a minute and address. Thread-safe.

    Args:
        logger: where they go.
    """

    def __init__(self, logger: logging.Logger, every_s: float = 60.0, most: int = 1024) -> None:
        self._logger = logger
        self._every_s = every_s
        self._most = most
        self._lock = threading.Lock()
        self._last: OrderedDict[str, float] = OrderedDict()
        """By address, the longest ago first."""

    def warn(self, address: str, why: object) -> None:
        """Log one, unless one of that address has been logged.

        Of more addresses than are remembered, none is logged until the oldest is forgotten.
        """
        now = time.monotonic()
        with self._lock:
            while self._last and now - next(iter(self._last.values())) >= self._every_s:
                self._last.popitem(last=False)
            if address in self._last or len(self._last) >= self._most:
                return
            self._last[address] = now
        self._logger.warning("A connection from %s is refused: %s", address, why)
