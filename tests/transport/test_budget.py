"""What all connections of a server ask for at a time is bounded, and never leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest
from dualpath_sglang.transport.budget import Budget
from dualpath_sglang.transport.client import Connection, Fetch
from dualpath_sglang.transport.frames import Kind
from dualpath_sglang.transport.server import Server
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYERS,
    SECRET,
    SOON_S,
    Blocks,
    Fetched,
    held,
    keys,
    place_for,
    request_of,
    run,
    wait_until,
)
from tests.transport.raw import RawClient, frame


def begin(connection: Connection, fetched: Fetched) -> Fetch:
    return connection.fetch(fetched.request, fetched.destination, fetched)


def free(server: Server) -> bool:
    """Whether nothing counts any more."""
    return (server._budget._count, server._budget._bytes) == (0, 0)


def test_more_answers_than_the_server_gives_at_a_time_are_busy_at_once(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    server = serve(Blocks(hold=lambda *_: held(go)), most_answers=3)
    several = [connect(server) for _ in range(4)]
    first = [place_for(request_of(keys(2, n))) for n in range(3)]
    fetches = [begin(c, f) for c, f in zip(several, first, strict=False)]
    wait_until(lambda: server._budget._count == 3)
    more = [run(connection, place_for(request_of(keys(2)))) for connection in several]
    assert [fetched.ends for fetched in more] == [[End.BUSY]] * 4
    assert not any(fetched.ends for fetched in first), "while the others are under way"
    go.set()
    assert all(fetch.wait(SOON_S) for fetch in fetches)
    assert [fetched.ends for fetched in first] == [[End.OK]] * 3
    wait_until(lambda: free(server))
    assert run(several[3], place_for(request_of(keys(2)))).ends == [End.OK]
    assert server.counts["busy"] == 4


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["crc", "mac"])
def test_requests_that_take_too_much_memory_are_busy_and_the_connection_goes_on(
    serve: Callable[..., Server], connect: Callable[..., Connection], secret: bytes
) -> None:
    go = threading.Event()
    server = serve(
        Blocks(hold=lambda *_: held(go)), most_request_bytes=60 * 32, most_answers=9, secret=secret
    )
    one, other = connect(server, secret=secret), connect(server, secret=secret)
    first = place_for(request_of(keys(40)))
    fetch = begin(one, first)
    wait_until(lambda: server._budget._bytes)
    for connection in (one, other):
        assert run(connection, place_for(request_of(keys(40)))).ends == [End.BUSY]
    small = place_for(request_of(keys(5)))
    small_fetch = begin(other, small)
    go.set()
    assert fetch.wait(SOON_S)
    assert small_fetch.wait(SOON_S)
    assert first.ends == small.ends == [End.OK]
    assert run(other, place_for(request_of(keys(40)))).ends == [End.OK]
    wait_until(lambda: free(server))


def test_a_request_is_paid_for_before_it_has_come(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    server = serve(Blocks(), most_request_bytes=60 * 32)
    connection = connect(server)
    with RawClient(server) as raw:
        content = frames.fetch_body(FetchRequest(GEOMETRY_ID, keys(40), 0, LAYERS, 5.0))
        raw.sock.sendall(frame(raw.seals.sent, Kind.FETCH, 1, content)[:-1])
        wait_until(lambda: server._budget._bytes)
        assert run(connection, place_for(request_of(keys(40)))).ends == [End.BUSY]
    wait_until(lambda: free(server))
    assert run(connection, place_for(request_of(keys(40)))).ends == [End.OK]


def test_what_ends_badly_is_given_back_too(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    source = Blocks(hold=lambda *_: None)
    server = serve(source)
    with RawClient(server) as raw:  # no request
        raw.sock.sendall(frame(raw.seals.sent, Kind.FETCH, 1, b"no request"))
        assert raw.is_closed()
    with RawClient(server) as raw:  # a number twice
        content = frames.fetch_body(FetchRequest(GEOMETRY_ID, keys(400), 0, LAYERS, 5.0))
        raw.sock.sendall(frame(raw.seals.sent, Kind.FETCH, 1, content) * 2)
    connection = connect(server)
    cancelled = place_for(request_of(keys(400)))
    connection.cancel(begin(connection, cancelled))
    source.refuse = End.UNKNOWN
    assert run(connection, place_for(request_of(keys(2)))).ends == [End.UNKNOWN]
    wait_until(lambda: free(server))


def test_a_budget_counts_both() -> None:
    budget = Budget(2, 100)
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.take(40)
    assert not budget.take(0)
    budget.give(60)
    assert budget.take(60)
