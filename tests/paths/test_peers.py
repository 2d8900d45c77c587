"""Other nodes, as they are reported, connected to, blamed and chosen."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from dualpath_sglang.index import Report
from dualpath_sglang.paths.peer import Peer
from dualpath_sglang.paths.peers import Nearby, PathOptions, Peers
from dualpath_sglang.scheduling.paths import Share, Side
from dualpath_sglang.streaming.other_paths import LOCAL, Blame
from dualpath_sglang.transport.base import End, Load, PeerLostError, Span, StridedDestination
from dualpath_sglang.transport.client import Connection
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.server import Server, ServerOptions
from dualpath_storage import Geometry
from tests.paths.cluster import Wire, stop_after
from tests.streaming.bed import eventually, geometry
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYER_BYTES,
    LAYERS,
    SECRET,
    Blocks,
    Fetched,
    keys,
    place_for,
    request_of,
)

OF = geometry()


@dataclass
class Fleet:
    """Servers, and what is reported of them."""

    reports: dict[str, Report] | None = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    secret: bytes = SECRET
    own: Nearby | None = None
    asked: list[bool] = field(default_factory=list)

    def add(self, name: str, source: Blocks | None = None, **changes: Any) -> Server:
        server = Server(source or Blocks(), ServerOptions(secret=SECRET))
        self.servers.append(server)
        assert self.reports is not None
        self.reports[name] = {
            "role": "node",
            "node_id": name,
            "address": f"127.0.0.1:{server.port}",
            "protocol": VERSION,
            "read_queue_bytes": 0,
            "up_s": 1.0,
            **changes,
        }
        return server

    def told(self, name: str, **changes: Any) -> None:
        """A node reports anew."""
        assert self.reports is not None
        up_s = self.reports[name]["up_s"]
        assert isinstance(up_s, float)
        self.reports[name] = {**self.reports[name], "up_s": up_s + 1.0, **changes}

    def password(self, refused: bool) -> bytes:
        self.asked.append(refused)
        return self.secret

    def peers(self, **how: Any) -> Peers:
        options = PathOptions(secret=self.password, own=lambda: self.own, **how)
        return Peers(lambda: self.reports, options)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    for server in made.servers:
        server.close()


@pytest.fixture
def start(fleet: Fleet) -> Iterator[Callable[..., Peers]]:
    started: list[Peers] = []

    def make(**how: Any) -> Peers:
        started.append(fleet.peers(**how))
        return started[-1]

    yield make
    for peers in started:
        peers.close()


def usable(peers: Peers) -> set[str]:
    return {peer.name for peer in peers._usable(None)}


def sides(
    peers: Peers, blocks: int = 100, own: Side | None = None, of: Geometry = OF
) -> dict[str, int]:
    """Blocks by side."""
    shares = peers.shares(of, blocks, own or Side(LOCAL, 0, None))
    assert sum(share.count for share in shares) == blocks
    return {share.side: share.count for share in shares}


def fetch(peers: Peers, name: str, count: int = 3, **how: Any) -> Fetched:
    fetched = place_for(request_of(keys(count), **how))
    fetched.fetch = peers.begin(name, fetched.request, fetched.destination, fetched)
    assert fetched.fetch is not None
    return fetched


def ended(fetched: Fetched) -> End:
    eventually(lambda: fetched.ends, "the fetch ends")
    return fetched.ends[0]


def test_nodes_that_are_reported_are_used(fleet: Fleet, start: Callable[..., Peers]) -> None:
    fleet.add("a")
    fleet.add("b")
    peers = start(policy="split", floor_bytes=0)
    eventually(lambda: usable(peers) == {"a", "b"}, "both are connected")
    assert peers.ready
    assert set(sides(peers)) == {LOCAL, "a", "b"}


def test_only_agents_of_other_machines_that_speak_alike_are_used(
    fleet: Fleet, start: Callable[..., Peers], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("right")
    fleet.add("a server", role="streaming")
    fleet.add("own")
    fleet.own = Nearby("own")
    fleet.add("old", protocol=VERSION - 1)
    fleet.add("nowhere", address="")
    fleet.add("nonsense", address="host:port")
    peers = start()
    eventually(lambda: usable(peers) == {"right"}, "the right one is connected")
    time.sleep(0.8)  # several looks
    assert usable(peers) == {"right"}
    about_old = [r.getMessage() for r in caplog.records if "old" in r.getMessage()]
    assert len(about_old) == 1
    assert str(VERSION) in about_old[0]


def test_a_node_that_is_not_reported_any_more_is_let_go_of(
    fleet: Fleet, start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.paths.peers._FORGET_S", 0.3)
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fleet.reports = {}
    eventually(lambda: not usable(peers), "it is forgotten")
    assert sides(peers) == {LOCAL: 100}


def test_while_nobody_can_say_who_there_is_those_that_are_known_are_used(
    fleet: Fleet, start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath_sglang.paths.peers._FORGET_S", 0.3)
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fleet.reports = None
    time.sleep(1.0)
    assert usable(peers) == {"a"}


def test_a_wrong_secret_is_refused_said_once_and_asked_for_anew(
    fleet: Fleet, start: Callable[..., Peers], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("a")
    fleet.secret = b"another one of the test"
    peers = start()
    eventually(lambda: peers.counts["refused"] >= 3, "it is refused again and again")
    assert not peers.ready
    said = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert len(said) == 1
    assert "secret" in said[0]
    assert fleet.asked[:2] == [False, True]
    fleet.secret = SECRET
    eventually(lambda: usable(peers) == {"a"}, "it is let in")


def test_a_node_that_went_away_and_came_back_is_used_again(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    server = fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    server.close()
    eventually(lambda: not usable(peers), "it is noticed")
    again = Server(Blocks(), ServerOptions(port=server.port, secret=SECRET))
    fleet.servers.append(again)
    eventually(lambda: usable(peers) == {"a"}, "it is connected again")


def test_a_node_of_which_nobody_tells_is_asked_how_it_is(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    """As while Redis is away."""
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fleet.reports = None
    (peer,) = peers._usable(None)
    eventually(lambda: peer.side().queue_bytes == 12345, "it says what its source does")
    assert usable(peers) == {"a"}


def test_a_node_that_hangs_is_found_out_before_anything_is_asked_of_it(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    server = fleet.add("a")
    wire = Wire(server.port)
    fleet.told("a", address=f"127.0.0.1:{wire.port}")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    go_on = threading.Event()
    wire.hook = stop_after(0, go_on)
    eventually(lambda: not usable(peers), "it is given up")
    assert peers.counts["ok"] == peers.counts["late"] == 0
    go_on.set()
    eventually(lambda: usable(peers) == {"a"}, "it is reached anew")
    wire.close()


def test_a_fetch_brings_blocks_and_what_the_node_says_of_its_queue(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fetched = fetch(peers, "a", 5)
    assert ended(fetched) is End.OK
    assert not fetched.wrong()
    assert len(fetched.got) == 5 * LAYERS
    assert peers.counts["ok"] == 1
    (peer,) = peers._usable(None)
    assert 0 <= peer.side().queue_bytes <= 12345  # what the source of the test says


def test_what_is_under_way_counts_as_the_nodes_queue(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    go = threading.Event()
    fleet.add("a", Blocks(hold=lambda *_: go.wait(20.0) and None))
    peers = start(policy="shorter_queue")
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fetched = fetch(peers, "a", 7)
    size = 7 * LAYERS * LAYER_BYTES
    assert peers._usable(None)[0].side().queue_bytes == size
    assert sides(peers, own=Side(LOCAL, size - 1, None)) == {LOCAL: 100}
    assert sides(peers, own=Side(LOCAL, size + 1, None)) == {"a": 100}
    go.set()
    assert ended(fetched) is End.OK


def test_the_last_word_about_a_queue_counts(fleet: Fleet, start: Callable[..., Peers]) -> None:
    fleet.add("a", read_queue_bytes=5000)
    peers = start(policy="shorter_queue")
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    (peer,) = peers._usable(None)
    fleet.told("a", read_queue_bytes=777)
    eventually(lambda: peer.side().queue_bytes == 777, "the report is heeded")
    peer.said(Load(42, 1))
    time.sleep(0.6)  # the same report is read again
    assert peer.side().queue_bytes == 42
    fleet.told("a", read_queue_bytes=999)
    eventually(lambda: peer.side().queue_bytes == 999, "a newer report is heeded")


@pytest.mark.parametrize(
    ("refusal", "other"), [(End.BUSY, True), (End.UNKNOWN, False)], ids=["busy", "unknown"]
)
def test_a_node_that_cannot_is_not_asked_for_a_while(
    fleet: Fleet, start: Callable[..., Peers], refusal: End, other: bool
) -> None:
    source = Blocks()
    source.refuse = refusal
    fleet.add("a", source)
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    assert ended(fetch(peers, "a")) is refusal
    (peer,) = list(peers._peers.values())
    assert not peer.usable(GEOMETRY_ID)
    assert peer.usable(b"another geometry") is not other
    eventually(lambda: peer.usable(GEOMETRY_ID), "it is asked again")


def test_who_sends_what_is_damaged_is_let_go_of_for_a_while(
    fleet: Fleet, start: Callable[..., Peers], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    peers.blame("a", Blame.BAD)
    eventually(lambda: not usable(peers), "it is let go of")
    assert peers.counts["bad"] == 1
    assert any("damaged" in r.getMessage() for r in caplog.records)
    eventually(lambda: usable(peers) == {"a"}, "it is tried again")


def test_a_late_node_that_is_heard_of_keeps_its_connection(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    (peer,) = peers._usable(None)
    connection = peer._connection
    assert ended(fetch(peers, "a")) is End.OK
    peers.blame("a", Blame.LATE)
    assert not usable(peers)
    eventually(lambda: usable(peers) == {"a"}, "it is asked again")
    assert peer._connection is connection


def test_a_cancelled_fetch_ends_and_counts_no_more(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    go = threading.Event()
    fleet.add("a", Blocks(hold=lambda layer, _: layer > 1 and go.wait(20.0) and None))
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fetched = fetch(peers, "a")
    eventually(lambda: fetched.got, "something came")
    fetched.fetch.cancel()
    assert fetched.ends == [End.CANCELLED]
    (peer,) = peers._usable(None)
    go.set()
    assert peer.side().queue_bytes <= 3 * LAYERS * LAYER_BYTES
    eventually(lambda: peer._outstanding == 0, "nothing is outstanding")


# -- who reads what ---------------------------------------------------------------------------


def stub(name: str, queue: int = 0, rate: float | None = None) -> Any:
    class Stub:
        def __init__(self) -> None:
            self.name = name
            self.rate = rate

        def usable(self, geometry_id: bytes) -> bool:
            return True

        def side(self) -> Side:
            return Side(name, queue, rate)

        def reach(self) -> None:
            pass

        def leave(self) -> None:
            pass

        def close(self) -> None:
            pass

    return Stub()


def with_peers(policy: Any, *stubs: Any, floor_bytes: int = 0) -> Peers:
    peers = Peers(lambda: None, PathOptions(policy, floor_bytes))
    peers._peers = {peer.name: peer for peer in stubs}
    return peers


@pytest.mark.parametrize(
    ("policy", "mine", "expected"),
    [
        ("local", 10**9, {LOCAL: 100}),
        ("peer", 0, {"b": 100}),
        ("shorter_queue", 10, {LOCAL: 100}),
        ("shorter_queue", 500, {"b": 100}),
        ("shorter_queue", 300, {LOCAL: 100}),
    ],
)
def test_policies(policy: str, mine: int, expected: dict[str, int]) -> None:
    peers = with_peers(policy, stub("a", 400), stub("b", 300))
    assert sides(peers, own=Side(LOCAL, mine, None)) == expected
    peers.close()


def test_a_split_lets_all_finish_together() -> None:
    block = OF.block_bytes
    peers = with_peers("split", stub("a", 20 * block, 1e8), stub("b", 0, 2e8))
    dealt = sides(peers, 180, Side(LOCAL, 0, 1e8))
    assert dealt == {LOCAL: 50, "a": 30, "b": 100}
    peers.close()


def test_a_store_here_that_cannot_be_used_leaves_it_to_others() -> None:
    peers = with_peers("split", stub("a", 0, 1e8), stub("b", 0, 1e8))
    assert sides(peers, own=Side(LOCAL, 0, 0.0)) == {"a": 50, "b": 50}
    alone = with_peers("split")
    assert sides(alone, own=Side(LOCAL, 0, 0.0)) == {LOCAL: 100}
    for each in (peers, alone):
        each.close()


def test_what_others_bring_counts_only_when_hits_are_split() -> None:
    for policy, expected in (("split", 1e8), ("shorter_queue", 0.0)):
        peers = with_peers(policy, stub("a", 0, 1e8), stub("b", 0, None))
        assert peers.bytes_per_s == expected
        peers.close()


NONSENSE: dict[str, Any] = {
    "endless rate": {"read_rate": float("inf")},
    "no rate": {"read_rate": float("nan")},
    "huge rate": {"read_rate": 10**400},
    "rate below zero": {"read_rate": -1.0},
    "huge queue": {"read_queue_bytes": 10**400, "read_queue_tokens": 10**400},
    "queue below zero": {"read_queue_bytes": -(10**30)},
    "queue of text": {"read_queue_bytes": "x", "read_rate": "y"},
    "queue of truth": {"read_queue_bytes": True, "read_rate": True},
    "another time": {"up_s": float("nan")},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_about_a_node_does_no_harm(
    fleet: Fleet, start: Callable[..., Peers], changes: dict[str, Any]
) -> None:
    fleet.add("a", **changes)
    fleet.add("b")
    peers = start(policy="split")
    eventually(lambda: usable(peers) == {"a", "b"}, "both are connected")
    for own in (Side(LOCAL, 0, None), Side(LOCAL, 0, 1e9), Side(LOCAL, 0, 0.0)):
        assert sum(sides(peers, own=own).values()) == 100
    assert peers.substitute(OF) in ("a", "b")
    assert 0.0 <= peers.bytes_per_s < float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "127.0.0.1:²"},
        {"address": "127.0.0.1:" + "9" * 5000},
        {"address": "127.0.0.1:70000"},
        {"address": "a\nb:1"},
        {"address": "x" * 10_000 + ":1"},
        {"address": 7},
        {"node_id": "a\nWARNING something else"},
        {"node_id": "x" * 10_000},
        {"node_id": 7},
        {"protocol": "\n"},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_a_node_that_cannot_be_one_keeps_nobody_out(
    fleet: Fleet,
    start: Callable[..., Peers],
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
) -> None:
    fleet.add("a", **changes)
    fleet.add("b")
    peers = start()
    eventually(lambda: usable(peers) == {"b"}, "the right one is connected")
    time.sleep(0.6)  # more looks
    assert set(peers._peers) == {"b"}
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "failed" in text or "\n" in text or len(text) > 1000]


def test_what_is_no_report_keeps_nobody_out(fleet: Fleet, start: Callable[..., Peers]) -> None:
    fleet.add("b")
    nonsense: Any = {"x": [], "y": None, "z": "text"}
    fleet.reports = {**nonsense, **(fleet.reports or {})}
    peers = start()
    eventually(lambda: usable(peers) == {"b"}, "the right one is connected")


def test_a_node_of_another_version_counts_once(fleet: Fleet, start: Callable[..., Peers]) -> None:
    fleet.add("old", protocol=VERSION - 1)
    fleet.add("right")
    peers = start()
    eventually(lambda: usable(peers) == {"right"}, "the right one is connected")
    time.sleep(0.8)  # several looks
    assert peers.counts["version"] == 1


def test_a_thread_that_cannot_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def dial(refused: bool, deadline: float) -> Connection:
        tried.append(refused)
        raise PeerLostError("of the test")

    peer = Peer("a", "nowhere", dial, Counter())
    with monkeypatch.context() as patch:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        peer.reach()
    eventually(lambda: (peer.reach(), tried)[1], "it is tried again")


def test_one_that_fails_again_and_again_is_tried_less_and_less_often() -> None:
    clock = [100.0]
    peer = Peer("a", "nowhere", never, Counter(), clock=lambda: clock[0])
    pauses = []
    for _ in range(6):
        peer._ended(GEOMETRY_ID, End.OK, None, 0)  # though some of it goes well
        peer.blame(Blame.BAD)
        pauses.append(peer._try_at - clock[0])
        clock[0] = peer._try_at
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_fetch_that_could_not_begin_is_not_in_the_queue() -> None:
    peer = Peer("a", "nowhere", never, Counter())
    connection: Any = SimpleNamespace(lost=None, fetch=_lost)
    peer._connection = connection
    fetched = place_for(request_of(keys(2)))
    assert peer.begin(fetched.request, fetched.destination, fetched) is None
    assert peer.side().queue_bytes == 0


def _lost(*_: object) -> None:
    raise PeerLostError("of the test")


def never(refused: bool, deadline: float) -> Connection:
    raise AssertionError("nobody connects")


def test_a_queue_gets_shorter_with_time() -> None:
    clock = [0.0]
    peer = Peer("a", "nowhere", never, Counter(), clock=lambda: clock[0])
    peer.read_rate = 100.0
    peer.said(Load(1000, 0))
    clock[0] = 4.0
    assert peer.side() == Side("a", 600, 100.0, peer.side().delay_s)
    clock[0] = 40.0
    assert peer.side().queue_bytes == 0


def test_a_way_that_brings_far_less_than_the_node_reads_counts() -> None:
    clock = [0.0]
    peer = Peer("a", "nowhere", never, Counter(), clock=lambda: clock[0])
    assert peer.rate is None
    peer.read_rate = 100e6
    assert peer.rate == 100e6
    peer._outstanding = 1 << 30
    for _ in range(50):  # half of what it reads: others have the rest
        clock[0] += 0.02
        peer._came(1_000_000, 1_000_000, clock[0] - 0.02)
    assert peer.rate == 100e6
    for _ in range(300):  # the way has become slow
        clock[0] += 0.1
        peer._came(100_000, 100_000, clock[0] - 0.1)
    assert peer.rate is not None
    assert peer.rate < 5e6


def test_a_connection_that_breaks_counts_once_however_many_fetches_it_had(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    go = threading.Event()
    server = fleet.add("a", Blocks(hold=lambda *_: go.wait(20.0) and None))
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    (peer,) = peers._usable(None)
    fetches = [fetch(peers, "a") for _ in range(5)]
    for _ in range(3):
        peers.blame("a", Blame.BAD)
    assert [ended(each) for each in fetches] == [End.LOST] * 5
    assert peer._pause_s == 0.25
    go.set()
    eventually(lambda: usable(peers) == {"a"}, "it is reached anew")
    peers.blame("a", Blame.BAD)
    assert peer._pause_s == 0.5
    server.close()


class Still:
    """A connection on which nothing comes by itself."""

    lost = None

    def fetch(self, *_: object) -> Still:
        return self

    def cancel(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def peer_at(clock: list[float]) -> tuple[Peer, Callable[[int], Any]]:
    """One that is connected, and a call that begins a fetch of so many blocks."""
    still: Any = Still()
    peer = Peer("a", "nowhere", lambda *_: still, Counter(), clock=lambda: clock[0])
    peer.reach()
    eventually(lambda: peer.usable(b""), "it is connected")

    def begin(count: int) -> Any:
        fetched = place_for(request_of(keys(count)))
        return peer.begin(fetched.request, fetched.destination, fetched)

    return peer, begin


def brought(going: Any, count: int, clock: list[float], seconds: float) -> None:
    """One layer of so many blocks comes each time."""
    for layer in range(LAYERS):
        clock[0] += seconds
        going.landed(Span(layer, layer + 1, 0, count), [0] * count)


def test_the_time_in_which_a_node_was_away_does_not_make_it_slow() -> None:
    clock = [0.0]
    peer, begin = peer_at(clock)
    brought(begin(200), 100, clock, 0.1)
    rate = peer.rate
    assert rate == pytest.approx(100 * LAYER_BYTES / 0.1)
    peer._ended(GEOMETRY_ID, End.LOST, None, peer._outstanding)
    clock[0] += 8.0
    brought(begin(200), 100, clock, 0.1)
    assert peer.rate == pytest.approx(rate, rel=0.05)


def test_a_node_that_was_slow_gets_its_share_back_with_one_block() -> None:
    clock = [0.0]
    peer, begin = peer_at(clock)
    brought(begin(200), 100, clock, 0.1)
    brought(begin(200), 100, clock, 10.0)
    assert peer.side().rate == pytest.approx(100 * LAYER_BYTES / 10.0, rel=0.1)
    peer._outstanding = 0
    clock[0] += 3.0
    hoped = peer.side().rate
    assert hoped is not None
    assert hoped > 1000 * LAYER_BYTES / 10.0, "it is tried again"
    going = begin(1)
    clock[0] += 0.001
    going.landed(Span(0, LAYERS, 0, 1), [0] * LAYERS)
    assert peer.side().rate == pytest.approx(LAYERS * LAYER_BYTES / 0.001, rel=0.1)


def test_shares_cover_everything_in_order() -> None:
    peers = with_peers("split", stub("a", 0, 1e8))
    assert peers.shares(OF, 0, Side(LOCAL, 0, None)) == []
    shares = peers.shares(OF, 10, Side(LOCAL, 0, 1e8))
    assert shares == [Share(LOCAL, 0, 5), Share("a", 5, 5)]
    peers.close()


def test_a_destination_that_is_too_small_is_no_fetch(
    fleet: Fleet, start: Callable[..., Peers]
) -> None:
    fleet.add("a")
    peers = start()
    eventually(lambda: usable(peers) == {"a"}, "it is connected")
    fetched = place_for(request_of(keys(2)))
    small = replace(fetched.destination, memory=memoryview(bytearray(8)))
    assert isinstance(small, StridedDestination)
    assert peers.begin("a", fetched.request, small, fetched) is None
    assert peers.begin("nobody", fetched.request, fetched.destination, fetched) is None
    assert peers._usable(None)[0]._outstanding == 0
