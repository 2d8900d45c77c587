"""What the index said of pages a moment ago, so that it need not be asked again at once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_PAGES = 1 << 16
MAX_MISSING = 1 << 13


class KnownPages(Generic[K]):
    """Pages known to be there, and known not to be. Bounded, thread-safe.

    Args:
        present_s: a page that is there is forgotten after these seconds at the latest.
        missing_s: as long a page counts as missing.

    What was said in an earlier *epoch* (:attr:`KVCache.epoch`) counts no more: an eviction may have
    taken it since.
    """

    def __init__(self, present_s: float, missing_s: float = 0.0) -> None:
        self._present_s = present_s
        self._missing_s = missing_s
        self._lock = threading.Lock()
        # Two generations: what is not seen again while the younger one fills is forgotten.
        self._young: dict[K, None] = {}
        self._old: dict[K, None] = {}
        self._turned = self._old_until = time.monotonic()
        self._epoch = 0
        self._missing: OrderedDict[K, float] = OrderedDict()

    def leading_run(self, keys: Sequence[K], epoch: int) -> tuple[int, bool]:
        """Leading pages that are there, and whether the next is known to be missing."""
        now = time.monotonic()
        with self._lock:
            self._turn(now, epoch)
            young, old = self._young, self._old
            for i, key in enumerate(keys):
                if key not in young and key not in old:
                    return i, self._missing.get(key, 0.0) > now
        return len(keys), False

    def seen(self, present: Sequence[K], missing: K | None, epoch: int) -> None:
        """What the index says, and the epoch in which it was asked."""
        now = time.monotonic()
        with self._lock:
            if epoch < self._epoch:
                return
            self._turn(now, epoch)
            self._young.update(dict.fromkeys(present))
            for key in present:
                self._missing.pop(key, None)
            if missing is not None:
                self._missing[missing] = now + self._missing_s
                self._missing.move_to_end(missing)
                if len(self._missing) > MAX_MISSING:
                    self._missing.popitem(last=False)

    def appeared(self, keys: Iterable[K]) -> None:
        """Pages are not missing any more; whether all of their pools are there is not said."""
        with self._lock:
            for key in keys:
                self._missing.pop(key, None)

    def forget_present(self) -> None:
        """Some may be gone."""
        with self._lock:
            self._young, self._old = {}, {}

    def forget_all(self) -> None:
        """Know nothing."""
        with self._lock:
            self._young, self._old = {}, {}
            self._missing.clear()

    def _turn(self, now: float, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._young, self._old = {}, {}
        if len(self._young) > MAX_PAGES // 2 or now - self._turned > self._present_s / 2:
            self._old, self._young = self._young, {}
            self._old_until, self._turned = self._turned + self._present_s, now
        if now > self._old_until:
            self._old = {}
