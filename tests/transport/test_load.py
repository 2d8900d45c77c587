"""Asking a peer for its load: cheap, in time, and it finds out who is dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe

import pytest
import xxhash

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, Load
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.frames import Kind
from dualpath_sglang.transport.server import Server, ServerOptions
from tests.transport.peers import (
    SECRET,
    SOON_S,
    Blocks,
    held,
    keys,
    layer_block,
    place_for,
    request_of,
    run,
    wait_until,
)
from tests.transport.raw import RawPeer, frame, piece


class Busy(Blocks):
    """Its load is what is said last."""

    now = Load(1, 2)

    def load(self) -> Load:
        return self.now


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is dead sooner."""
    monkeypatch.setattr("dualpath_sglang.transport.client._DEAD_S", 0.3)


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["crc", "mac"])
def test_the_load_is_what_it_is_now(
    serve: Callable[..., Server], connect: Callable[..., Connection], secret: bytes
) -> None:
    source = Busy()
    connection = connect(serve(source, secret=secret), secret=secret)
    assert connection.load is None
    for i in range(5):
        source.now = Load(i, 2 * i)
        assert connection.ask_load(SOON_S) == connection.load == Load(i, 2 * i)
    assert run(connection, place_for(request_of(keys(3)))).ends == [End.OK]


def test_many_ask_at_once_and_beside_fetches(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    server = serve(Blocks(size=1 << 12))
    connection = connect(server)
    answers: list[Load | None] = []
    fetched = place_for(request_of(keys(300)))
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)

    def ask() -> None:
        for _ in range(40):
            answers.append(connection.ask_load(SOON_S))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [Load(12345, 678)] * 240
    assert fetch.wait(SOON_S)
    assert fetched.ends == [End.OK]
    assert not fetched.wrong()
    assert server.counts["asked"] <= 240, "those who ask together share an answer"


