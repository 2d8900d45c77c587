"""When to stop asking somebody who does not answer, and when to try again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed while calls succeed, open after a few failures in a row. Thread-safe.

    While it is open every call is refused, but for one at a time that tries, after a pause that
    doubles with every failed try.

    Args:
        failures: how many in a row open it.
        pauses_s: the first pause and the longest.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        failures: int = 3,
        pauses_s: tuple[float, float] = (0.05, 1.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._pauses_s = pauses_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = 0.0
        self._try_at = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, or one of them tries now."""
        return self._failures >= self._limit

    def enter(self) -> bool:
        """Whether a call may be made; it must be followed by one of the other two."""
        with self._lock:
            if self._failures < self._limit:
                return True
            if self._trying or self._clock() < self._try_at:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """The call was answered, if only with a refusal."""
        with self._lock:
            self._failures = 0
            self._trying = False

    def failed(self) -> None:
        """The call was not answered in time."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return
            if self._failures > self._limit and not self._trying:
                return  # begun before it opened
            first, longest = self._pauses_s
            self._pause_s = min(2 * self._pause_s, longest) if self._trying else first
            self._try_at = self._clock() + self._pause_s
            self._trying = False
