"""What the forward waits for, layer by layer, never longer than the load's deadline.

| who | call | when |
|---|---|---|
| scheduler | ``open`` | a load starts; its index goes with the batch |
| scheduler | ``set_consumer`` | before a forward: the batch's index, or -1 |
| streamer | ``announce`` | layer ``i`` of every live request is in its pages |
| forward | ``wait_until`` | attention is about to read layer ``i`` |
| scheduler | ``close`` | the forward was launched and the load is over |

SGLang looks at ``num_layers``, ``consumer_index``, ``set_consumer`` and ``wait_until``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.streaming.landing import Fence

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long after the deadline a layer may be announced before nobody believes in it any more."""


@dataclass(slots=True)
class _Batch:
    deadline: float
    ready: list[threading.Event]
    fences: list[Sequence[Fence]]
    waited: set[int] = field(default_factory=set)
    late: bool = False


class LayerCounter:
    """One for each process. See the module for who calls what.

    Args:
        num_layers: transfer layers.
        on_wait: told the seconds that a forward waited, once a layer that was not there yet.
    """

    def __init__(self, num_layers: int, on_wait: Callable[[float], None] | None = None) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._on_wait = on_wait
        self._batches: dict[int, _Batch] = {}
        self._next = 0

    def open(self, deadline: float) -> int:
        """Layers that are to come until ``deadline`` (monotonic seconds); their index."""
        index = self._next
        self._next += 1
        self._batches[index] = _Batch(
            deadline,
            [threading.Event() for _ in range(self.num_layers)],
            [()] * self.num_layers,
        )
        return index

    def announce(self, index: int, layer: int, fences: Sequence[Fence] = ()) -> None:
        """A layer is in its pages, once the fences are waited for."""
        batch = self._batches.get(index)
        if batch is not None:
            batch.fences[layer] = fences
            batch.ready[layer].set()

    def set_consumer(self, index: int) -> None:
        """The load whose layers the next forward reads; -1 for none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Called by SGLang's pools before layer ``threshold`` is read. Never raises."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        ready = batch.ready[threshold]
        if not ready.is_set():
            self._wait(batch, ready, threshold)
        for fence in batch.fences[threshold]:
            fence.wait()

    def _wait(self, batch: _Batch, ready: threading.Event, layer: int) -> None:
        begin = time.monotonic()
        if not ready.wait(max(0.0, batch.deadline + GRACE_S - begin)) and not batch.late:
            batch.late = True
            logger.error(
                "Layer %d was not announced by its deadline; its requests are computed anew", layer
            )
        if self._on_wait is not None and layer not in batch.waited:
            batch.waited.add(layer)
            self._on_wait(time.monotonic() - begin)

    def close(self, index: int) -> bool:
        """Forget a load; whether every layer that was waited for came in time."""
        batch = self._batches.pop(index, None)
        return batch is None or not batch.late

    def reset(self) -> None:
        """Forget all loads. An index is never used twice: a late announcement must find nothing."""
        self._batches.clear()
        self.consumer_index = -1
