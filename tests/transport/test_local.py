"""Readers on the agent's machine: right, given up in time, never hurt by an agent that is not."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_sglang.transport import local_frames as frames
from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    PeerLostError,
    RefusedError,
    Span,
    StridedDestination,
)
from dualpath_sglang.transport.local_client import LocalConnection, copy_runs
from dualpath_sglang.transport.local_frames import Kind
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.verify import bad_layer_blocks
from tests.transport.peers import (
    LAYER_BYTES,
    LAYERS,
    Blocks,
    Fetched,
    keys,
    place_for,
    request_of,
)
from tests.transport.shared import RawAgent, SharedBlocks

SOON_S = 20.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., LocalServer]]:
    with contextlib.ExitStack() as stack:

        def make(source: SharedBlocks, **options: Any) -> LocalServer:
            server = LocalServer(source, tmp_path / "agent.sock", **options)
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture
def connect() -> Iterator[Callable[..., LocalConnection]]:
    with contextlib.ExitStack() as stack:

        def make(server: LocalServer) -> LocalConnection:
            connection = LocalConnection(server.path, time.monotonic() + SOON_S)
            stack.callback(connection.close)
            return connection

        yield make


def run(connection: LocalConnection, fetched: Fetched) -> Fetched:
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    assert fetch.wait(SOON_S)
    return fetched


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- what comes -------------------------------------------------------------------------------


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_every_layer_block_comes_in_order(
    serve: Callable[..., LocalServer],
    connect: Callable[..., LocalConnection],
    by_layer: bool,
    layers: int,
) -> None:
    source = SharedBlocks(layers=layers, run=20)
    connection = connect(serve(source))
    fetched = run(connection, place_for(request_of(keys(11), 1), by_layer=by_layer))
    assert fetched.ends == [End.OK]
    assert set(fetched.got) == {(layer, i) for layer in range(1, LAYERS) for i in range(11)}
    assert not fetched.wrong(), "though the memory is used again as soon as it was taken"
    assert fetched.layers == sorted(fetched.layers)
    assert fetched.load == connection.load == Load(12345, 678)
    wait_until(lambda: source.reused == -(-(LAYERS - 1) // layers) * 11)


def test_what_is_missing_is_said(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    names = keys(7)
    fetched = run(connect(serve(SharedBlocks(absent=names[2:4]))), place_for(request_of(names)))
    assert fetched.ends == [End.OK]
    assert fetched.lacking == {2, 3}
    assert {i for _, i in fetched.got} == {0, 1, 4, 5, 6}
    assert not fetched.wrong()


@pytest.mark.parametrize("end", [End.UNKNOWN, End.BUSY, End.FAILED, End.TIMEOUT])
def test_a_refusal_comes_as_it_was_meant(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection], end: End
) -> None:
    source = SharedBlocks()
    source.refuse = end
    connection = connect(serve(source))
    assert run(connection, place_for(request_of(keys(2)))).ends == [end]
    source.refuse = None
    assert run(connection, place_for(request_of(keys(2)))).ends == [End.OK]


def test_a_request_comes_whole(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    source = SharedBlocks()
    connection = connect(serve(source))
    for cached_only in (False, True):
        request = FetchRequest(b"g" * 16, keys(3), 1, 3, 7.25, cached_only)
        run(connection, place_for(request))
        assert source.requests[-1] == request


def test_many_fetches_share_a_connection_and_a_short_one_is_not_kept_up(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    go = threading.Event()
    source = SharedBlocks(hold=lambda layer, _: go.wait(SOON_S) if layer == 1 else None)
    connection = connect(serve(source))
    long = [place_for(request_of(keys(40, n))) for n in range(8)]
    fetches = [connection.fetch(f.request, f.destination, f) for f in long]
    short = run(connection, place_for(request_of(keys(3, "short"), 0, 1)))
    assert short.ends == [End.OK]
    assert not any(fetched.ends for fetched in long)
    go.set()
    assert all(fetch.wait(SOON_S) for fetch in fetches)
    for fetched in [short, *long]:
        assert fetched.ends == [End.OK]
        assert not fetched.wrong()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 6), st.lists(st.integers(0, 240), max_size=8))
def test_runs_are_copied_into_views_of_any_size(size: int, count: int, cuts: list[int]) -> None:
    rng = random.Random(size)
    memory = memoryview(rng.randbytes(1000))
    offsets = [rng.randrange(1000 - size) for _ in range(count)]
    want = b"".join(memory[at : at + size] for at in offsets)
    ends = sorted({0, len(want), *(cut for cut in cuts if cut < len(want))})
    got = memoryview(bytearray(len(want)))
    views = [got[a:b] for a, b in itertools.pairwise(ends)]
    copy_runs(memory, offsets, size, views)
    assert got == want
    with pytest.raises(ValueError, match="another place"):
        copy_runs(memory, offsets, size, [*views, memoryview(bytearray(1))])


@dataclass(frozen=True)
class Slow:
    """Memory that is waited for."""

    place: StridedDestination
    go: threading.Event

    @property
    def layer_bytes(self) -> int:
        return self.place.layer_bytes

    def check(self, request: FetchRequest) -> None:
        self.place.check(request)

    def views(self, span: Span, deadline: float) -> Sequence[memoryview] | None:
        left_s = max(0.0, deadline - time.monotonic())
        return self.place.views(span) if self.go.wait(left_s) else None


def test_memory_is_not_used_again_before_it_was_taken(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    source = SharedBlocks(reuse_after=3)
    connection = connect(serve(source))
    wanted, go = place_for(request_of(keys(8))), threading.Event()
    fetch = connection.fetch(wanted.request, Slow(wanted.destination, go), wanted)
    time.sleep(0.3)
    assert source.reused == 0
    go.set()
    assert fetch.wait(SOON_S)
    assert wanted.ends == [End.OK]
    assert not wanted.wrong()
    assert source.reused > 0


def test_a_reader_that_takes_nothing_holds_memory_no_longer_than_its_fetch(
    serve: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.local_server._TAKEN_S", 0.1)
    source = SharedBlocks(reuse_after=3)
    server = serve(source)
    with raw_reader(server) as sock:
        sock.sendall(
            frames.frame(Kind.FETCH, 1, frames.fetch_body(request_of(keys(8), timeout_s=0.3)))
        )
        assert source.closed.wait(SOON_S)
        wait_until(lambda: source.reused == 3)
        assert server.counts["timeout"] == 1 or wait_until(lambda: server.counts["timeout"]) is None


def test_what_has_no_place_ends_its_fetch_and_no_other(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    connection = connect(serve(SharedBlocks()))
    wanted = place_for(request_of(keys(6), timeout_s=0.3))
    fetch = connection.fetch(wanted.request, Slow(wanted.destination, threading.Event()), wanted)
    assert fetch.wait(SOON_S)
    assert wanted.ends[0] in (End.CANCELLED, End.TIMEOUT)
    assert not wanted.got
    assert run(connection, place_for(request_of(keys(6)))).ends == [End.OK]


# -- the end of things ------------------------------------------------------------------------


def test_nothing_is_written_after_a_cancel(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    source = SharedBlocks(hold=lambda *_: time.sleep(0.001))
    connection = connect(serve(source))
    for wait_s in (0.0, 0.003, 0.02, 0.05):
        fetched = place_for(request_of(keys(200, wait_s)))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        time.sleep(wait_s)
        connection.cancel(fetch)
        assert fetched.ends == [End.CANCELLED]
        before = bytes(fetched.destination.memory)
        assert len(fetched.got) < 200 * LAYERS
        other = run(connection, place_for(request_of(keys(3, "other"))))
        assert other.ends == [End.OK]
        assert not other.wrong()
        assert bytes(fetched.destination.memory) == before
        connection.cancel(fetch)
        assert fetched.ends == [End.CANCELLED]
    assert source.cancelled.wait(SOON_S)
    assert connection.lost is None


def test_a_fetch_ends_at_its_deadline_and_no_other(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    go = threading.Event()
    connection = connect(serve(SharedBlocks(hold=lambda *_: go.wait(SOON_S))))
    late, patient = place_for(request_of(keys(4), timeout_s=0.3)), place_for(request_of(keys(4)))
    fetches = [connection.fetch(f.request, f.destination, f) for f in (late, patient)]
    assert fetches[0].wait(SOON_S)
    assert late.ends == [End.TIMEOUT]
    go.set()
    assert fetches[1].wait(SOON_S)
    assert patient.ends == [End.OK]
    assert not patient.wrong()


def test_draining_lets_what_is_under_way_end(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    go = threading.Event()
    source = SharedBlocks(hold=lambda *_: go.wait(SOON_S))
    server = serve(source)
    connection = connect(server)
    first = place_for(request_of(keys(3)))
    fetch = connection.fetch(first.request, first.destination, first)
    wait_until(lambda: source.requests)
    assert not server.drain(0.1)
    assert run(connection, place_for(request_of(keys(3)))).ends == [End.BUSY]
    go.set()
    assert server.drain(SOON_S)
    assert fetch.wait(SOON_S)
    assert first.ends == [End.OK]


def test_a_server_that_closes_ends_every_fetch_and_takes_its_socket_with_it(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection]
) -> None:
    go = threading.Event()
    source = SharedBlocks(hold=lambda layer, _: go.wait(SOON_S) if layer else None)
    server = serve(source)
    connection = connect(server)
    fetched = place_for(request_of(keys(5)))
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    wait_until(lambda: fetched.got)
    threading.Timer(0.1, go.set).start()
    server.close()
    assert fetch.wait(SOON_S)
    assert fetched.ends in ([End.LOST], [End.OK])
    assert not fetched.wrong()
    assert not server.path.exists()
    wait_until(lambda: connection.lost)
    with pytest.raises(PeerLostError):
        connection.fetch(fetched.request, fetched.destination, fetched)


AGENT = """
import sys, time
from pathlib import Path
from dualpath_sglang.transport.local_server import LocalServer
from tests.transport.shared import SharedBlocks
LocalServer(SharedBlocks(hold=lambda *_: time.sleep(0.002)), Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_stopped_does_not_take_its_readers_with_it(
    tmp_path: Path, how: signal.Signals
) -> None:
    path = tmp_path / "agent.sock"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(path)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            connection = LocalConnection(path, time.monotonic() + SOON_S)
            fetched = place_for(request_of(keys(400), timeout_s=2.0))
            fetch = connection.fetch(fetched.request, fetched.destination, fetched)
            wait_until(lambda: len(fetched.got) > 20)
            process.send_signal(how)
            assert fetch.wait(SOON_S)
            assert fetched.ends == [End.LOST if how is signal.SIGKILL else End.TIMEOUT]
            assert not fetched.wrong()
            assert len(connection._memory) == 8 << 20
            assert sum(connection._memory[::4096]) >= 0, "its memory can still be read, all of it"
            connection.close()
        finally:
            process.kill()
    if how is signal.SIGKILL:
        LocalServer(SharedBlocks(), path).close()


# -- who may, and what is not believed ----------------------------------------------------------


def test_only_its_owner_may_connect(
    serve: Callable[..., LocalServer],
    connect: Callable[..., LocalConnection],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = serve(SharedBlocks())
    assert server.path.stat().st_mode & 0o777 == 0o600
    connect(server)
    with monkeypatch.context() as patch:
        patch.setattr("dualpath_sglang.transport.local_server.peer_uid", lambda _: 12345)
        with pytest.raises(PeerLostError):
            connect(server)
    wait_until(lambda: server.counts["refused"] == 1 and "12345" in caplog.text)
    monkeypatch.setattr("dualpath_sglang.transport.local_client.peer_uid", lambda _: 12345)
    with pytest.raises(RefusedError, match="another user"):
        connect(server)


def test_one_agent_listens_at_a_place(serve: Callable[..., LocalServer], tmp_path: Path) -> None:
    server = serve(SharedBlocks())
    with pytest.raises(OSError, match="in use"):
        LocalServer(SharedBlocks(), server.path)
    assert server.path.exists()
    with pytest.raises(ValueError, match="at most"):
        LocalServer(SharedBlocks(), tmp_path / ("x" * 120))


def test_a_source_without_a_file_is_refused(tmp_path: Path) -> None:
    source = SharedBlocks()
    source.memory.close()
    with pytest.raises(ValueError, match="the network"):
        LocalServer(source, tmp_path / "agent.sock")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [({"seals": False}, "taken away"), ({"says": 2 << 20}, "smaller than it says")],
)
def test_memory_that_could_be_taken_away_is_not_mapped(
    tmp_path: Path, how: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path, **how), pytest.raises(RefusedError, match=sentence):
        LocalConnection(path, time.monotonic() + SOON_S)


def test_only_a_file_in_memory_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path) as agent:
        agent.fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
        os.ftruncate(agent.fd, 1 << 20)
        with pytest.raises(RefusedError, match="taken away"):
            LocalConnection(path, time.monotonic() + SOON_S)


