"""Layer waits, and their end."""

from __future__ import annotations

import threading
import time

from dualpath_sglang import layer_counter
from dualpath_sglang.layer_counter import LayerCounter


class Fence:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    def finished(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for the device")


def soon() -> float:
    return time.monotonic() + 10.0


def test_a_forward_waits_for_its_layer_and_no_more() -> None:
    waits: list[float] = []
    counter = LayerCounter(3, waits.append)
    index = counter.open(soon())
    counter.set_consumer(index)
    reached = []

    def forward() -> None:
        for layer in range(3):
            counter.wait_until(layer)
            counter.wait_until(layer)  # K, then V
            reached.append(layer)

    thread = threading.Thread(target=forward)
    thread.start()
    for layer in range(3):
        assert len(reached) <= layer
        counter.announce(index, layer)
        while len(reached) <= layer:
            time.sleep(0.001)
    thread.join()
    assert len(waits) <= 3
    assert counter.close(index)


def test_without_a_load_nobody_waits() -> None:
    counter = LayerCounter(2)
    counter.wait_until(1)
    index = counter.open(soon())
    counter.set_consumer(-1)
    counter.wait_until(1)
    counter.close(index)
    counter.set_consumer(index)
    counter.wait_until(1)


def test_a_device_is_told_to_wait_and_the_host_is_not() -> None:
    counter = LayerCounter(1)
    index = counter.open(soon())
    fence = Fence()
    counter.announce(index, 0, (fence,))
    counter.set_consumer(index)
    counter.wait_until(0)
    counter.wait_until(0)
    assert fence.waited == 2


def test_a_layer_that_never_comes_is_waited_for_once(monkeypatch: object) -> None:
    counter = LayerCounter(4)
    index = counter.open(time.monotonic() - layer_counter.GRACE_S + 0.05)
    counter.set_consumer(index)
    for layer in range(4):
        counter.wait_until(layer)
    assert not counter.close(index)


def test_a_late_announcement_finds_nothing() -> None:
    counter = LayerCounter(1)
    index = counter.open(soon())
    counter.reset()
    counter.announce(index, 0)
    other = counter.open(soon())
    assert other != index
    counter.announce(index, 0)
    assert counter.close(other)
