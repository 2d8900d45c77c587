"""A server ends when it is told to, whatever its connections do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest
from dualpath_sglang.transport.client import Connection
from dualpath_sglang.transport.frames import Kind
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.server import Server, ServerOptions
from tests.support.certificates import authority, certificate
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYERS,
    SECRET,
    SOON_S,
    Blocks,
    ends,
    held,
    keys,
    place_for,
    request_of,
    run,
    wait_until,
)
from tests.transport.raw import HELLO, RawClient, frame

Begin = Callable[[Server, contextlib.ExitStack], object]


def context(directory: Path) -> ssl.SSLContext:
    cert, private = certificate(authority(directory), "node", "127.0.0.1")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(cert, private)
    return made


def begun(data: bytes) -> Begin:
    """One that says this, and no more."""

    def begin(server: Server, stack: contextlib.ExitStack) -> None:
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SOON_S))
        sock.sendall(data)

    return begin


def unread(server: Server, stack: contextlib.ExitStack) -> None:
    """One that asks for much and reads nothing."""
    raw = stack.enter_context(RawClient(server, secret=SECRET, receive_bytes=1 << 14))
    for number in range(3):
        raw.fetch(number, FetchRequest(GEOMETRY_ID, keys(200, number), 0, LAYERS, 500.0))
    wait_until(lambda: server.counts["bytes"])


def half_a_frame(server: Server, stack: contextlib.ExitStack) -> None:
    raw = stack.enter_context(RawClient(server, secret=SECRET))
    raw.sock.sendall(b"DF\1\0")


def half_a_request(server: Server, stack: contextlib.ExitStack) -> None:
    raw = stack.enter_context(RawClient(server, secret=SECRET))
    content = frames.fetch_body(FetchRequest(GEOMETRY_ID, keys(50), 0, LAYERS, 500.0))
    raw.sock.sendall(frame(raw.seals.sent, Kind.FETCH, 1, content)[:100])


PLAIN: dict[str, Begin] = {
    "silent": begun(b""),
    "half a hello": begun(b"DUALPATH\0"),
    "no proof": begun(HELLO.pack(b"DUALPATH", VERSION, bytes(16))),
    "no node": begun(b"GET / HTTP/1.1\r\n\r\n"),
    "unread": unread,
    "half a frame": half_a_frame,
    "half a request": half_a_request,
}
TLS: dict[str, Begin] = {"silent": begun(b""), "half a hello": begun(b"\x16\x03\x01\x02\x00")}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.mark.parametrize("what", PLAIN)
def test_a_server_closes_beside_peers_that_do_nothing(
    stack: contextlib.ExitStack, what: str
) -> None:
    server = Server(Blocks(size=1 << 18), ServerOptions(secret=SECRET))
    for _ in range(5):
        PLAIN[what](server, stack)
    before = threading.active_count()
    assert ends(server.close)
    wait_until(lambda: threading.active_count() < before)
    assert not server._clients()


@pytest.mark.parametrize("what", TLS)
def test_a_server_with_tls_closes_beside_handshakes_that_hang(
    stack: contextlib.ExitStack, tmp_path: Path, what: str
) -> None:
    server = Server(Blocks(), ServerOptions(tls=context(tmp_path)))
    for _ in range(5):
        TLS[what](server, stack)
    wait_until(server._clients)
    assert ends(server.close)
    assert not server._clients()


def test_a_source_that_does_not_let_go_is_left_alone(
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.server._CLOSE_S", 0.3)
    go = threading.Event()
    server = Server(Blocks(hold=lambda *_: held(go)))
    connection = connect(server)
    fetched = place_for(request_of(keys(3)))
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    wait_until(lambda: server._clients()[0].busy)
    assert ends(server.close)
    assert fetch.wait(SOON_S)
    assert fetched.ends == [End.LOST]
    assert any("left alone" in r.message for r in caplog.records)
    go.set()
    wait_until(lambda: not server._clients())


def test_draining_does_not_wait_for_strangers_or_for_who_is_idle(
    stack: contextlib.ExitStack,
    serve: Callable[..., Server],
    connect: Callable[..., Connection],
) -> None:
    server = serve(Blocks(), secret=SECRET)
    for what in ("silent", "no proof", "half a frame", "half a request"):
        PLAIN[what](server, stack)
    connection = connect(server, secret=SECRET)
    assert run(connection, place_for(request_of(keys(3)))).ends == [End.OK]
    assert server.drain(SOON_S)
    assert run(connection, place_for(request_of(keys(3)))).ends == [End.BUSY]


def test_draining_beside_one_who_does_not_read_ends_in_time(
    stack: contextlib.ExitStack, serve: Callable[..., Server]
) -> None:
    server = serve(Blocks(size=1 << 18), secret=SECRET)
    unread(server, stack)
    done: list[bool] = []
    assert ends(lambda: done.append(server.drain(0.5)))
    assert done == [False]