@pytest.mark.parametrize(
    ("hello", "error", "sentence"),
    [
        (frames.HELLO.pack(b"DPLOCAL", 9, 1 << 20), RefusedError, "version 9"),
        (b"\0" * frames.HELLO.size, PeerLostError, "something else"),
        (b"", PeerLostError, "closed|as it must|timed out"),
    ],
)
def test_another_agent_is_refused_with_a_sentence(
    tmp_path: Path, hello: bytes, error: type[Exception], sentence: str
) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path) as agent:
        agent.hello = hello or b"D"
        with pytest.raises(error, match=sentence):
            LocalConnection(path, time.monotonic() + (SOON_S if hello else 0.5))


def test_an_agent_that_does_not_share_its_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path) as agent:
        agent.fd = None
        with pytest.raises(RefusedError, match="does not share"):
            LocalConnection(path, time.monotonic() + SOON_S)


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="cannot be reached"):
        LocalConnection(tmp_path / "nobody", time.monotonic() + 1.0)


def data_frame(number: int, span: Span, offsets: Sequence[int], sums: int | None = None) -> bytes:
    count = span.layer_blocks if sums is None else sums
    body = struct.pack("=IIII", span.first_layer, span.end_layer, span.first, span.count)
    body += struct.pack(f"={len(offsets)}Q", *offsets) + bytes(8 * count)
    return frames.frame(Kind.DATA, number, body)


