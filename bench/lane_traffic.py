"""The two kinds of traffic of :mod:`bench.lanes`, a process each.

``python -m bench.lane_traffic ROLE ADDRESS PORT [MORE]``:

| role | |
|---|---|
| ``serve-kv`` | a server of Layer Blocks in memory; MORE is the code point |
| ``fetch-kv`` | eight fetches from it over four connections, again and again; the same MORE |
| ``answer`` | a server of the model: 16 KiB for each message of 16 KiB, nothing for a flood |
| ``ask`` | one message after the other for MORE seconds; prints the seconds of each as JSON |
| ``flood`` | bytes, as many as go, until it is killed |

All but ``ask`` print ``up`` when they listen, or when bytes flow.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import xxhash

from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    Missing,
    PeerLostError,
    Piece,
    Served,
    Span,
    StridedDestination,
    TransportError,
)
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.server import Server, ServerOptions

MESSAGE_BYTES = 16 << 10
_GEOMETRY_ID = b"lanes of a bench"
_LAYERS, _BLOCKS, _LAYER_BYTES = 16, 4, 64 << 10
_CONNECTIONS, _AT_A_TIME = 4, 2
_TIMEOUT_S = 300.0
_START_S = 60.0
_FLOOD = b"f"


class Memory:
    """Any block, from the same bytes."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytes(range(256)) * (_LAYER_BYTES // 256))
        self._checksum = xxhash.xxh3_64_intdigest(self._bytes)

    def load(self) -> Load:
        return Load()

    @contextlib.contextmanager
    def serve(self, request: FetchRequest) -> Iterator[Served]:
        yield _Answer(request, self._bytes, self._checksum)


class _Answer:
    def __init__(self, request: FetchRequest, layer: memoryview, checksum: int) -> None:
        self._request, self._layer, self._checksum = request, layer, checksum

    def __iter__(self) -> Iterator[Piece | Missing]:
        for layer in range(self._request.first_layer, self._request.end_layer):
            for block in range(len(self._request.keys)):
                span = Span(layer, layer + 1, block, 1)
                yield Piece(span, [self._checksum], [self._layer])

    def cancel(self) -> None:
        """What it sends soon ends by itself."""


class Told:
    """Whether bytes flow, and how a fetch ended."""

    def __init__(self, flows: threading.Event) -> None:
        self.end: End | None = None
        self._flows = flows

    def landed(self, span: Span, checksums: object) -> None:
        del span, checksums
        self._flows.set()

    def missing(self, blocks: object) -> None:
        raise AssertionError(f"blocks {blocks} are missing, and none is")

    def ended(self, end: End, load: Load | None) -> None:
        del load
        self.end = end


def serve_kv(address: str, port: int, dscp: int) -> None:
    """Until it is killed."""
    server = Server(Memory(), ServerOptions(host=address, port=port, dscp=dscp))
    print("up", flush=True)
    try:
        threading.Event().wait()
    finally:
        server.close()


def fetch_kv(address: str, port: int, dscp: int) -> None:
    """Until it is killed, or a fetch fails."""
    failed: SimpleQueue[str] = SimpleQueue()
    flows = [threading.Event() for _ in range(_CONNECTIONS)]
    for flow in flows:
        connection = Connection(PeerAddress(address, port, dscp=dscp), time.monotonic() + 30)
        for _ in range(_AT_A_TIME):
            threading.Thread(target=_fetch, args=(connection, flow, failed), daemon=True).start()
    if all(flow.wait(_START_S) for flow in flows):
        print("up", flush=True)
        sys.exit(failed.get())
    sys.exit("Nothing was fetched")


def _fetch(connection: Connection, flows: threading.Event, failed: SimpleQueue[str]) -> None:
    memory = memoryview(bytearray(_BLOCKS * _LAYERS * _LAYER_BYTES))
    destination = StridedDestination.of_blocks(memory, _LAYER_BYTES, _LAYERS)
    keys = [number.to_bytes(32, "big") for number in range(_BLOCKS)]
    request = FetchRequest(_GEOMETRY_ID, keys, 0, _LAYERS, _TIMEOUT_S)
    try:
        while True:
            told = Told(flows)
            connection.fetch(request, destination, told).wait(_TIMEOUT_S)
            if told.end is not End.OK:
                raise PeerLostError(f"it ended so: {told.end}")
    except TransportError as error:
        failed.put(f"A fetch failed: {error}")


def answer(address: str, port: int) -> None:
    """Until it is killed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    print("up", flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_answer_one, args=(sock,), daemon=True).start()


def _answer_one(sock: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    with sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        flood = sock.recv(1) == _FLOOD
        _prefer_this_thread()
        while not flood:
            _fill(sock, memoryview(buffer)[:MESSAGE_BYTES])
            sock.sendall(memoryview(buffer)[:MESSAGE_BYTES])
        while sock.recv_into(buffer):
            pass


def ask(address: str, port: int, seconds: float) -> None:
    """Print how long each message and its answer took."""
    message, took = bytearray(MESSAGE_BYTES), []
    with socket.create_connection((address, port), 30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"a")
        _prefer_this_thread()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            sock.sendall(message)
            _fill(sock, memoryview(message))
            took.append(time.perf_counter() - begin)
            time.sleep(0.001)  # a model has to compute, too
    print(json.dumps(took))


def _prefer_this_thread() -> None:
    """What is measured is the link, not who gets one of the few cores first."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


def flood(address: str, port: int) -> None:
    """Until it is killed."""
    with socket.create_connection((address, port), 30) as sock:
        sock.sendall(_FLOOD)
        _prefer_this_thread()
        sock.sendall(bytes(8 << 20))  # more than what sockets hold
        print("up", flush=True)
        while True:
            sock.sendall(bytes(1 << 17))


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]


def main() -> None:
    role, address, port, *more = sys.argv[1:]
    if role == "serve-kv":
        serve_kv(address, int(port), int(more[0]))
    elif role == "fetch-kv":
        fetch_kv(address, int(port), int(more[0]))
    elif role == "answer":
        answer(address, int(port))
    elif role == "ask":
        ask(address, int(port), float(more[0]))
    elif role == "flood":
        flood(address, int(port))
    else:
        sys.exit(f"There is no role {role}")


if __name__ == "__main__":
    main()