def test_a_fetch_that_hangs_does_not_keep_the_load(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    connection = connect(serve(Blocks(hold=lambda *_: held(go))))
    fetched = place_for(request_of(keys(3)))
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    assert connection.ask_load(SOON_S) == Load(12345, 678)
    go.set()
    assert fetch.wait(SOON_S)


@pytest.mark.usefixtures("quick")
def test_a_peer_that_says_nothing_is_given_up_though_nobody_asks_again() -> None:
    with RawPeer() as peer:
        connection = peer.connected()
        fetched = place_for(request_of(keys(3), timeout_s=60.0))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        assert connection.ask_load(0.05) is None
        assert fetch.wait(SOON_S)
        assert fetched.ends == [End.LOST]
        assert "asked" in str(connection.lost)
        assert connection.ask_load(60.0) is None, "at once"
        connection.close()


@pytest.mark.usefixtures("quick")
def test_a_peer_that_is_only_slow_to_say_is_kept() -> None:
    with RawPeer() as peer:
        connection = peer.connected()
        fetched = place_for(request_of(keys(10), timeout_s=60.0))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        asked = threading.Event()

        def go_on() -> None:
            asked.wait(SOON_S)
            for i in range(10):
                data = layer_block(fetched.request.keys[i], 0)
                checksum = xxhash.xxh3_64_intdigest(data)
                peer.sock.sendall(piece(peer.seal, fetch.number, 0, i, data, checksum))
                time.sleep(0.1)

        thread = threading.Thread(target=go_on)
        thread.start()
        asked.set()
        assert connection.ask_load(0.6) is None
        thread.join()
        assert connection.lost is None, "something came"
        ask = connection._ask
        assert ask is not None
        content = frames.load_body(Load(7, 8))
        peer.sock.sendall(frame(peer.seal, Kind.LOAD, ask.number, content))
        wait_until(lambda: connection.load == Load(7, 8))
        assert connection.lost is None
        connection.close()


@pytest.mark.usefixtures("quick")
def test_a_peer_that_falls_silent_after_it_was_asked_is_given_up_as_well() -> None:
    with RawPeer() as peer:
        connection = peer.connected()
        fetched = place_for(request_of(keys(3), timeout_s=60.0))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        assert connection.ask_load(0.05) is None
        data = layer_block(fetched.request.keys[0], 0)
        checksum = xxhash.xxh3_64_intdigest(data)
        peer.sock.sendall(piece(peer.seal, fetch.number, 0, 0, data, checksum))
        wait_until(lambda: fetched.got)
        assert fetch.wait(SOON_S)
        assert fetched.ends == [End.LOST]
        connection.close()


def test_a_question_that_cannot_be_sent_for_now_hurts_nobody(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    connection = connect(serve(Blocks()))
    with connection._io.turn(0, time.monotonic() + SOON_S):
        assert connection.ask_load(0.1) is None
    assert connection.lost is None
    assert connection.ask_load(SOON_S) == Load(12345, 678)


@pytest.mark.usefixtures("quick")
def test_a_receiver_that_is_busy_itself_does_not_call_the_peer_dead(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    connection = connect(serve(Blocks()))
    go, entered = threading.Event(), threading.Event()
    fetched = place_for(request_of(keys(3)))

    def landed(*_: object) -> None:
        entered.set()
        go.wait(SOON_S)

    fetched.on_landed = landed
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    assert entered.wait(SOON_S)
    assert connection.ask_load(0.5) is None
    go.set()
    assert fetch.wait(SOON_S)
    assert fetched.ends == [End.OK]
    assert connection.ask_load(SOON_S) == Load(12345, 678)


def test_a_callback_that_asks_does_not_wait_for_itself(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    connection = connect(serve(Blocks()))
    answers: list[Load | None] = []
    fetched = place_for(request_of(keys(1)))
    fetched.on_landed = lambda *_: answers.append(connection.ask_load(60.0))
    assert run(connection, fetched).ends == [End.OK]
    assert set(answers) == {None}


def test_a_load_that_nobody_asked_for_ends_the_connection() -> None:
    with RawPeer() as peer:
        connection = peer.connected()
        peer.sock.sendall(frame(peer.seal, Kind.LOAD, 1, frames.load_body(Load(1, 1))))
        wait_until(lambda: connection.lost)
        assert "nobody asked" in str(connection.lost)
        connection.close()


# -- a process that stops ---------------------------------------------------------------------


def _serve(pipe: Pipe) -> None:
    server = Server(Blocks(size=1 << 16), ServerOptions(secret=SECRET))
    pipe.send(server.port)
    pipe.recv()


@pytest.fixture
def process() -> Iterator[tuple[int, int]]:
    """A server in another process: its process id and its port."""
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    other.start()
    try:
        assert ours.poll(60.0)
        assert other.pid is not None
        yield other.pid, ours.recv()
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_stops_in_the_middle_of_a_layer_is_found_out(
    process: tuple[int, int], how: signal.Signals
) -> None:
    pid, port = process
    connection = Connection(PeerAddress("127.0.0.1", port, SECRET), time.monotonic() + SOON_S)
    assert connection.ask_load(SOON_S) == Load(12345, 678)
    fetched = place_for(request_of(keys(500), timeout_s=60.0))
    memory = memoryview(bytearray(5 * 500 << 16))
    place = type(fetched.destination).of_layers(memory, 1 << 16, 500)
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if not stopped.is_set():
            os.kill(pid, how)
            stopped.set()

    fetched.destination, fetched.on_landed = place, stop
    fetch = connection.fetch(fetched.request, place, fetched)
    assert stopped.wait(SOON_S)
    try:
        assert connection.ask_load(0.1) is None or how is signal.SIGSTOP
        assert connection.ask_load(SOON_S) is None
        assert fetch.wait(SOON_S), "long before its deadline"
        assert fetched.ends == [End.LOST]
        assert not fetched.wrong()
    finally:
        os.kill(pid, signal.SIGCONT)
    connection.close()