@pytest.mark.parametrize(
    "sent",
    [
        lambda n: data_frame(n, Span(0, 1, 0, 1), [(1 << 20) - LAYER_BYTES + 1]),
        lambda n: data_frame(n, Span(0, 1, 0, 1), [(1 << 64) - 1]),
        lambda n: data_frame(n, Span(0, 1, 0, 2), [0]),
        lambda n: data_frame(n, Span(0, 1, 0, 1), [0], sums=0),
        lambda n: data_frame(n, Span(1, 2, 0, 1), [0]),
        lambda n: data_frame(n, Span(0, LAYERS + 1, 0, 1), [0]),
        lambda n: data_frame(n, Span(0, 1, 2, 3), [0, 0, 0]),
        lambda n: data_frame(n, Span(3, 3, 0, 1), [0]),
        lambda n: data_frame(n, Span(0, 1, 0, 1), [0]) * 2,
        lambda n: data_frame(n + 1, Span(0, 1, 0, 1), [0]),
        lambda n: frames.frame(Kind.DATA, n),
        lambda n: frames.frame(Kind.MISSING, n, b"\xff" * 4),
        lambda n: frames.frame(Kind.MISSING, n, b"\0" * 3),
        lambda n: frames.frame(Kind.END, n, struct.pack("=IQQ", 6, 0, 0)),
        lambda n: frames.frame(Kind.END, n, b"\0"),
        lambda n: frames.frame(Kind.FETCH, n),
        lambda n: frames.HEAD.pack(Kind.DATA, n, 1 << 31),
        lambda n: frames.HEAD.pack(99, n, 0),
        lambda n: b"",
    ],
)
def test_what_makes_no_sense_ends_the_connection_and_nothing_else(
    tmp_path: Path, sent: Callable[[int], bytes]
) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path) as agent:
        connection = LocalConnection(path, time.monotonic() + SOON_S)
        fetched = place_for(request_of(keys(4)), guard=4096)
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        assert agent.ready.wait(SOON_S)
        agent.sock.sendall(sent(fetch.number))
        if not sent(fetch.number):
            agent.sock.shutdown(socket.SHUT_RDWR)
        assert fetch.wait(SOON_S)
        assert fetched.ends == [End.LOST]
        memory = fetched.destination.memory
        assert not any(memory[:4096]) and not any(memory[-4096:])
        wait_until(lambda: connection.lost)
        connection.close()


