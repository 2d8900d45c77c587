"""Host-to-device loads that overlap with the forward, one event a layer, without CUDA streams.

On a GPU, HiCache queues the copies of a load on a side stream and records an event a layer; the
attention of layer i makes its stream wait for event i. SGLang's CPU engine has no-op streams and
events: the copies would run inside `submit_host_to_device` and there would be nothing to wait for.
Here a load runs on a thread of its own and the events are real:

    scheduler thread                             load thread
    submit_host_to_device: events cleared   ->   layer 0 copied, event 0 set
    forward, layer 0: wait for event 0           layer 1 copied, event 1 set
    forward, layer 1: wait for event 1           ...

so a layer wait that is missing in the code under test shows as a wrong answer.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ON_DEMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LoadSwitches:
    """Switches for tests, from the environment. Defaults change nothing."""

    trace: Path | None = None
    delay_s: float = 0.0
    on_demand: bool = False
    no_wait: bool = False

    @classmethod
    def from_environment(cls) -> LoadSwitches:
        trace = os.environ.get("SGLANG_CPU_LOAD_TRACE")
        return cls(
            trace=Path(trace) if trace else None,
            delay_s=float(os.environ.get("SGLANG_CPU_LOAD_DELAY_S", "0")),
            on_demand=os.environ.get("SGLANG_CPU_LOAD_ON_DEMAND") == "1",
            no_wait=os.environ.get("SGLANG_CPU_LOAD_NO_WAIT") == "1",
        )


class LayerEvent:
    """The part of `torch.cuda.Event` that HiCache uses, over `threading.Event`.

    Set when new, as an event that was never recorded is. A failed load raises in its waiters.
    """

    def __init__(self) -> None:
        self._set = threading.Event()
        self._set.set()
        self._wanted = threading.Event()
        self._error: BaseException | None = None

    def clear(self) -> None:
        self._error = None
        self._wanted.clear()
        self._set.clear()

    def record(self, stream: Any = None) -> None:
        self._set.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._set.set()

    def query(self) -> bool:
        done = self._set.is_set()
        if done and self._error is not None:
            raise RuntimeError("the load of KV cache from host memory failed") from self._error
        return done

    def synchronize(self) -> None:
        self._wanted.set()
        self._set.wait()
        self.query()

    def until_wanted(self, timeout_s: float) -> bool:
        """Wait until somebody waits for this event; False after `timeout_s`."""
        return self._wanted.wait(timeout_s)

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class LayerLoads:
    """Runs the loads of one process, in order, on one thread. Its methods are SGLang hooks."""

    def __init__(self, switches: LoadSwitches, completion: Callable[..., Any]) -> None:
        """`completion(start_event, finish_event, timing_enabled)` is what a submit returns."""
        self._switches = switches
        self._completion = completion
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-load")

    def after_events_made(self, _result: None, events: Any, num_layers: int) -> None:
        """AFTER LayerLoadingEvent.__init__: events that can be waited for."""
        events.load_events = [LayerEvent() for _ in range(num_layers)]

    def wait_for_layer(self, events: Any, layer: int) -> None:
        """REPLACE LayerLoadingEvent.wait: called by the pool when attention reads a layer."""
        event: LayerEvent = events.load_events[layer]
        if self._switches.no_wait:
            return
        if event.query():
            self._trace("ready", layer=layer)
            return
        started = time.monotonic()
        event.wait()
        self._trace("waited", layer=layer, waited_s=time.monotonic() - started)

    def around_submit(
        self,
        original: Callable[..., Any],
        engine: Any,
        transfers: list[Any],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Callable[[int], None] | None = None,
    ) -> Any:
        """AROUND L2TransferEngine.submit_host_to_device: the same load, on the load thread."""
        finished = LayerEvent()
        finished.clear()
        layers: list[LayerEvent] = []
        if on_layer_done is not None:
            # The bound LayerLoadingEvent.complete of the load that is being submitted.
            layers = on_layer_done.__self__.load_events  # type: ignore[attr-defined]
            for event in layers:
                event.clear()

        def before(layer: int) -> None:
            time.sleep(self._switches.delay_s)
            if (
                self._switches.on_demand
                and layer < len(layers)
                and not layers[layer].until_wanted(ON_DEMAND_TIMEOUT_S)
            ):
                logger.warning("Nobody waits for layer %d: loading it all the same", layer)

        def layer_done(layer: int) -> None:
            if on_layer_done is not None:
                on_layer_done(layer)
            self._trace("loaded", layer=layer)
            if layer + 1 < transfer_layer_id_max:
                before(layer + 1)

        def load() -> None:
            try:
                before(0)
                # The pools were made under inference mode, which is a property of a thread.
                with torch.inference_mode():
                    original(
                        engine,
                        transfers,
                        transfer_layer_id_max=transfer_layer_id_max,
                        start_event=start_event,
                        on_layer_done=layer_done,
                    )
            except Exception as error:
                # Raised again in whoever waits, as a synchronous copy would have.
                logger.exception("Load of KV cache from host memory failed")
                for event in (*layers, finished):
                    event.fail(error)
            else:
                # Pools of fewer layers than the model has leave some unrecorded.
                for event in (*layers, finished):
                    event.record()

        self._trace("submitted", layers=transfer_layer_id_max)
        self._thread.submit(load)
        return self._completion(finished, finished, False)

    def _trace(self, event: str, **fields: Any) -> None:
        if self._switches.trace is None:
            return
        line = {"t": time.monotonic(), "pid": os.getpid(), "event": event, **fields}
        with self._switches.trace.open("a") as file:
            file.write(json.dumps(line) + "\n")
