"""Who sends next: nobody waits for another's many pieces, and nobody for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.server import Server
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_sglang.transport.turns import URGENT, Turns
from tests.transport.peers import GEOMETRY_ID, LAYERS, SOON_S, Blocks, keys, wait_until
from tests.transport.raw import RawClient

LONG, SHORT = 1, 2


class Line:
    """Threads that wait for a turn, each in the order in which it was made."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.went: list[str] = []
        self.late: list[str] = []
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, late: int, timeout_s: float = SOON_S) -> None:
        waiting = len(self.turns._waiting)
        thread = threading.Thread(target=self._wait, args=(name, late, timeout_s))
        self._threads.append(thread)
        thread.start()
        wait_until(lambda: len(self.turns._waiting) > waiting)

    def _wait(self, name: str, late: int, timeout_s: float) -> None:
        try:
            with self.turns.turn(late, time.monotonic() + timeout_s):
                self.went.append(name)
        except TimeoutError:
            self.late.append(name)

    def over(self) -> list[str]:
        for thread in self._threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
        return self.went


def test_turns_come_in_the_order_of_asking() -> None:
    line = Line()
    with line.turns.turn(0, time.monotonic()):
        for name in "abcdef":
            line.ask(name, 3)
    assert "".join(line.over()) == "abcdef"


def test_early_layers_overtake_late_ones_and_urgent_frames_all() -> None:
    line = Line()
    with line.turns.turn(0, time.monotonic()):
        for name, late in (("p", 40), ("q", 4), ("r", 0), ("s", 2), ("u", URGENT), ("v", URGENT)):
            line.ask(name, late)
    assert "".join(line.over()) == "uvrqsp"


def test_a_late_layer_is_overtaken_a_few_times_and_not_for_ever() -> None:
    line = Line()
    turns = line.turns
    overtaken = 0
    with turns.turn(0, time.monotonic()):
        line.ask("late", 500)
        for _ in range(64):
            line.ask("early", 0)
    line.over()
    overtaken = line.went.index("late")
    assert 1 <= overtaken <= 17


def test_whoever_waits_in_vain_leaves_no_gap() -> None:
    line = Line()
    with line.turns.turn(0, time.monotonic()):
        line.ask("a", 0)
        line.ask("b", 0, timeout_s=0.05)
        line.ask("c", 0)
        wait_until(lambda: line.late)
        with pytest.raises(TimeoutError), line.turns.turn(URGENT, time.monotonic() - 1.0):
            pass
    assert line.over() == ["a", "c"]
    with line.turns.turn(0, time.monotonic()):
        pass


def test_a_turn_is_given_on_though_its_holder_fails() -> None:
    turns = Turns()
    with pytest.raises(RuntimeError), turns.turn(0, time.monotonic()):
        raise RuntimeError
    with turns.turn(0, time.monotonic()):
        pass


def test_one_at_a_time_and_all_of_them() -> None:
    turns = Turns()
    inside, most, count = 0, 0, 0

    def work(late: int) -> None:
        nonlocal inside, most, count
        for i in range(200):
            try:
                with turns.turn(late, time.monotonic() + (0.0002 if i % 5 == 0 else SOON_S)):
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0)
                    inside -= 1
                    count += 1
            except TimeoutError:
                pass

    threads = [threading.Thread(target=work, args=(n - 1,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert most == 1
    assert count >= 8 * 160
    assert not turns._taken
    assert not turns._waiting


# -- over a connection ------------------------------------------------------------------------


def test_two_fetches_of_a_connection_take_turns(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a link so slow that while one sends, the other has its next piece ready."""
    real, over = SocketIo.send_now, threading.Event()

    def send_now(io: SocketIo, buffers: Sequence[bytes | memoryview], begin_by: float) -> None:
        kind = Head.unpack(buffers[0][: frames.HEAD_BYTES]).kind
        if kind is Kind.DATA:
            wait_until(lambda: io._turns._waiting or over.is_set())
        elif kind is Kind.END:
            over.set()
        real(io, buffers, begin_by)

    server = serve(Blocks())
    with RawClient(server) as raw:
        monkeypatch.setattr(SocketIo, "send_now", send_now)
        for number, count in ((LONG, 60), (SHORT, 10)):
            raw.fetch(number, FetchRequest(GEOMETRY_ID, keys(count, number), 0, 1, 60.0))
        order, ends = [], 0
        for head in raw.heads():
            ends += head.kind is Kind.END
            if head.kind is Kind.DATA:
                order.append(head.request)
            if ends == 2:
                break
    assert order[:20] in ([SHORT, LONG] * 10, [LONG, SHORT] * 10)
    assert order.count(LONG) == 60
    assert order.count(SHORT) == 10


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_short_fetch_beside_a_bulky_one_on_a_slow_link_waits_for_few_pieces(
    serve: Callable[..., Server], layers: int
) -> None:
    piece = 1 << 18
    server = serve(Blocks(size=piece))
    with RawClient(server, receive_bytes=1 << 16) as raw:
        raw.fetch(LONG, FetchRequest(GEOMETRY_ID, keys(60, "long"), 0, layers, 60.0))
        asked, before, end = False, 0, None
        for head in raw.heads(pause_s=0.002, step=1 << 16):
            if head.request == LONG and head.kind is Kind.END:
                break
            if asked and head.request == LONG:
                before += 1
            if head.request == LONG and not asked and head.block >= 20:
                asked = True
                raw.fetch(SHORT, FetchRequest(GEOMETRY_ID, keys(1, "short"), 0, 1, 60.0))
            if head.request == SHORT and head.kind is Kind.END:
                end = End(head.layer)
                break
    assert end is End.OK
    # What the kernel has of the long one, a piece on its way, and some while this one is made.
    assert before <= (1 << 20) // piece + 8
