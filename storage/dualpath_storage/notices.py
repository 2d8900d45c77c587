"""Warnings of what goes on failing: the first at once, then one every now and then."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0


class Notices:
    """Warnings about one thing, at most one every ten seconds. Thread-safe.

    Args:
        logger: where they go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._last = float("-inf")

    def warn(self, message: str, *args: object) -> None:
        """Log a warning, unless one has just been logged."""
        with self._lock:
            now = time.monotonic()
            if now - self._last <= _EVERY_S:
                return
            self._last = now
        self._logger.warning(message, *args)
