"""Who sends next on a connection, where several want to."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Iterator

URGENT = -1
"""How late a frame is that goes before every piece: it is short, and somebody waits for it."""
_MOST_LATE = 16


class Turns:
    """Turns in the order of asking, but for how late what is to be sent is needed. Thread-safe.

    Whoever is one step later than another lets those who ask in the next turn go first, two steps
    later those of the next two, and so on up to sixteen: early layers overtake late ones, and
    nobody waits for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._asked = 0
        self._waiting: list[_Waiting] = []

    @contextlib.contextmanager
    def turn(self, late: int, deadline: float) -> Iterator[None]:
        """One's turn.

        Args:
            late: steps, not negative; or :data:`URGENT`.
            deadline: monotonic seconds.

        Raises:
            TimeoutError: it did not come by then.
        """
        self._take(late, deadline)
        try:
            yield
        finally:
            self._give()

    def _take(self, late: int, deadline: float) -> None:
        with self._lock:
            self._asked += 1
            if not self._taken:
                self._taken = True
                return
            rank = -1 if late == URGENT else self._asked + min(late, _MOST_LATE)
            waiting = _Waiting((rank, self._asked))
            heapq.heappush(self._waiting, waiting)
        left_s = max(0.0, deadline - time.monotonic())
        if waiting.go.wait(min(left_s, threading.TIMEOUT_MAX)):
            return
        with self._lock:
            if not waiting.go.is_set():  # else it came at the last moment
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
                raise TimeoutError

    def _give(self) -> None:
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting).go.set()
            else:
                self._taken = False


class _Waiting:
    __slots__ = ("go", "rank")

    def __init__(self, rank: tuple[int, int]) -> None:
        self.rank = rank
        self.go = threading.Event()

    def __lt__(self, other: _Waiting) -> bool:
        return self.rank < other.rank
