"""Those who have not said who they are keep nobody out, and are told off in few words."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dualpath_sglang.transport import strangers as strangers_module
from dualpath_sglang.transport.base import End, PeerLostError, RefusedError
from dualpath_sglang.transport.client import Connection
from dualpath_sglang.transport.handshake import VERSION, FullError
from dualpath_sglang.transport.server import Server
from dualpath_sglang.transport.strangers import Refusals, Strangers
from tests.transport.peers import (
    SECRET,
    SOON_S,
    Blocks,
    keys,
    place_for,
    request_of,
    run,
    wait_until,
)
from tests.transport.raw import RawClient, RawPeer

NODES = 4


class Crowd:
    """Connections that say nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = contextlib.ExitStack()

    def come(self, count: int = 1, source: str = "127.0.0.1") -> list[socket.socket]:
        return [self._open.enter_context(self._one(source)) for _ in range(count)]

    def _one(self, source: str) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), SOON_S, (source, 0))
        sock.settimeout(SOON_S)
        return sock

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


@pytest.fixture
def crowded(serve: Callable[..., Server]) -> Iterator[tuple[Server, Crowd]]:
    """A server with few places, and a crowd before it."""
    server = serve(
        Blocks(), most_connections=NODES, most_strangers=6, most_strangers_of_one=4, secret=SECRET
    )
    with Crowd(server.port) as crowd:
        yield server, crowd


def stands(sock: socket.socket) -> bool:
    """Whether the other end has not ended it, as far as one can see."""
    sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        return sock.recv(1) != b""
    return True


def test_silent_strangers_keep_no_node_out(
    crowded: tuple[Server, Crowd], connect: Callable[..., Connection]
) -> None:
    server, crowd = crowded
    first = connect(server, secret=SECRET)
    crowd.come(40)
    nodes = [first, *(connect(server, secret=SECRET) for _ in range(NODES - 1))]
    crowd.come(40, "127.0.0.2")
    wait_until(lambda: server.counts["pushed_out"] >= 70)
    for connection in nodes:
        assert run(connection, place_for(request_of(keys(3)))).ends == [End.OK]


def test_the_oldest_stranger_goes_first(crowded: tuple[Server, Crowd]) -> None:
    _, crowd = crowded
    oldest, second, *_ = [
        *crowd.come(4),
        *crowd.come(2, "127.0.0.2"),
        *crowd.come(1, "127.0.0.3"),
    ]
    assert oldest.recv(1) == b""
    assert stands(second)


def test_many_of_one_address_push_out_none_of_another(crowded: tuple[Server, Crowd]) -> None:
    server, crowd = crowded
    (lonely,) = crowd.come()
    crowd.come(30, "127.0.0.2")
    wait_until(lambda: server.counts["pushed_out"] == 26)
    assert stands(lonely)


def test_a_stranger_is_given_up_after_a_short_while(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.server._HANDSHAKE_S", 0.3)
    server = serve(Blocks())
    with Crowd(server.port) as crowd:
        (silent,) = crowd.come()
        assert silent.recv(1) == b""
        wait_until(lambda: not server._clients())


@pytest.mark.slow
def test_a_thousand_strangers_make_few_threads(
    crowded: tuple[Server, Crowd], connect: Callable[..., Connection]
) -> None:
    server, crowd = crowded
    before, most = threading.active_count(), 0
    for _ in range(20):
        for sock in crowd.come(50):
            sock.close()
        most = max(most, threading.active_count() - before)
    assert most <= NODES + 2 * 6
    assert run(connect(server, secret=SECRET), place_for(request_of(keys(3)))).ends == [End.OK]


def test_more_nodes_than_there_are_places_for_are_told_so(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    server = serve(Blocks(), most_connections=1)
    one = connect(server)
    with pytest.raises(PeerLostError, match="as many connections") as told:
        connect(server)
    assert isinstance(told.value, FullError)
    wait_until(lambda: server.counts["full"] == 1)
    one.close()
    wait_until(lambda: not server._clients())
    connect(server)


def test_one_pushed_out_while_it_proves_itself_is_not_let_in(serve: Callable[..., Server]) -> None:
    server = serve(Blocks(), most_strangers=1)
    with Crowd(server.port) as crowd:
        (slow,) = crowd.come()
        wait_until(server._clients)
        crowd.come()
        assert slow.recv(1) == b""
    assert server.counts["connections"] == 0


# -- what is said -----------------------------------------------------------------------------


def test_wrong_secrets_are_counted_and_logged_once_an_address_and_minute(
    serve: Callable[..., Server],
    connect: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(strangers_module, "time", Clock(lambda: now))
    server = serve(Blocks(), secret=SECRET)

    def refused() -> int:
        before = server.counts["wrong_secret"]
        for _ in range(4):
            with pytest.raises(RefusedError):
                connect(server, secret=b"another")
        wait_until(lambda: server.counts["wrong_secret"] == before + 4)
        return len([r for r in caplog.records if "127.0.0.1 is refused" in r.message])

    assert refused() == 1
    now += 59.0
    assert refused() == 1
    now += 2.0
    assert refused() == 2
    assert server.counts["connections"] == 0


class Clock:
    def __init__(self, now: Callable[[], float]) -> None:
        self.monotonic = now


def test_each_address_is_named_once_and_few_are_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals(logging.getLogger("test"), most=10)
    for address in [*range(30), *range(30)]:
        refusals.warn(str(address), "of the test")
    assert len(caplog.records) == 10
    assert len(refusals._last) == 10


def test_another_version_is_refused_with_both_versions(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    both = rf"version 77 .* version {VERSION}"
    with RawPeer(version=77) as peer, pytest.raises(RefusedError, match=both):
        peer.connected()
    server = serve(Blocks())
    with RawClient(server, version=77) as raw:
        assert raw.is_closed()
    wait_until(lambda: server.counts["other_version"] == 1)
    assert any(
        "version 77" in r.message and f"version {VERSION}" in r.message for r in caplog.records
    )


# -- places at the door -----------------------------------------------------------------------


def test_who_has_left_the_door_is_not_pushed_out() -> None:
    door: Strangers[int] = Strangers(2, 2)
    assert door.enter(1, "a") is None
    assert door.leave(1)
    assert not door.leave(1)
    assert door.enter(2, "a") is None
    assert door.enter(3, "b") is None
    assert door.enter(4, "c") == 2
    assert not door.leave(2)
    assert door.leave(3)
    assert door.leave(4)


def test_strangers_come_and_go_from_many_threads() -> None:
    door: Strangers[tuple[int, int]] = Strangers(8, 3)
    gone: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []

    def come_and_go(name: int) -> None:
        for i in range(300):
            if (out := door.enter((name, i), str(name % 4))) is not None:
                gone.append(out)
            time.sleep(0)
            if door.leave((name, i)):
                left.append((name, i))

    threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(gone + left) == [(n, i) for n in range(12) for i in range(300)]
    assert not door._here
    assert not door._of
