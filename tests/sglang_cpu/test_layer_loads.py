"""A load runs beside its caller, and a wait for a layer lasts until that layer is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sglang_cpu.layer_loads import LayerEvent, LayerLoads, LoadSwitches

LAYERS = 3


class Events:
    """The shape of SGLang's LayerLoadingEvent."""

    load_events: list[LayerEvent]

    def complete(self, layer: int) -> None:
        self.load_events[layer].record()


def make(switches: LoadSwitches | None = None) -> tuple[LayerLoads, Events]:
    loads = LayerLoads(
        switches or LoadSwitches(), lambda *fields: SimpleNamespace(finish=fields[1])
    )
    events = Events()
    loads.after_events_made(None, events, LAYERS)
    return loads, events


def submit(loads: LayerLoads, events: Events, copy_layer: Callable[[int], None]):
    def original(engine, transfers, *, transfer_layer_id_max, start_event, on_layer_done):
        for layer in range(transfer_layer_id_max):
            copy_layer(layer)
            on_layer_done(layer)

    return loads.around_submit(
        original, None, [], transfer_layer_id_max=LAYERS, on_layer_done=events.complete
    )


def test_a_layer_can_be_used_before_the_next_one_is_loaded():
    loads, events = make()
    steps = [threading.Event() for _ in range(LAYERS)]
    done = submit(loads, events, lambda layer: steps[layer].wait(30))
    for layer in range(LAYERS):
        assert not any(event.query() for event in events.load_events[layer:])
        assert not done.finish.query()
        steps[layer].set()
        loads.wait_for_layer(events, layer)
        assert events.load_events[layer].query()
    done.finish.synchronize()


def test_waiting_for_a_layer_lasts_until_it_is_loaded():
    loads, events = make()
    copied: list[int] = []
    go = threading.Event()

    def copy_layer(layer: int) -> None:
        go.wait(30)
        copied.append(layer)

    submit(loads, events, copy_layer)
    threading.Timer(0.05, go.set).start()
    loads.wait_for_layer(events, LAYERS - 1)
    assert copied == [0, 1, 2]


def test_without_the_wait_a_layer_is_used_too_early():
    loads, events = make(LoadSwitches(no_wait=True))
    go = threading.Event()
    done = submit(loads, events, lambda layer: go.wait(30))
    loads.wait_for_layer(events, LAYERS - 1)
    assert not events.load_events[LAYERS - 1].query()
    go.set()
    done.finish.synchronize()


def test_on_demand_a_layer_is_loaded_when_it_is_waited_for_and_not_before():
    loads, events = make(LoadSwitches(on_demand=True))
    copied: list[int] = []
    done = submit(loads, events, copied.append)
    for layer in range(LAYERS):
        assert copied == list(range(layer))
        loads.wait_for_layer(events, layer)
    done.finish.synchronize()
    assert copied == list(range(LAYERS))


def test_a_failed_load_raises_in_its_waiters_and_the_next_load_works():
    loads, events = make()

    def fail(layer: int) -> None:
        if layer == 1:
            raise OSError("host memory went away")

    done = submit(loads, events, fail)
    with pytest.raises(RuntimeError, match="failed"):
        done.finish.synchronize()
    with pytest.raises(RuntimeError, match="failed"):
        loads.wait_for_layer(events, 2)
    submit(loads, events, lambda layer: None).finish.synchronize()
    loads.wait_for_layer(events, 2)


def test_layers_that_a_load_does_not_bring_are_not_waited_for_after_it():
    loads, events = make()

    def original(engine, transfers, *, transfer_layer_id_max, start_event, on_layer_done):
        on_layer_done(0)

    loads.around_submit(
        original, None, [], transfer_layer_id_max=1, on_layer_done=events.complete
    ).finish.synchronize()
    loads.wait_for_layer(events, LAYERS - 1)


def test_a_load_without_events_can_be_awaited():
    loads, _ = make()
    ran: list[bool] = []

    def original(engine, transfers, *, transfer_layer_id_max, start_event, on_layer_done):
        on_layer_done(0)
        ran.append(True)

    loads.around_submit(original, None, [], transfer_layer_id_max=1).finish.synchronize()
    assert ran == [True]


def test_the_trace_tells_loaded_layers_and_waits(tmp_path):
    trace = tmp_path / "trace.jsonl"
    loads, events = make(LoadSwitches(trace=trace, on_demand=True))
    done = submit(loads, events, lambda layer: None)
    for layer in range(LAYERS):
        loads.wait_for_layer(events, layer)
    done.finish.synchronize()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["layers"] for line in lines if line["event"] == "submitted"] == [LAYERS]
    for event in ("loaded", "waited"):
        assert [line["layer"] for line in lines if line["event"] == event] == [0, 1, 2]