def test_an_end_that_comes_too_early_is_no_good_end(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with RawAgent(path) as agent:
        connection = LocalConnection(path, time.monotonic() + SOON_S)
        fetched = place_for(request_of(keys(4)))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        assert agent.ready.wait(SOON_S)
        agent.sock.sendall(frames.frame(Kind.END, fetch.number, frames.end_body(End.OK, Load())))
        assert fetch.wait(SOON_S)
        assert fetched.ends == [End.FAILED]
        connection.close()


def test_bytes_that_change_while_they_are_copied_do_not_pass(
    serve: Callable[..., LocalServer],
    connect: Callable[..., LocalConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that does not keep its promise: the reader's own check says so."""
    source = SharedBlocks()
    connection = connect(serve(source))
    wanted = place_for(request_of(keys(5)))
    wrong: list[int] = []
    landed = wanted.landed

    def check(span: Span, checksums: Sequence[int]) -> None:
        views = wanted.destination.views(span)
        wrong.extend(bad_layer_blocks(views, LAYER_BYTES, checksums))
        landed(span, checksums)

    monkeypatch.setattr(wanted, "landed", check)
    assert run(connection, wanted).ends == [End.OK]
    assert not wrong
    wanted.ends.clear()

    class Hasty(Slow):
        def views(self, span: Span, deadline: float) -> Sequence[memoryview] | None:
            source.memory.bytes[:] = b"\x11" * len(source.memory.bytes)
            return super().views(span, deadline)

    go = threading.Event()
    go.set()
    fetch = connection.fetch(wanted.request, Hasty(wanted.destination, go), wanted)
    assert fetch.wait(SOON_S)
    assert wrong


# -- the server against readers that are not ----------------------------------------------------


@contextlib.contextmanager
def raw_reader(server: LocalServer) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SOON_S)
        sock.connect(str(server.path))
        _, fds, _, _ = socket.recv_fds(sock, frames.HELLO.size, 1)
        for fd in fds:
            os.close(fd)
        yield sock


@pytest.mark.parametrize(
    "sent",
    [
        frames.frame(Kind.FETCH, 1, b"short"),
        frames.frame(Kind.FETCH, 1, bytes(64)),
        frames.frame(Kind.DATA, 1),
        frames.frame(Kind.END, 1),
        frames.HEAD.pack(Kind.FETCH, 1, 1 << 30),
        b"\xff" * 64,
    ],
)
def test_a_reader_that_makes_no_sense_is_sent_away_and_others_are_served(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection], sent: bytes
) -> None:
    server = serve(SharedBlocks())
    with raw_reader(server) as sock:
        sock.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert run(connect(server), place_for(request_of(keys(3)))).ends == [End.OK]
    wait_until(lambda: len(server._readers()) == 1)


def test_random_bytes_hurt_nobody(
    serve: Callable[..., LocalServer], connect: Callable[..., LocalConnection], tmp_path: Path
) -> None:
    server = serve(SharedBlocks())
    rng = random.Random(3)
    whole = frames.frame(Kind.FETCH, 1, frames.fetch_body(request_of(keys(3))))
    for _ in range(300):
        with raw_reader(server) as sock, contextlib.suppress(OSError):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(min(len(data), rng.choice([12, 60, 200])))] = rng.randrange(256)
            sock.sendall(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data)
    fetched = run(connect(server), place_for(request_of(keys(3))))
    assert fetched.ends == [End.OK]
    assert not fetched.wrong()


