"""Whoever sits between two nodes that share a secret can end their connection, and no more.

Without a secret he can do what he likes: those are the controls, which show that the attacks work.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import xxhash

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest, Load, PeerLostError
from dualpath_sglang.transport.client import Connection
from dualpath_sglang.transport.frames import HEAD_BYTES, Head, Kind
from dualpath_sglang.transport.seal import CRC_BYTES, MAC_BYTES, Seal
from dualpath_sglang.transport.server import Server
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYER_BYTES,
    LAYERS,
    SECRET,
    SOON_S,
    Blocks,
    Fetched,
    key,
    keys,
    layer_block,
    place_for,
    request_of,
    run,
    wait_until,
)
from tests.transport.raw import frame
from tests.transport.relay import Relay, Tamper

NAMES = keys(6)
OTHERS = keys(6, "others")


def resealed(head: Head, content: bytes, payload: bytes = b"", seal: bytes = b"") -> bytes:
    """As somebody without the key does it: a crc32, or the seal that stood there."""
    front = replace(head, length=len(content) + len(seal or bytes(4)) + len(payload)).pack()
    front += content
    return front + (seal or Seal().over(front)) + payload


class Attack:
    """Changes one frame of a kind, the first of it.

    Args:
        change: what goes on instead, from its head and all the rest.
    """

    def __init__(self, kind: Kind, change: Callable[[Head, bytes], Sequence[bytes]]) -> None:
        self._kind = kind
        self._change = change
        self.done = False

    def __call__(self, number: int, head: Head, whole: bytes) -> Sequence[bytes]:
        if self.done or head.kind is not self._kind:
            return [whole]
        self.done = True
        return self._change(head, whole[HEAD_BYTES:])


class Swap:
    """Brings two pieces in the other order."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []

    def __call__(self, number: int, head: Head, whole: bytes) -> Sequence[bytes]:
        if head.kind is Kind.DATA and len(self._kept) < 2:
            self._kept.append(whole)
            return self._kept[::-1] if len(self._kept) == 2 else []
        return [whole]


def other_keys(head: Head, rest: bytes) -> Sequence[bytes]:
    seal = rest[-MAC_BYTES:] if len(rest) % 32 == (24 + MAC_BYTES) % 32 else b""
    content = rest[: len(rest) - len(seal or bytes(CRC_BYTES))]
    return [resealed(head, content[:24] + b"".join(OTHERS), seal=seal)]


def other_bytes(head: Head, rest: bytes) -> Sequence[bytes]:
    """Bytes of another block, and the checksum that goes with them."""
    front, payload = rest[:16], layer_block(OTHERS[0], 0)
    seal = rest[16:-LAYER_BYTES] if len(rest) == 16 + MAC_BYTES + LAYER_BYTES else b""
    front = front[:8] + struct.pack("!Q", xxhash.xxh3_64_intdigest(payload))
    return [resealed(head, front, payload, seal)]


def twice(head: Head, rest: bytes) -> Sequence[bytes]:
    return [head.pack() + rest] * 2


def not_at_all(head: Head, rest: bytes) -> Sequence[bytes]:
    return []


def another_end(head: Head, rest: bytes) -> Sequence[bytes]:
    seal = rest[16:] if len(rest) == 16 + MAC_BYTES else b""
    return [resealed(head, frames.load_body(Load(1 << 40, 1 << 30)), seal=seal)]


def add(kind: Kind, content: bytes, guess: bytes) -> Callable[[Head, bytes], Sequence[bytes]]:
    """One more frame before another one, sealed with a key that is guessed, or none."""

    def added(head: Head, rest: bytes) -> Sequence[bytes]:
        return [frame(Seal(guess), kind, head.request, content), head.pack() + rest]

    return added


def fetched_over(
    serve: Callable[..., Server],
    connect: Callable[..., Connection],
    secret: bytes,
    *,
    up: Tamper | None = None,
    down: Tamper | None = None,
    absent: Sequence[bytes] = (),
) -> tuple[Fetched, Blocks, Connection]:
    """A fetch, then a question for the load, through a relay."""
    source = Blocks(absent=absent)
    server = serve(source, secret=secret)
    how = {name: tamper for name, tamper in (("up", up), ("down", down)) if tamper is not None}
    with Relay(server.port, **how) as relay:
        connection = connect(relay.port, secret=secret)
        fetched = run(connection, place_for(request_of(NAMES, timeout_s=5.0)))
        connection.ask_load(5.0 if connection.lost is None else 0.0)
        return fetched, source, connection


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["without", "with"])
def test_who_only_passes_frames_on_is_not_noticed(
    serve: Callable[..., Server], connect: Callable[..., Connection], secret: bytes
) -> None:
    """Control."""
    fetched, _, connection = fetched_over(serve, connect, secret)
    assert fetched.ends == [End.OK]
    assert not fetched.wrong()
    assert connection.load == Load(12345, 678)


OTHER_FETCH = frames.fetch_body(FetchRequest(GEOMETRY_ID, OTHERS, 0, LAYERS, 5.0))
UPWARDS = [
    Attack(Kind.FETCH, other_keys),
    Attack(
        Kind.FETCH,
        add(Kind.FETCH, OTHER_FETCH, b"a guess"),
    ),
    Attack(Kind.FETCH, twice),
]


