"""A process that poses as an agent: it knows the secret, greets as it must, and answers nonsense.

``python -m tests.chaos.garbage HOST PORT``, with DualPath's settings in the environment. It tells
of itself in the index as an agent does. Until its standard input ends. What it does not do is to
send wrong bytes with the right checksums for them: who knows the secret is trusted that far.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import End, FetchRequest, Load, PeerLostError, Span
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.handshake import VERSION, admit
from dualpath_sglang.transport.seal import Seal
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_sglang.transport.wire import Wire
from tests.chaos.blocks import LAYER_BYTES, LAYERS
from tests.transport.raw import frame

_DICE = random.Random(7)
Nonsense = Callable[[Seal, int, FetchRequest], Iterator[bytes]]


def _piece(seal: Seal, number: int, span: Span, size: int = LAYER_BYTES) -> bytes:
    """Random bytes with random checksums."""
    count = span.layer_blocks
    content = frames.data_front(span, [_DICE.getrandbits(64) for _ in range(count)])
    payload = _DICE.randbytes(count * size)
    where = {"layer": span.first_layer, "block": span.first}
    return frame(seal, Kind.DATA, number, content, payload, **where)


def _end(seal: Seal, number: int, how: int = End.OK.value) -> bytes:
    return frame(seal, Kind.END, number, frames.load_body(Load(1 << 60, 1 << 60)), layer=how)


def noise(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """Bytes that are no frame."""
    yield _DICE.randbytes(1 << 20)


def wrong_bytes(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """All that was asked for, and none of it right."""
    for layer in range(asked.first_layer, asked.end_layer):
        yield _piece(seal, number, Span(layer, layer + 1, 0, len(asked.keys)))
    yield _end(seal, number)


def out_of_range(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """Blocks that nobody asked for."""
    yield _piece(seal, number, Span(0, 1, len(asked.keys), 1))


def twice(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """The same layer over and over."""
    for _ in range(4):
        yield _piece(seal, number, Span(asked.first_layer, asked.first_layer + 1, 0, 1))


def too_short(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """A piece that is smaller than a Layer Block."""
    yield _piece(seal, number, Span(asked.first_layer, asked.first_layer + 1, 0, 1), 100)


def nothing(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """The end, at once, as if all had come."""
    yield _end(seal, number)


def no_end(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """An end of a kind that there is not."""
    yield _end(seal, number, LAYERS + 1000)


def all_missing(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """It has none of these."""
    yield frame(seal, Kind.MISSING, number, frames.missing_body(range(len(asked.keys))))
    yield _end(seal, number)


def missing_others(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """It does not have what nobody asked for."""
    yield frame(seal, Kind.MISSING, number, frames.missing_body([len(asked.keys) + 9]))


def another_fetch(seal: Seal, number: int, asked: FetchRequest) -> Iterator[bytes]:
    """The answer to a question of nobody's."""
    yield _end(seal, number + 1000)


KINDS: tuple[Nonsense, ...] = (
    noise,
    wrong_bytes,
    out_of_range,
    twice,
    too_short,
    nothing,
    no_end,
    all_missing,
    missing_others,
    another_fetch,
)


class Garbage:
    """See the module."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(PeerLostError, OSError), sock:
            io = SocketIo(sock)
            seals = admit(io, self._secret, time.monotonic() + 10.0)
            wire = Wire(io, seals)
            while True:
                head: Head = wire.receive_head(time.monotonic() + 60.0)
                content = wire.receive_content(head, time.monotonic() + 10.0)
                if head.kind is not Kind.FETCH:
                    continue
                asked = frames.parse_fetch(content)
                kind = _DICE.choice(KINDS)
                for data in kind(seals.sent, head.request, asked):
                    io.send([data], time.monotonic() + 10.0)


def _report(cache: KVCache, host: str, port: int) -> None:
    began = time.monotonic()
    while True:
        with contextlib.suppress(IndexUnavailableError):
            cache.index.report(
                "garbage:node:garbage",
                {
                    "role": "node",
                    "host": "garbage",
                    "node_id": "garbage",
                    "address": f"{host}:{port}",
                    "protocol": VERSION,
                    "up_s": time.monotonic() - began,
                    "read_queue_bytes": 0,
                    "read_queue_tokens": 0,
                },
                3.0,
            )
        time.sleep(0.5)


def main() -> None:
    """Run until the standard input ends."""
    host, port = sys.argv[1], int(sys.argv[2])
    config = DualPathConfig.load()
    with KVCache(config.store_options(), index=config.index_source()) as cache:
        Garbage(host, port, cache.index.secret())
        threading.Thread(target=_report, args=(cache, host, port), daemon=True).start()
        print("listens", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
