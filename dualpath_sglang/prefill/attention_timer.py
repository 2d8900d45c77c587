"""How long the attention layers of a model take in one forward, summed.

Hooks of torch's on SGLang's ``RadixAttention`` modules. On CUDA the time is between two events
around each layer, read when they have happened, so nothing waits for the device. Layers that run
inside a captured graph call no hooks: such forwards have no time. On a CPU with one thread it is
the time that this thread has run, so that what else the machine does counts as little as possible.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_MOST_PENDING = 64


class AttentionTimer:
    """Times one forward at a time.

    Args:
        model: whose attention layers are timed.
        cuda: whether the layers run on a CUDA device, behind the calling thread.
    """

    def __init__(self, model: torch.nn.Module, *, cuda: bool) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        self._cuda = cuda
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._on = False
        self._seconds = 0.0
        self._began = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[list[tuple[Any, Any]], Callable[[float | None], None]]] = deque()
        self.layers = 0
        for module in model.modules():
            if isinstance(module, RadixAttention):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)
                self.layers += 1

    def begin(self) -> None:
        """A forward begins."""
        self._on = True
        self._seconds = 0.0
        self._events = []

    def end(self, then: Callable[[float | None], None]) -> None:
        """The forward was issued: ``then`` hears its seconds, now or in a later call."""
        self._on = False
        if not self._cuda:
            then(self._seconds if self._seconds > 0 else None)
            return
        self._pending.append((self._events, then))
        self.poll()

    def poll(self) -> None:
        """Report forwards that have ended on the device."""
        while self._pending:
            events, then = self._pending[0]
            if events and not events[-1][1].query() and len(self._pending) <= _MOST_PENDING:
                return
            self._pending.popleft()
            if not events or not events[-1][1].query():
                then(None)
            else:
                then(sum(begin.elapsed_time(end) for begin, end in events) / 1000)

    def _before(self, *_: Any) -> None:
        if not self._on:
            return
        if not self._cuda:
            self._began = self._clock()
        elif not torch.cuda.is_current_stream_capturing():
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            self._events.append((begin, torch.cuda.Event(enable_timing=True)))

    def _after(self, *_: Any) -> None:
        if not self._on:
            return
        if not self._cuda:
            self._seconds += self._clock() - self._began
        elif self._events and not torch.cuda.is_current_stream_capturing():
            self._events[-1][1].record()
