"""Frames that nobody should send, to both ends: no crash, no hang, no memory, no wrong byte.

``DUALPATH_TEST_SEED`` repeats a run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import xxhash

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest, Load, PeerLostError, Span
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.seal import Seal
from dualpath_sglang.transport.server import Server, ServerOptions
from tests.transport.peers import (
    GEOMETRY_ID,
    LAYER_BYTES,
    LAYERS,
    SECRET,
    SOON_S,
    Blocks,
    keys,
    layer_block,
    place_for,
    request_of,
)
from tests.transport.raw import RawClient, RawPeer, frame, piece

MOST_GROWTH_BYTES = 64 << 20


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("DUALPATH_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"DUALPATH_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def _nothing_of_ours_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    raised = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert not raised, raised[0].getMessage()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same, hurt somewhere; sometimes not at all."""
    hurt = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
        at = rng.randrange(len(hurt) + 1)
        what = rng.randrange(6)
        if what == 0 and at < len(hurt):
            hurt[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(hurt):
            hurt[at] = rng.choice([0, 1, 127, 128, 255])
        elif what == 2:
            hurt[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif what == 3:
            del hurt[at : at + rng.randrange(1, 9)]
        elif what == 4:
            del hurt[at:]
        else:
            hurt[at : at + 4] = struct.pack("!I", rng.choice([0, 1, 1 << 16, 1 << 31, 0xFFFFFFFF]))
    return bytes(hurt)


def sealed(seal: Seal, kind: Kind, number: int, rng: random.Random, content: bytes) -> bytes:
    """A frame whose head and seal are right, whatever its fields are."""
    layer = rng.choice([0, 1, LAYERS - 1, LAYERS, 500, 0xFFFFFFFF])
    block = rng.choice([0, 1, 7, 1 << 16, 0xFFFFFFFF])
    whole = len(content) + seal.size
    length = rng.choice([whole] * 6 + [0, seal.size, whole + 1, 1 << 20, 0xFFFFFFFF])
    front = Head(kind, number, layer, block, length).pack() + content
    framed = front + seal.over(front)
    seal.passed()
    return framed


# -- what takes frames apart ------------------------------------------------------------------


HEAD = Head(Kind.FETCH, 1, length=7).pack()
"""Of what is sealed: a seal covers it too."""


def seal(key: bytes, content: bytes) -> bytes:
    return content + Seal(key).over(HEAD, content)


def opened(key: bytes, data: bytes) -> bytes:
    taker = Seal(key)
    content = data[: -taker.size]
    digest = taker.begin()
    digest.update(HEAD)
    digest.update(content)
    taker.check(digest, data[-taker.size :])
    return content


def take_apart(cases: int, rng: random.Random, key: bytes = b"") -> None:
    """Every parser, on what is nearly right: a value of ours, or the one error that is meant."""
    request = FetchRequest(GEOMETRY_ID, keys(3), 0, LAYERS, 1.0)
    fetch, load = frames.fetch_body(request), frames.load_body(Load(1, 2))
    missing, front = frames.missing_body([1, 2]), frames.data_front(Span(2, 3, 3, 3), [1, 2, 3])
    head = Head(Kind.DATA, 1, 2, 3, len(front) + 3 * LAYER_BYTES).pack()
    parsers: list[Callable[[bytes], object]] = [
        lambda data: Head.unpack(data.ljust(frames.HEAD_BYTES)[: frames.HEAD_BYTES]),
        frames.parse_fetch,
        lambda data: frames.parse_missing(data, 3),
        frames.parse_load,
        lambda data: frames.data_span(
            Head(Kind.DATA, 1, 0, 0, rng.choice([3 * LAYER_BYTES + 36, rng.randrange(1 << 20)])),
            data[:8].ljust(8),
            LAYER_BYTES,
        ),
        lambda data: opened(key, data),
    ]
    good = [head, fetch, missing, load, front, seal(key, fetch)]
    right = wrong = 0
    for _ in range(cases):
        which = rng.randrange(len(parsers))
        data = mutated(good[which], rng)
        try:
            value = parsers[which](data)
        except PeerLostError:
            wrong += 1
            continue
        right += 1
        if which == 5:
            assert value == fetch, "a damaged request is none"
    print(f"{right} taken, {wrong} refused")
    assert right > cases // 50
    assert wrong > cases // 4


# -- a server that is sent nonsense -----------------------------------------------------------


def to_a_server(cases: int, rng: random.Random, secret: bytes = b"") -> None:
    source = Blocks(run=2)
    server = Server(source, ServerOptions(secret=secret))
    before, threads = resident_bytes(), threading.active_count()
    try:
        address = PeerAddress("127.0.0.1", server.port, secret)
        honest = Connection(address, time.monotonic() + SOON_S)
        for case in range(cases):
            with RawClient(server, secret=secret) as raw:
                raw.sock.settimeout(SOON_S)
                sent = [to_server(raw.seals.sent, rng) for _ in range(rng.randrange(1, 4))]
                with contextlib.suppress(OSError):
                    raw.sock.sendall(b"".join(sent))
                    if rng.random() < 0.5:
                        raw.sock.shutdown(socket.SHUT_WR)
                        while raw.sock.recv(1 << 16):
                            pass
            if case % 50 == 0:
                fetched = place_for(request_of(keys(5, case)))
                fetch = honest.fetch(fetched.request, fetched.destination, fetched)
                assert fetch.wait(SOON_S), "others are not served"
                assert fetched.ends == [End.OK]
                assert not fetched.wrong()
        honest.close()
        end = time.monotonic() + SOON_S
        while server._clients():
            assert time.monotonic() < end, "a connection hangs"
            time.sleep(0.02)
        assert threading.active_count() <= threads + 1
        assert resident_bytes() - before < MOST_GROWTH_BYTES
    finally:
        server.close()


def to_server(seal: Seal, rng: random.Random) -> bytes:
    number = rng.choice([0, 1, 2, 0xFFFFFFFF])
    names = keys(rng.randrange(1, 6), rng.random())
    content = frames.fetch_body(FetchRequest(GEOMETRY_ID, names, 0, rng.randrange(1, LAYERS), 5.0))
    what = rng.random()
    if what < 0.4:
        return mutated(frame(seal, Kind.FETCH, number, content), rng)
    if what < 0.6:
        return sealed(seal, Kind.FETCH, number, rng, mutated(content, rng))
    if what < 0.9:
        kind = rng.choice(list(Kind))
        empty = kind in (Kind.CANCEL, Kind.PING) and rng.random() < 0.8
        return sealed(seal, kind, number, rng, b"" if empty else mutated(content, rng))
    return rng.randbytes(rng.randrange(1, 200))


# -- a client that is answered nonsense -------------------------------------------------------


def to_a_client(cases: int, rng: random.Random, secret: bytes = b"") -> None:
    before, threads = resident_bytes(), threading.active_count()
    for _ in range(cases):
        with RawPeer(secret) as peer:
            connection = peer.connected(secret)
            peer.sock.settimeout(SOON_S)
            fetched = place_for(request_of(keys(4, rng.random())), guard=GUARD)
            fetch = connection.fetch(fetched.request, fetched.destination, fetched)
            with contextlib.suppress(OSError):
                for _ in range(rng.randrange(1, 6)):
                    peer.sock.sendall(to_client(peer.seal, fetch.number, fetched.request, rng))
                if rng.random() < 0.7:
                    peer.sock.shutdown(socket.SHUT_WR)
            if not fetch.wait(0.05):
                connection.cancel(fetch, End.TIMEOUT)
            assert fetch.wait(SOON_S)
            assert len(fetched.ends) == 1
            memory = fetched.destination.memory
            assert memory[:GUARD] == memory[-GUARD:] == bytes(GUARD), "beside the destination"
            for (layer, i), checksum in fetched.got.items():
                (view,) = fetched.destination.views(Span(layer, layer + 1, i, 1))
                told = xxhash.xxh3_64_intdigest(view) == checksum
                right = view == layer_block(fetched.request.keys[i], layer)
                # What passes its checksum is right, unless the peer itself lies.
                assert right or not told or checksum == LIE
            connection.close()
    assert threading.active_count() <= threads + 1
    assert resident_bytes() - before < MOST_GROWTH_BYTES


GUARD = 1 << 16
LIE = xxhash.xxh3_64_intdigest(bytes(LAYER_BYTES))


def to_client(seal: Seal, number: int, request: FetchRequest, rng: random.Random) -> bytes:
    layer, block = rng.randrange(LAYERS), rng.randrange(len(request.keys))
    data = layer_block(request.keys[block], layer)
    checksum = xxhash.xxh3_64_intdigest(data)
    what = rng.random()
    if what < 0.3:
        return mutated(piece(seal, number, layer, block, data, checksum), rng)
    if what < 0.5:
        return piece(seal, number, layer, block, data, checksum)
    if what < 0.6:
        return piece(seal, number, layer, block, bytes(LAYER_BYTES), LIE)
    if what < 0.9:
        kind = rng.choice(list(Kind))
        contents = {
            Kind.DATA: frames.data_front(Span(0, 1, 0, 1), [LIE]),
            Kind.MISSING: frames.missing_body([0, block]),
            Kind.END: frames.load_body(Load(3, 4)),
            Kind.LOAD: frames.load_body(Load(3, 4)),
        }
        framed = sealed(
            seal, kind, rng.choice([number, number, 0, 77]), rng, contents.get(kind, b"")
        )
        return framed + (bytes(LAYER_BYTES) if kind is Kind.DATA else b"")
    return rng.randbytes(rng.randrange(1, 200))


both = pytest.mark.parametrize("secret", [b"", SECRET], ids=["crc", "mac"])


@both
def test_parsers(rng: random.Random, secret: bytes) -> None:
    take_apart(3000, rng, secret)


@both
def test_a_server(rng: random.Random, secret: bytes) -> None:
    to_a_server(150, rng, secret)


@both
def test_a_client(rng: random.Random, secret: bytes) -> None:
    to_a_client(100, rng, secret)


@pytest.mark.slow
@pytest.mark.timeout(900)
@both
def test_a_hundred_thousand_cases(rng: random.Random, secret: bytes) -> None:
    take_apart(100_000, rng, secret)
    to_a_server(10_000, rng, secret)
    to_a_client(5_000, rng, secret)
