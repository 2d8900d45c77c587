"""Peers that do what none should, and callers that make mistakes: nobody else pays for it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest, Load, PeerLostError, Span
from dualpath_sglang.transport.client import Connection, Fetch, PeerAddress
from dualpath_sglang.transport.frames import Kind
from dualpath_sglang.transport.server import Server, ServerOptions
from dualpath_sglang.transport.socket_io import SocketIo
from tests.support.certificates import authority, certificate
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYER_BYTES,
    LAYERS,
    SOON_S,
    Blocks,
    Fetched,
    held,
    keys,
    layer_block,
    place_for,
    request_of,
    wait_until,
)
from tests.transport.raw import RawClient, RawPeer, end, frame, piece


class Peer:
    """A peer that sends what the test says, and a fetch that waits for it."""

    def __init__(self, raw: RawPeer, timeout_s: float = 10.0, blocks: int = 3) -> None:
        self.raw = raw
        self.connection = raw.connected()
        self.fetched = place_for(request_of(keys(blocks), timeout_s=timeout_s))
        self.fetch = self.begin(self.fetched)

    def begin(self, fetched: Fetched) -> Fetch:
        return self.connection.fetch(fetched.request, fetched.destination, fetched)

    def data(self, layer: int, block: int, data: bytes | None = None) -> None:
        data = layer_block(self.fetched.request.keys[block], layer) if data is None else data
        checksum = xxhash.xxh3_64_intdigest(data)
        number = self.fetch.number
        self.raw.sock.sendall(piece(self.raw.seal, number, layer, block, data, checksum))

    def missing(self, *blocks: int) -> None:
        content = frames.missing_body(blocks)
        self.raw.sock.sendall(frame(self.raw.seal, Kind.MISSING, self.fetch.number, content))

    def end(self) -> None:
        self.raw.sock.sendall(end(self.raw.seal, self.fetch.number))


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    with RawPeer() as peer:
        yield peer


def test_what_has_landed_is_not_written_again(raw: RawPeer) -> None:
    peer = Peer(raw)
    peer.data(0, 1)
    wait_until(lambda: peer.fetched.got)
    peer.data(0, 1, bytes(LAYER_BYTES))
    assert peer.fetch.wait(SOON_S)
    assert peer.fetched.ends == [End.LOST]
    assert not peer.fetched.wrong()


@pytest.mark.parametrize("layers", [(1,), (0, 2), (0, 1, 0)])
def test_layers_out_of_order_end_the_connection(raw: RawPeer, layers: Sequence[int]) -> None:
    peer = Peer(raw)
    for layer in layers:
        peer.data(layer, 0)
    assert peer.fetch.wait(SOON_S)
    assert peer.fetched.ends == [End.LOST]
    assert len(peer.fetched.got) == len(layers) - 1


def test_what_is_missing_does_not_come(raw: RawPeer) -> None:
    peer = Peer(raw)
    peer.missing(1)
    peer.data(0, 1)
    assert peer.fetch.wait(SOON_S)
    assert peer.fetched.ends == [End.LOST]
    assert not peer.fetched.got


@pytest.mark.parametrize("sent", [0, 2])
def test_an_end_without_all_of_it_is_a_failure(raw: RawPeer, sent: int) -> None:
    peer = Peer(raw)
    for layer in range(sent):
        peer.data(layer, 0)
    peer.end()
    assert peer.fetch.wait(SOON_S)
    assert peer.fetched.ends == [End.FAILED]


def test_blocks_that_go_missing_on_the_way_complete_it(raw: RawPeer) -> None:
    peer = Peer(raw)
    peer.data(0, 0)
    peer.missing(0, 1)
    for layer in range(LAYERS):
        peer.data(layer, 2)
    peer.end()
    assert peer.fetch.wait(SOON_S)
    assert peer.fetched.ends == [End.OK]


def test_a_peer_that_hangs_ends_a_fetch_at_its_deadline_and_no_other(raw: RawPeer) -> None:
    peer = Peer(raw, timeout_s=60.0)
    time.sleep(0.3)  # the connection waits by now, for what has a minute
    other = place_for(request_of(keys(2, "other"), timeout_s=0.3))
    fetch = peer.begin(other)
    assert fetch.wait(SOON_S)
    assert other.ends == [End.TIMEOUT]
    assert not peer.fetched.ends
    assert peer.connection.lost is None
    peer.end()
    assert peer.fetch.wait(SOON_S)


def test_whoever_cancels_second_waits_too(raw: RawPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.fetches._GRACE_S", 2.0)
    peer = Peer(raw)
    data = layer_block(peer.fetched.request.keys[0], 0)
    whole = piece(raw.seal, peer.fetch.number, 0, 0, data, xxhash.xxh3_64_intdigest(data))
    raw.sock.sendall(whole[: 100 - LAYER_BYTES])
    wait_until(lambda: peer.connection._fetches._filling)
    first = threading.Thread(target=peer.connection.cancel, args=(peer.fetch,))
    first.start()
    wait_until(lambda: peer.fetch.number in peer.connection._fetches._gone)
    threading.Timer(0.3, raw.sock.sendall, (whole[100 - LAYER_BYTES :],)).start()
    peer.connection.cancel(peer.fetch)
    before = bytes(peer.fetched.destination.memory)
    first.join()
    time.sleep(0.1)
    assert bytes(peer.fetched.destination.memory) == before
    assert peer.fetched.ends == [End.CANCELLED]
    assert peer.connection.lost is None


def test_a_cancel_under_a_lock_that_the_callback_wants_ends(raw: RawPeer) -> None:
    peer = Peer(raw)
    lock = threading.Lock()
    entered = threading.Event()

    def landed(*_: object) -> None:
        entered.set()
        with lock:
            pass

    peer.fetched.on_landed = landed
    with lock:
        peer.data(0, 0)
        assert entered.wait(SOON_S)
        began = time.monotonic()
        peer.connection.cancel(peer.fetch)
        assert time.monotonic() - began < 5.0
    assert peer.connection.lost is None


class Raises(Fetched):
    """Cannot use what comes."""

    where = ""

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        super().landed(span, checksums)
        if self.where == "landed":
            raise RuntimeError("of the test")

    def missing(self, blocks: Sequence[int]) -> None:
        super().missing(blocks)
        if self.where == "missing":
            raise RuntimeError("of the test")

    def ended(self, end: End, load: Load | None) -> None:
        super().ended(end, load)
        if self.where == "ended":
            raise RuntimeError("of the test")


@pytest.mark.parametrize("where", ["landed", "missing", "ended"])
def test_a_caller_that_raises_ends_its_own_fetch_alone(where: str) -> None:
    go = threading.Event()
    names = keys(4)
    server = Server(Blocks(absent=names[:1], hold=lambda layer, _: held(go) if layer else None))
    try:
        address = PeerAddress("127.0.0.1", server.port)
        connection = Connection(address, time.monotonic() + SOON_S)
        good, bad = place_for(request_of(names)), place_for(request_of(names))
        raises = Raises(bad.request, bad.destination)
        raises.where = where
        fetches = [connection.fetch(f.request, f.destination, f) for f in (raises, good)]
        go.set()
        assert all(fetch.wait(SOON_S) for fetch in fetches)
        assert raises.ends == [End.OK if where == "ended" else End.FAILED]
        assert good.ends == [End.OK]
        assert not good.wrong()
        connection.close()
    finally:
        server.close()


def test_a_connection_that_ends_tells_all_though_one_of_them_raises(raw: RawPeer) -> None:
    peer = Peer(raw)
    bad = place_for(request_of(keys(2)))
    raises = Raises(bad.request, bad.destination)
    raises.where = "ended"
    peer.begin(raises)
    other = place_for(request_of(keys(2)))
    fetch = peer.begin(other)
    raw.sock.close()
    assert fetch.wait(SOON_S)
    assert peer.fetched.ends == raises.ends == other.ends == [End.LOST]


def test_one_fetchs_deadline_on_a_slow_link_ends_no_other() -> None:
    source = Blocks(size=1 << 18)
    server = Server(source)
    try:
        with RawClient(server, receive_bytes=1 << 16) as raw:
            raw.fetch(1, FetchRequest(GEOMETRY_ID, keys(40), 0, LAYERS, 60.0))
            raw.fetch(2, FetchRequest(GEOMETRY_ID, keys(400), 0, LAYERS, 0.3))
            raw.sock.settimeout(SOON_S)
            ends = {}
            for head in raw.heads(pause_s=0.002):
                if head.kind is Kind.END:
                    ends[head.request] = End(head.layer)
                if 1 in ends:
                    break
        assert ends == {2: End.TIMEOUT, 1: End.OK}
    finally:
        server.close()


def test_a_client_that_never_reads_makes_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dualpath_sglang.transport.peer._END_S", 0.5)
    server = Server(Blocks(size=1 << 20), ServerOptions(most_fetches=4))
    before = threading.active_count()
    try:
        with RawClient(server) as raw:
            raw.sock.settimeout(0.5)
            with pytest.raises(OSError, match=r".*"):
                for number in range(2000):
                    raw.fetch(number, FetchRequest(GEOMETRY_ID, keys(50), 0, LAYERS, 60.0))
                    assert threading.active_count() - before <= 10
                raise OSError("it took them all")
    finally:
        server.close()


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_closes_though_a_tls_handshake_is_under_way(tmp_path: Path, silent: bool) -> None:
    ca = authority(tmp_path)
    cert, private = certificate(ca, "node", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    server = Server(Blocks(), ServerOptions(tls=context))
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        if not silent:
            sock.sendall(b"\x16\x03\x01")  # the beginning of a hello
        wait_until(server._clients)
        time.sleep(0.1)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("server_side", [True, False])
def test_a_tls_handshake_that_trickles_ends_in_time(tmp_path: Path, server_side: bool) -> None:
    ca = authority(tmp_path)
    cert, private = certificate(ca, "node", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    if not server_side:
        context = ssl.create_default_context(cafile=str(ca))
    ours, theirs = socket.socketpair()
    wrapped = context.wrap_socket(
        ours,
        server_side=server_side,
        server_hostname=None if server_side else "127.0.0.1",
        do_handshake_on_connect=False,
    )
    io = SocketIo(wrapped)
    stop = threading.Event()

    def trickle() -> None:
        for byte in b"\x16\x03\x01\x02\x00" + bytes(512):
            if stop.wait(0.1):
                return
            theirs.sendall(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="in time"):
        io.agree_on_tls(began + 0.5)
    assert time.monotonic() - began < 3.0
    stop.set()
    thread.join()
    io.close()
    theirs.close()


def test_ending_a_tls_connection_does_not_first_end_its_encryption(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    cert, private = certificate(ca, "node", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    ours, theirs = socket.socketpair()
    wrapped: list[ssl.SSLSocket] = []
    thread = threading.Thread(
        target=lambda: wrapped.append(context.wrap_socket(theirs, server_side=True))
    )
    thread.start()
    trusting = ssl.create_default_context(cafile=str(ca))
    client = trusting.wrap_socket(ours, server_hostname="127.0.0.1")
    thread.join()
    io = SocketIo(client)
    io.shut()
    assert client.version() is not None, "it is still encrypted"
    io.close()
    wrapped[0].close()


def test_no_thread_to_be_had_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Blocks())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.settimeout(SOON_S)
                assert sock.recv(1) == b"", "sent away"
        connection = Connection(PeerAddress("127.0.0.1", server.port), time.monotonic() + SOON_S)
        fetched = place_for(request_of(keys(2)))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            assert connection.fetch(fetched.request, fetched.destination, fetched).wait(SOON_S)
        assert fetched.ends == [End.BUSY]
        connection.close()
    finally:
        server.close()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
