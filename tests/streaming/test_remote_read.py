"""A destination in staging memory, whoever ends it and whenever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dualpath_sglang.streaming.remote_read import RemoteRead
from dualpath_sglang.streaming.staging import Staging
from dualpath_sglang.transport.base import End, Span
from dualpath_storage.memory import aligned
from tests.streaming.bed import eventually, geometry

OF = geometry(layers=4, layer_bytes=1 << 16)
UNIT = 1 << 16


class Listener:
    """Hears nothing."""

    def remote_piece(self, *_: Any) -> None: ...
    def remote_missing(self, *_: Any) -> None: ...
    def remote_ended(self, *_: Any) -> None: ...


def read_into(staging: Staging, deadline: float | None = None) -> RemoteRead:
    pool = SimpleNamespace(geometry=OF)
    part: Any = SimpleNamespace(load=SimpleNamespace(pool=pool), key=lambda block: bytes(32))
    end = time.monotonic() + 20.0 if deadline is None else deadline
    batch: Any = SimpleNamespace(load=SimpleNamespace(deadline=end))
    posted: list[Callable[[], None]] = []
    return RemoteRead(batch, part, range(2), 0, "a", staging, posted.append, Listener())


def test_memory_that_is_found_after_the_end_goes_back() -> None:
    """The thread of the connection waits for memory while another one ends the fetch."""
    staging = Staging(aligned(2 * UNIT))
    held = staging.take(2 * UNIT)
    assert held is not None
    read = read_into(staging)
    got: list[Any] = []
    span = Span(0, 1, 0, 2)
    thread = threading.Thread(
        target=lambda: got.append(read.views(span, time.monotonic() + 20.0)), daemon=True
    )
    thread.start()
    eventually(lambda: staging._waiting == 1, "it waits")
    read.ended(End.CANCELLED, None)
    staging.give(held)
    thread.join(20.0)
    assert got == [None]
    assert staging.used_bytes == 0


def test_after_the_end_no_memory_is_taken() -> None:
    staging = Staging(aligned(2 * UNIT))
    read = read_into(staging)
    read.ended(End.CANCELLED, None)
    assert read.views(Span(0, 1, 0, 2), time.monotonic() + 20.0) is None
    assert staging.used_bytes == 0


def test_a_piece_that_broke_off_goes_back_once() -> None:
    staging = Staging(aligned(2 * UNIT))
    read = read_into(staging)
    assert read.views(Span(0, 1, 0, 2), time.monotonic() + 20.0)
    read.ended(End.LOST, None)
    read.ended(End.LOST, None)
    assert staging.used_bytes == 0


def test_a_deadline_may_be_as_far_as_it_likes() -> None:
    for deadline in (time.monotonic() + 1e9, float("inf"), time.monotonic() - 5.0):
        assert read_into(Staging(aligned(UNIT)), deadline).request.timeout_s > 0