@pytest.mark.parametrize("which", range(len(UPWARDS)), ids=["changed", "added", "repeated"])
def test_nothing_can_be_asked_for_by_a_third(
    serve: Callable[..., Server], connect: Callable[..., Connection], which: int
) -> None:
    attack = UPWARDS[which]
    attack.done = False
    fetched, source, connection = fetched_over(serve, connect, SECRET, up=attack)
    assert attack.done
    assert len(source.requests) <= 1
    assert all(request.keys == NAMES for request in source.requests)
    # What was added after the real one is seen when it is read, perhaps after the answer.
    assert fetched.ends[0] in (End.LOST, End.OK)
    wait_until(lambda: connection.lost is not None)
    assert not fetched.wrong()


def test_without_a_secret_a_third_asks_for_what_he_likes(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    """Control."""
    attack = Attack(Kind.FETCH, other_keys)
    fetched, source, _ = fetched_over(serve, connect, b"", up=attack)
    assert source.requests[0].keys == OTHERS
    assert fetched.ends == [End.OK]
    assert fetched.wrong()


DOWNWARDS: dict[str, Callable[[], Tamper]] = {
    "changed": lambda: Attack(Kind.DATA, other_bytes),
    "repeated": lambda: Attack(Kind.DATA, twice),
    "left out": lambda: Attack(Kind.DATA, not_at_all),
    "swapped": Swap,
    "missing added": lambda: Attack(
        Kind.DATA, add(Kind.MISSING, frames.missing_body([5]), b"a guess")
    ),
    "missing added unsealed": lambda: Attack(
        Kind.DATA, add(Kind.MISSING, frames.missing_body([5]), b"")
    ),
    "missing left out": lambda: Attack(Kind.MISSING, not_at_all),
    "end changed": lambda: Attack(Kind.END, another_end),
    "end repeated": lambda: Attack(Kind.END, twice),
    "load changed": lambda: Attack(Kind.LOAD, another_end),
}


@pytest.mark.parametrize("what", DOWNWARDS)
def test_nothing_that_a_third_does_to_an_answer_is_taken(
    serve: Callable[..., Server], connect: Callable[..., Connection], what: str
) -> None:
    fetched, _, connection = fetched_over(
        serve, connect, SECRET, down=DOWNWARDS[what](), absent=NAMES[2:3]
    )
    assert not fetched.wrong()
    assert fetched.lacking <= {2}
    wait_until(lambda: connection.lost)
    assert re.search("damaged|too short|answers nothing", str(connection.lost))
    assert connection.load in (None, Load(12345, 678))
    complete = what in ("end repeated", "load changed")
    assert fetched.ends == [End.OK if complete else End.LOST]


@pytest.mark.parametrize("what", ["changed", "swapped", "end changed", "missing added unsealed"])
def test_without_a_secret_an_answer_is_what_a_third_says(
    serve: Callable[..., Server], connect: Callable[..., Connection], what: str
) -> None:
    """Control."""
    fetched, _, connection = fetched_over(serve, connect, b"", down=DOWNWARDS[what]())
    assert connection.lost is None or "damaged" not in connection.lost
    if what == "changed":
        assert fetched.wrong()
    elif what == "end changed":
        assert fetched.load == Load(1 << 40, 1 << 30)
    elif what == "missing added unsealed":
        assert 5 in fetched.lacking
    else:
        assert fetched.ends == [End.OK]


def test_a_frame_sent_back_to_its_sender_is_not_taken(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    """Each direction has a key of its own."""
    asked: list[bytes] = []

    def remember(number: int, head: Head, whole: bytes) -> Sequence[bytes]:
        asked.append(whole)
        return [whole]

    reflect = Attack(Kind.DATA, lambda head, rest: asked[:1])
    fetched, _, connection = fetched_over(serve, connect, SECRET, up=remember, down=reflect)
    assert reflect.done
    assert fetched.ends == [End.LOST]
    assert "damaged" in str(connection.lost), "before anybody looks at what it says"


def test_what_was_heard_of_another_connection_opens_none(
    serve: Callable[..., Server], connect: Callable[..., Connection]
) -> None:
    server = serve(Blocks(), secret=SECRET)
    with Relay(server.port) as relay:
        connect(relay.port, secret=SECRET).close()
        heard = bytes(relay.heard)
    with socket.create_connection(("127.0.0.1", server.port), SOON_S) as sock:
        sock.settimeout(SOON_S)
        sock.sendall(heard)
        said = b"".join(iter(lambda: sock.recv(1000), b""))
    assert said[-2:] == b"\0\2", "the secret is not known"
    assert server.counts["wrong_secret"] == 1


# -- seals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [b"", b"k" * 32], ids=["crc", "mac"])
def test_a_seal_is_of_its_frame(secret: bytes) -> None:
    sent, received = Seal(secret), Seal(secret)
    for content in (b"", b"a", b"b" * 1000):
        seal = sent.over(content[:1], content[1:])
        assert len(seal) == sent.size
        digest = received.begin()
        digest.update(content)
        received.check(digest, seal)
        sent.passed()
        for wrong in (content + b"x", b"y" + content):
            digest = received.begin()
            digest.update(wrong)
            with pytest.raises(PeerLostError):
                received.check(digest, seal)


def test_a_seal_is_of_its_key_and_its_place() -> None:
    first = Seal(key("one")).over(b"frame")
    assert Seal(key("two")).over(b"frame") != first
    later = Seal(key("one"))
    later.passed()
    assert later.over(b"frame") != first
