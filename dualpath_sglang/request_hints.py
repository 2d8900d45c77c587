"""The hints of the requests that a server has, for whoever knows a request by its id alone."""

from __future__ import annotations

import threading
from collections import OrderedDict

from dualpath_sglang.read_hint import ReadHint, from_kv_hints, from_rid

_MOST = 4096
"""Requests; the oldest is forgotten first, and is read as if it had no hint."""


class RequestHints:
    """Thread-safe; nothing here raises. An id that carries its hint need not be noted.

    Args:
        most: requests to remember.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._noted: OrderedDict[str, ReadHint] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, rid: str, envelope: object) -> None:
        """What SGLang's ``Req.kv_hints`` says of a request, if anything."""
        hint = None if envelope is None else from_kv_hints(envelope)
        if hint is None:
            self.forget(rid)  # of one that had the same id
            return
        with self._lock:
            self._noted[rid] = hint
            self._noted.move_to_end(rid)
            while len(self._noted) > self._most:
                self._noted.popitem(last=False)

    def of(self, rid: str) -> ReadHint | None:
        """The hint of a request; that of its envelope before that of its id."""
        with self._lock:
            noted = self._noted.get(rid)
        return from_rid(rid) if noted is None else noted

    def forget(self, rid: str) -> None:
        """A request is over."""
        with self._lock:
            self._noted.pop(rid, None)

    def clear(self) -> None:
        """All are."""
        with self._lock:
            self._noted.clear()

    def __len__(self) -> int:
        """How many are noted."""
        return len(self._noted)
