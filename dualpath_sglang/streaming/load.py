"""What is asked of the streamer, and what it answers."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dualpath_sglang.pool import Pool
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.streaming.landing import Fence, Landing

OnLayer: TypeAlias = Callable[[int, Sequence[Fence]], None]
"""Called once a layer of the model, in order, with what a device must still do for it."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Blocks of one pool, and the pages that they belong in.

    Args:
        keys: a chain, or a part of one.
        pages: page of each block in ``landing``; no page twice.
        gates: by layer of the pool: the model's layer that waits for it.
    """

    pool: Pool
    landing: Landing
    keys: Sequence[bytes]
    pages: Sequence[int]
    gates: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request's prefix hit.

    Args:
        rid: its name, unique in the batch.
        after: an event of the device; the pages are written only after it.
        hint: who is to read it.
    """

    rid: str
    pools: Sequence[PoolLoad]
    after: object | None = None
    hint: ReadHint | None = None


class Outcome(enum.Enum):
    """How the load of one request ended. Only after OK do its pages hold what they should."""

    OK = "ok"
    MISS = "miss"
    """A block is not there, or damaged, and reading it again did not help."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"
    """Closed, or a fault in this process."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one request's load.

    Args:
        reason: of a MISS: the :class:`~dualpath_storage.ReadStatus` value.
        blocks: asked for.
        read_bytes: payload that landed.
        seconds: from the start of the batch.
    """

    outcome: Outcome
    reason: str = ""
    blocks: int = 0
    read_bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything landed."""
        return self.outcome is Outcome.OK


class Load:
    """A batch under way. The streamer feeds it; anybody may wait for it.

    Args:
        layers: of the model.
        deadline: monotonic seconds.
        cancel: tells the streamer to give up a request, or all.
    """

    def __init__(
        self,
        requests: Sequence[LoadRequest],
        layers: int,
        deadline: float,
        on_layer: OnLayer | None,
        cancel: Callable[[Load, str | None], None],
    ) -> None:
        self.requests = requests
        self.layers = layers
        self.deadline = deadline
        self.on_layer = on_layer
        self.began = time.monotonic()
        self.ready_s: list[float] = []
        """By layer: seconds from the start until it was announced."""
        self._cancel = cancel
        self._results: dict[str, LoadResult] = {}
        self._fences: Sequence[Fence] = ()
        self._done = False
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether every request has its result."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> dict[str, LoadResult]:
        """Results by rid, once nothing writes to any page of the batch any more.

        Ends by itself at the deadline of the batch; with a timeout, perhaps earlier and then
        without the requests that are still under way.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)
            results, fences = dict(self._results), self._fences
        for fence in fences:
            fence.synchronize()
        return results

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer is announced; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.ready_s) > layer, timeout_s)

    def cancel(self, rid: str | None = None) -> None:
        """Give up one request, or all. Takes effect soon; :meth:`wait` tells when."""
        self._cancel(self, rid)

    # -- for the streamer -------------------------------------------------------------------

    def announce(self) -> int:
        """Note that the next layer is there; its number."""
        with self._changed:
            self.ready_s.append(time.monotonic() - self.began)
            self._changed.notify_all()
            return len(self.ready_s) - 1

    def settle(self, rid: str, result: LoadResult) -> None:
        """Note the end of one request."""
        with self._changed:
            self._results[rid] = result

    def finish(self, fences: Sequence[Fence]) -> None:
        """Note the end of all; ``fences`` are what a device must still do."""
        with self._changed:
            self._fences = fences
            self._done = True
            self._changed.notify_all()
