"""Layer Blocks over real sockets: right, in order, given up in time, and only to who may."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    PeerLostError,
    RefusedError,
    Span,
    StridedDestination,
)
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.server import Server
from tests.support.certificates import authority, certificate
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYER_BYTES,
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
from tests.transport.raw import RawClient, RawPeer


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize(("first", "end"), [(0, LAYERS), (2, 4), (LAYERS - 1, LAYERS)])
def test_every_layer_block_comes_in_order(
    serve: Callable[..., Server],
    connect: Callable[..., Connection],
    by_layer: bool,
    first: int,
    end: int,
) -> None:
    connection = connect(serve(Blocks()))
    fetched = run(connection, place_for(request_of(keys(11), first, end), by_layer=by_layer))
    assert fetched.ends == [End.OK]
    assert set(fetched.got) == {(layer, i) for layer in range(first, end) for i in range(11)}
    assert not fetched.wrong()
    assert fetched.layers == sorted(fetched.layers)
    assert fetched.load == connection.load == Load(12345, 678)


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("layers", [2, 3, LAYERS])
def test_a_piece_may_hold_several_layers(
    serve: Callable[..., Server], connect: Callable[..., Connection], layers: int, by_layer: bool
) -> None:
    connection = connect(serve(Blocks(layers=layers)))
    fetched = run(connection, place_for(request_of(keys(9), 1), by_layer=by_layer))
    assert fetched.ends == [End.OK]
    assert set(fetched.got) == {(layer, i) for layer in range(1, LAYERS) for i in range(9)}
    assert not fetched.wrong()


@dataclass(frozen=True)
class Choosy:
    """Memory for all pieces but those of one layer."""

    place: StridedDestination
    not_layer: int
    wait_s: float = 0.0

    @property
    def layer_bytes(self) -> int:
        return self.place.layer_bytes

    def check(self, request: FetchRequest) -> None:
        self.place.check(request)

    def views(self, span: Span, deadline: float) -> Sequence[memoryview] | None:
        if span.first_layer != self.not_layer:
            return self.place.views(span)
        time.sleep(min(self.wait_s, max(0.0, deadline - time.monotonic())))
        return None


def test_what_has_no_place_ends_its_fetch_and_no_other(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    connection = connect(serve(Blocks()))
    wanted = place_for(request_of(keys(6)))
    choosy = Choosy(wanted.destination, not_layer=2)
    fetch = connection.fetch(wanted.request, choosy, wanted)
    assert fetch.wait(SOON_S)
    assert wanted.ends == [End.CANCELLED]
    assert {layer for layer, _ in wanted.got} == {0, 1}
    assert not wanted.wrong()
    assert run(connection, place_for(request_of(keys(6)))).ends == [End.OK]


def test_a_place_that_does_not_come_ends_its_fetch_at_the_deadline(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    connection = connect(serve(Blocks()))
    wanted = place_for(request_of(keys(6), timeout_s=0.3))
    choosy = Choosy(wanted.destination, not_layer=1, wait_s=SOON_S)
    fetch = connection.fetch(wanted.request, choosy, wanted)
    assert fetch.wait(SOON_S)
    assert wanted.ends[0] in (End.TIMEOUT, End.CANCELLED)
    assert run(connection, place_for(request_of(keys(6)))).ends == [End.OK]


def test_the_check_sees_a_wrong_byte(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    """Control."""
    fetched = run(connect(serve(Blocks())), place_for(request_of(keys(3))))
    fetched.destination.memory[LAYER_BYTES] ^= 1
    assert fetched.wrong() == [(0, 1)]


def test_what_is_missing_is_said(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    names = keys(7)
    fetched = run(connect(serve(Blocks(absent=names[2:4]))), place_for(request_of(names)))
    assert fetched.ends == [End.OK]
    assert fetched.lacking == {2, 3}
    assert {i for _, i in fetched.got} == {0, 1, 4, 5, 6}
    assert not fetched.wrong()


@pytest.mark.parametrize("end", [End.UNKNOWN, End.BUSY, End.FAILED, End.TIMEOUT])
def test_a_refusal_comes_as_it_was_meant(
    serve: Callable[..., Server], connect: Callable[..., Connection], end: End
) -> None:
    source = Blocks()
    source.refuse = end
    connection = connect(serve(source))
    assert run(connection, place_for(request_of(keys(2)))).ends == [end]
    source.refuse = None
    assert run(connection, place_for(request_of(keys(2)))).ends == [End.OK]


def test_many_fetches_share_a_connection_and_a_short_one_is_not_kept_up(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    source = Blocks(hold=lambda layer, _: held(go) if layer == 1 else None)
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


def test_more_than_it_takes_on_is_busy(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    source = Blocks(hold=lambda *_: held(go))
    connection = connect(serve(source, most_fetches=3))
    all_of_them = [place_for(request_of(keys(2, n))) for n in range(5)]
    fetches = [connection.fetch(f.request, f.destination, f) for f in all_of_them]
    assert sum(fetch.wait(1.0) for fetch in fetches) >= 1
    go.set()
    assert all(fetch.wait(SOON_S) for fetch in fetches)
    assert {fetched.ends[0] for fetched in all_of_them} == {End.OK, End.BUSY}


def test_nothing_is_written_after_a_cancel(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    source = Blocks(hold=lambda *_: time.sleep(0.001))
    connection = connect(serve(source))
    for wait_s in (0.0, 0.003, 0.02, 0.05):
        fetched = place_for(request_of(keys(200, wait_s)))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        time.sleep(wait_s)
        connection.cancel(fetch)
        assert fetched.ends == [End.CANCELLED]
        before = bytes(fetched.destination.memory)
        landed = len(fetched.got)
        assert landed < 200 * LAYERS
        other = run(connection, place_for(request_of(keys(3, "other"))))
        assert other.ends == [End.OK]
        assert not other.wrong()
        assert bytes(fetched.destination.memory) == before
        assert len(fetched.got) == landed
        connection.cancel(fetch)
        assert fetched.ends == [End.CANCELLED]
    assert source.cancelled.wait(SOON_S)
    assert connection.lost is None


def test_a_cancel_does_not_wait_for_a_peer_that_stops_in_the_middle_of_a_piece(
    connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.fetches._GRACE_S", 0.1)
    with RawPeer() as peer:
        connection = peer.connected()
        fetched = place_for(request_of(keys(2)))
        fetch = connection.fetch(fetched.request, fetched.destination, fetched)
        peer.send_half_a_piece(fetch.number)
        time.sleep(0.2)
        began = time.monotonic()
        connection.cancel(fetch, End.TIMEOUT)
        assert time.monotonic() - began < 2.0
        assert fetched.ends == [End.TIMEOUT]
        assert not fetched.got
        with pytest.raises(PeerLostError):
            connection.fetch(fetched.request, fetched.destination, fetched)
        connection.close()


def test_a_peer_that_dies_ends_every_fetch(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    server = serve(Blocks(hold=lambda layer, _: held(go) if layer else None))
    connection = connect(server)
    several = [place_for(request_of(keys(5, n))) for n in range(3)]
    fetches = [connection.fetch(f.request, f.destination, f) for f in several]
    time.sleep(0.1)
    go.set()
    server.close()
    assert all(fetch.wait(SOON_S) for fetch in fetches)
    assert {end for fetched in several for end in fetched.ends} <= {End.LOST, End.OK}
    assert not any(fetched.wrong() for fetched in several)
    wait_until(lambda: connection.lost)
    with pytest.raises(PeerLostError):
        connection.fetch(several[0].request, several[0].destination, several[0])


def test_a_client_that_goes_away_ends_its_answers(serve: Callable[..., Server]) -> None:
    source = Blocks(hold=lambda *_: time.sleep(0.002))
    server = serve(source)
    connection = Connection(PeerAddress("127.0.0.1", server.port), time.monotonic() + SOON_S)
    fetched = place_for(request_of(keys(500)))
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    time.sleep(0.05)
    connection.close()
    assert fetch.wait(SOON_S)
    assert fetched.ends == [End.LOST]
    assert source.closed.wait(SOON_S)
    wait_until(lambda: not server._clients())


def test_a_client_that_does_not_read_is_given_up(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.socket_io._STALL_S", 0.3)
    source = Blocks(size=1 << 20)
    server = serve(source)
    with RawClient(server) as raw:
        raw.fetch(1, FetchRequest(GEOMETRY_ID, keys(64), 0, LAYERS, 0.5))
        assert source.closed.wait(SOON_S)
    assert server.counts["ok"] == 0


def test_draining_lets_what_is_under_way_end(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    go = threading.Event()
    source = Blocks(hold=lambda *_: held(go))
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


# -- who may ----------------------------------------------------------------------------------


def test_who_knows_the_secret_is_let_in(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    server = serve(Blocks(), secret=SECRET)
    assert run(connect(server, secret=SECRET), place_for(request_of(keys(3)))).ends == [End.OK]
    assert server.counts["refused"] == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "sentence"),
    [
        (SECRET, b"another", "does not accept the secret"),
        (SECRET, b"", "wants a secret"),
        (b"", SECRET, "the peer has none"),
    ],
)
def test_others_are_refused_with_a_sentence_logged_once_and_counted(
    serve: Callable[..., Server],
    connect: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
    theirs: bytes,
    ours: bytes,
    sentence: str,
) -> None:
    server = serve(Blocks(), secret=theirs)
    for _ in range(5):
        with pytest.raises(RefusedError, match=sentence):
            connect(server, secret=ours)
    wait_until(lambda: server.counts["refused"] == 5)
    assert server.counts["connections"] == 0
    assert len([r for r in caplog.records if "is refused" in r.message]) == 1
    assert SECRET.decode() not in caplog.text


def test_a_server_that_only_pretends_to_know_the_secret_is_found_out() -> None:
    with (
        RawPeer(proof=bytes(32), claims=True) as peer,
        pytest.raises(RefusedError, match="does not know"),
    ):
        peer.connected(secret=SECRET)


def test_another_version_is_refused_with_a_sentence(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawPeer(version=7) as peer, pytest.raises(RefusedError, match="version 7"):
        peer.connected()
    with RawClient(serve(Blocks()), version=7) as raw:
        assert raw.is_closed()


def test_over_tls(
    serve: Callable[..., Server], connect: Callable[..., Connection], tmp_path: Path
) -> None:
    ca = authority(tmp_path)
    cert, private = certificate(ca, "node", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    server = serve(Blocks(), secret=SECRET, tls=context)
    trusting = ssl.create_default_context(cafile=str(ca))
    connection = connect(server, secret=SECRET, tls=trusting)
    fetched = run(connection, place_for(request_of(keys(60))))
    assert fetched.ends == [End.OK]
    assert not fetched.wrong()
    stranger = ssl.create_default_context(cafile=str(authority(tmp_path, "other")))
    with pytest.raises(PeerLostError, match="TLS"):
        connect(server, secret=SECRET, tls=stranger)
    with pytest.raises(PeerLostError):
        connect(server, secret=SECRET)


def test_nobody_there_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLostError, match="cannot be reached"):
        Connection(PeerAddress("127.0.0.1", port), time.monotonic() + 1.0)


def test_one_who_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="in time"):
            Connection(PeerAddress("127.0.0.1", silent.getsockname()[1]), began + 0.3)
        assert time.monotonic() - began < 2.0


# -- destinations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        StridedDestination(memoryview(bytes(1 << 16)), 4096, 4096, 8192),
        StridedDestination(memoryview(bytearray(4 * 4096 - 1)), 4096, 4096, 8192),
        StridedDestination(memoryview(bytearray(1 << 16)), 4096, 4095, 8192),
        StridedDestination(memoryview(bytearray(1 << 16)), 4096, 4096, 4096),
        StridedDestination(memoryview(bytearray(1 << 16)), 4096, 4096, 8192, offset=-1),
        StridedDestination(memoryview(bytearray(1 << 16)), 4096, 0, 0),
        StridedDestination(memoryview(bytearray(1 << 16)).cast("H"), 4096, 4096, 8192),
    ],
)
def test_a_destination_that_does_not_hold_it_is_refused(
    serve: Callable[..., Server], connect: Callable[..., Connection], place: StridedDestination
) -> None:
    connection = connect(serve(Blocks()))
    request = request_of(keys(2), 0, 2)
    with pytest.raises(ValueError, match=r"destination|overlap"):
        connection.fetch(request, place, Fetched(request, place))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"geometry_id": b"short"}, "16 bytes"),
        ({"keys": [b"short"]}, "16 bytes"),
        ({"keys": []}, "blocks"),
        ({"first_layer": 3, "end_layer": 3}, "layers"),
        ({"end_layer": 496}, "layers"),
        ({"timeout_s": 0.0}, "deadline"),
    ],
)
def test_a_request_that_makes_no_sense_cannot_be_made(
    changes: dict[str, Any], sentence: str
) -> None:
    right: dict[str, Any] = {
        "geometry_id": GEOMETRY_ID,
        "keys": keys(2),
        "first_layer": 0,
        "end_layer": 2,
        "timeout_s": 1.0,
    }
    FetchRequest(**right)
    with pytest.raises(ValueError, match=sentence):
        FetchRequest(**{**right, **changes})
