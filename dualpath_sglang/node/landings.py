"""Who waits for blocks that are being read, and is told when some of them land."""

from __future__ import annotations

import threading


class Landings:
    """Of the blocks of one read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[threading.Event, ...] = ()

    def listen(self, event: threading.Event) -> None:
        """Set an event whenever layers land, or blocks fail, until :meth:`leave`."""
        with self._lock:
            self._listeners = (*self._listeners, event)

    def leave(self, event: threading.Event) -> None:
        """End :meth:`listen`."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not event)

    def tell(self) -> None:
        """Something has landed or failed."""
        for event in self._listeners:
            if not event.is_set():
                event.set()
