"""Reaching a peer ends by its deadline, the look-up of its name included."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualpath_sglang.transport.base import End, PeerLostError
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.server import Server
from tests.transport.peers import SOON_S, Blocks, ends, keys, place_for, request_of, run

Row = tuple[Any, ...]


def row(port: int, host: str = "127.0.0.1") -> Row:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], list[Row]]]]:
    """What names stand for; numbers stand for themselves."""
    known: dict[str, Callable[[], list[Row]]] = {}
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *args: Any, flags: int = 0, **more: Any) -> Any:
        if host in known and not flags & socket.AI_NUMERICHOST:
            return known[host]()
        return real(host, port, *args, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield known


def reach(host: str, port: int, timeout_s: float) -> Connection:
    return Connection(PeerAddress(host, port), time.monotonic() + timeout_s)


def test_a_look_up_that_hangs_ends_by_the_deadline(
    names: dict[str, Callable[[], list[Row]]],
) -> None:
    go = threading.Event()
    names["slow.test"] = lambda: [row(9)][: go.wait(60.0)]
    errors: list[Exception] = []

    def try_it() -> None:
        try:
            reach("slow.test", 9, 0.3)
        except PeerLostError as error:
            errors.append(error)

    try:
        assert ends(try_it)
        assert "looked up in time" in str(errors[0])
    finally:
        go.set()


def test_a_name_leads_to_the_first_address_that_answers(
    serve: Callable[..., Server], names: dict[str, Callable[[], list[Row]]]
) -> None:
    port = serve(Blocks()).port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    names["two.test"] = lambda: [row(closed), row(port)]
    connection = reach("two.test", port, SOON_S)
    assert run(connection, place_for(request_of(keys(2)))).ends == [End.OK]
    connection.close()


def test_an_address_that_says_nothing_leaves_time_for_the_others(
    serve: Callable[..., Server], names: dict[str, Callable[[], list[Row]]]
) -> None:
    port = serve(Blocks()).port
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        where = silent.getsockname()
        for _ in range(3):  # its queue is full now: what more comes is not answered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(where)
        names["two.test"] = lambda: [row(where[1]), row(port)]
        connection = reach("two.test", port, 3.0)
        assert run(connection, place_for(request_of(keys(2)))).ends == [End.OK]
        connection.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_names_and_numbers_are_reached(serve: Callable[..., Server], host: str) -> None:
    connection = reach(host, serve(Blocks()).port, SOON_S)
    assert connection.lost is None
    connection.close()


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("no such name", 9),
        ("name.invalid", 9),
        ("x" * 300, 9),
        ("a..b", 9),
        ("nul\0", 9),
        ("127.0.0.1", 0),
        ("127.0.0.1", 70000),
        ("127.0.0.1", -1),
    ],
)
def test_what_is_no_address_is_said_so(host: str, port: int) -> None:
    with pytest.raises(PeerLostError, match="cannot be reached"):
        reach(host, port, SOON_S)


def test_a_name_for_nothing_is_said_so(names: dict[str, Callable[[], list[Row]]]) -> None:
    names["empty.test"] = list
    with pytest.raises(PeerLostError, match="no address"):
        reach("empty.test", 9, SOON_S)
