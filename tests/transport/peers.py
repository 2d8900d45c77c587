"""A source of blocks that are what their keys say, and a fetch that notes what came."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    Missing,
    Piece,
    Served,
    Span,
    StridedDestination,
)
from dualpath_sglang.transport.client import Connection

GEOMETRY_ID = b"g" * 16
LAYERS, LAYER_BYTES = 5, 4096
BLOCK_BYTES = LAYERS * LAYER_BYTES
SECRET = b"a secret of the test"
SOON_S = 20.0


def key(*name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def keys(count: int, name: object = "k") -> list[bytes]:
    return [key(name, i) for i in range(count)]


def layer_block(name: bytes, layer: int, size: int = LAYER_BYTES) -> bytes:
    """What a Layer Block holds."""
    return hashlib.shake_128(name + bytes([layer])).digest(size)


class Blocks:
    """Serves any key; those in ``absent`` it has not.

    Args:
        hold: called before each piece, with its layer and first block.
        run: blocks that it goes through before the next layers.
        layers: of one piece.
    """

    def __init__(
        self,
        absent: Sequence[bytes] = (),
        hold: Callable[[int, int], None] = lambda *_: None,
        size: int = LAYER_BYTES,
        run: int = 4,
        layers: int = 1,
    ) -> None:
        self.absent = set(absent)
        self.hold = hold
        self.size = size
        self.run = run
        self.layers = layers
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self.requests: list[FetchRequest] = []
        self.refuse: End | None = None
        self.lock = threading.Lock()

    def load(self) -> Load:
        return Load(12345, 678)

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        self.requests.append(request)
        if self.refuse is not None:
            return self.refuse
        if request.geometry_id != GEOMETRY_ID:
            return End.UNKNOWN
        return self._serving(request)

    @contextlib.contextmanager
    def _serving(self, request: FetchRequest) -> Iterator[Served]:
        try:
            yield _Answer(self, request)
        finally:
            self.closed.set()


@dataclass
class _Answer:
    blocks: Blocks
    request: FetchRequest

    def __iter__(self) -> Iterator[Piece | Missing]:
        source, request = self.blocks, self.request
        missing = [i for i, name in enumerate(request.keys) if name in source.absent]
        if missing:
            yield Missing(missing)
        for layer in range(request.first_layer, request.end_layer, source.layers):
            end = min(layer + source.layers, request.end_layer)
            for first in range(0, len(request.keys), source.run):
                last = min(first + source.run, len(request.keys))
                for i in (i for i in range(first, last) if i not in missing):
                    source.hold(layer, i)
                    yield self._piece(Span(layer, end, i, 1))

    def _piece(self, span: Span) -> Piece:
        name, size = self.request.keys[span.first], self.blocks.size
        data = [layer_block(name, n, size) for n in range(span.first_layer, span.end_layer)]
        sums = [xxhash.xxh3_64_intdigest(part) for part in data]
        return Piece(span, sums, [memoryview(b"".join(data))])

    def cancel(self) -> None:
        self.blocks.cancelled.set()


@dataclass
class Fetched:
    """What came of a fetch."""

    request: FetchRequest
    destination: StridedDestination
    layers: list[int] = field(default_factory=list)
    got: dict[tuple[int, int], int] = field(default_factory=dict)
    lacking: set[int] = field(default_factory=set)
    ends: list[End] = field(default_factory=list)
    load: Load | None = None
    on_landed: Callable[[int, int], object] = lambda *_: None
    fetch: Any = None

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        assert not self.ends
        self.layers.append(span.first_layer)
        left = iter(checksums)
        for i in range(span.first, span.first + span.count):
            for layer in range(span.first_layer, span.end_layer):
                self.got[layer, i] = next(left)
        self.on_landed(span.first_layer, span.first)

    def missing(self, blocks: Sequence[int]) -> None:
        self.lacking.update(blocks)

    def ended(self, end: End, load: Load | None) -> None:
        self.ends.append(end)
        self.load = load

    def wrong(self) -> list[tuple[int, int]]:
        """Layer Blocks that landed with other bytes than their keys say, or another checksum."""
        found = []
        for (layer, i), checksum in self.got.items():
            (view,) = self.destination.views(Span(layer, layer + 1, i, 1))
            data = layer_block(self.request.keys[i], layer, self.destination.layer_bytes)
            if view != data or checksum != xxhash.xxh3_64_intdigest(data):
                found.append((layer, i))
        return found


def request_of(
    names: Sequence[bytes], first: int = 0, end: int = LAYERS, timeout_s: float = 20.0
) -> FetchRequest:
    return FetchRequest(GEOMETRY_ID, names, first, end, timeout_s)


def place_for(request: FetchRequest, *, by_layer: bool = True, guard: int = 0) -> Fetched:
    """A fetch and new memory for it, with so many bytes on both sides that are not part of it."""
    layers, blocks = request.end_layer - request.first_layer, len(request.keys)
    memory = memoryview(bytearray(layers * blocks * LAYER_BYTES + 2 * guard))
    make = StridedDestination.of_layers if by_layer else StridedDestination.of_blocks
    destination = make(memory, LAYER_BYTES, blocks if by_layer else layers)
    return Fetched(request, replace(destination, offset=guard, first_layer=request.first_layer))


def run(connection: Connection, fetched: Fetched) -> Fetched:
    """A fetch, until it has ended."""
    fetch = connection.fetch(fetched.request, fetched.destination, fetched)
    assert fetch.wait(SOON_S)
    return fetched


def held(go: threading.Event) -> None:
    go.wait(SOON_S)


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def ends(call: Callable[[], object]) -> bool:
    """Whether it does, rather than wait for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SOON_S)
    return not thread.is_alive()