def test_one_that_asks_without_end_is_told_busy(serve: Callable[..., LocalServer]) -> None:
    go = threading.Event()
    source = SharedBlocks(hold=lambda *_: go.wait(SOON_S))
    server = serve(source, most_fetches=4)
    with raw_reader(server) as sock:
        for number in range(100):
            body = frames.fetch_body(request_of(keys(2)))
            sock.sendall(frames.frame(Kind.FETCH, number, body))
            sock.recv(1 << 16) if number > 8 else None
        wait_until(lambda: server.counts["busy"] >= 80)
        assert len(source.requests) <= 20
    go.set()
    wait_until(lambda: not server._readers())


def test_a_source_that_says_no_places_serves_nobody(
    serve: Callable[..., LocalServer],
    connect: Callable[..., LocalConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SharedBlocks()
    monkeypatch.setattr(source, "serve", Blocks().serve)
    assert run(connect(serve(source)), place_for(request_of(keys(2)))).ends == [End.FAILED]


def test_closing_does_not_wait_for_a_source_that_never_ends(
    serve: Callable[..., LocalServer],
    connect: Callable[..., LocalConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.local_server._CLOSE_S", 0.3)
    go, begun = threading.Event(), threading.Event()

    def hold(*_: int) -> None:
        begun.set()
        go.wait(SOON_S)

    server = serve(SharedBlocks(hold=hold))
    fetched = place_for(request_of(keys(2)))
    fetch = connect(server).fetch(fetched.request, fetched.destination, fetched)
    assert begun.wait(SOON_S)
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(SOON_S / 2)
    ended = not closing.is_alive()
    go.set()
    assert ended
    assert fetch.wait(SOON_S)
    assert fetched.ends == [End.LOST]
