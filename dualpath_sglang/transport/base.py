"""What a transport does, whatever carries it: TCP now, RDMA Writes later.

One side *serves*: it has Layer Blocks, or reads them. The other *fetches* them into memory of its
own, a destination that it registers before it asks. Where in it a Layer Block goes follows from its
layer and its number alone; no address ever comes from the network.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dualpath_storage.geometry import MAX_LAYERS

MAX_BLOCKS = 1 << 16
"""Of one request: 4M tokens in pages of 64."""


class TransportError(Exception):
    """A peer cannot be used; the message is a sentence for the operator."""


class RefusedError(TransportError):
    """The peer and this node do not fit together, or do not trust each other."""


class PeerLostError(TransportError):
    """The peer is gone, does not answer, or says what makes no sense."""


class End(enum.Enum):
    """How a fetch ended."""

    OK = 0
    """Every Layer Block was sent, or said to be missing."""
    TIMEOUT = 1
    CANCELLED = 2
    FAILED = 3
    BUSY = 4
    """The peer has too much to do to take it on."""
    UNKNOWN = 5
    """The peer has nothing of that geometry."""
    LOST = 6
    """The connection ended; never sent."""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Layer Blocks of a chain.

    Args:
        geometry_id: 16 bytes.
        keys: of the blocks, 32 bytes each.
        first_layer, end_layer: layers ``[first, end)``.
        timeout_s: after which the fetch is of no use any more.
        cached_only: what is not wholly in the peer's memory is missing; nothing is read for it.

    Raises:
        ValueError: it asks for what no geometry has.
    """

    geometry_id: bytes
    keys: Sequence[bytes]
    first_layer: int
    end_layer: int
    timeout_s: float
    cached_only: bool = False

    def __post_init__(self) -> None:
        if len(self.geometry_id) != 16 or any(len(key) != 32 for key in self.keys):
            raise ValueError("a geometry id has 16 bytes and a key has 32")
        if not 1 <= len(self.keys) <= MAX_BLOCKS:
            raise ValueError(f"a fetch has 1 to {MAX_BLOCKS} blocks")
        if not 0 <= self.first_layer < self.end_layer <= MAX_LAYERS:
            raise ValueError(f"layers lie in 0..{MAX_LAYERS}, and there is at least one")
        if not 0 < self.timeout_s < 1e6:
            raise ValueError("a fetch has a deadline")


@dataclass(frozen=True, slots=True)
class Span:
    """Layer Blocks that travel together: the same layers of neighbouring blocks.

    Their bytes come block by block, and in each layer by layer.

    Args:
        first_layer, end_layer: layers ``[first, end)``, counted from the model's first.
        first: number of the first block in the request.
        count: blocks.
    """

    first_layer: int
    end_layer: int
    first: int
    count: int

    @property
    def layers(self) -> int:
        """How many."""
        return self.end_layer - self.first_layer

    @property
    def layer_blocks(self) -> int:
        """How many Layer Blocks."""
        return self.layers * self.count


class Destination(Protocol):
    """Memory for the Layer Blocks of one fetch, registered before anything is asked for."""

    @property
    def layer_bytes(self) -> int:
        """Of one Layer Block."""
        ...

    def check(self, request: FetchRequest) -> None:
        """Whether it has a place for all that is asked for.

        Raises:
            ValueError: it does not.
        """
        ...

    def views(self, span: Span, deadline: float) -> Sequence[memoryview] | None:
        """Where a piece goes, in the order of its bytes; None for nowhere: nobody wants it.

        Called once a piece, when it comes. May wait for memory, and with it everything else on the
        connection does.

        Args:
            deadline: monotonic seconds; None is returned by then.
        """
        ...


@dataclass(frozen=True, slots=True)
class StridedDestination:
    """A place for every Layer Block, at even distances.

    Args:
        memory: writable bytes.
        layer_bytes: of one Layer Block.
        block_stride, layer_stride: bytes from a block to the next of the same layer, and from a
            layer to the next of the same block.
        offset: of the first layer of the first block.
        first_layer: the layer that lies there.
    """

    memory: memoryview
    layer_bytes: int
    block_stride: int
    layer_stride: int
    offset: int = 0
    first_layer: int = 0

    @classmethod
    def of_blocks(cls, memory: memoryview, layer_bytes: int, layers: int) -> StridedDestination:
        """Full Blocks, one after the other."""
        return cls(memory, layer_bytes, layer_bytes * layers, layer_bytes)

    @classmethod
    def of_layers(cls, memory: memoryview, layer_bytes: int, blocks: int) -> StridedDestination:
        """Layer after layer, and in each the blocks side by side."""
        return cls(memory, layer_bytes, layer_bytes, layer_bytes * blocks)

    def check(self, request: FetchRequest) -> None:
        """See :class:`Destination`; no two Layer Blocks may have one place."""
        blocks, layers = len(request.keys), request.end_layer - self.first_layer
        inner, outer = sorted(
            ((self.block_stride, blocks), (self.layer_stride, layers)), key=lambda row: row[0]
        )
        last = self.offset + (blocks - 1) * self.block_stride + (layers - 1) * self.layer_stride
        if self.memory.readonly or self.memory.format != "B" or not self.memory.contiguous:
            raise ValueError("a destination is writable bytes in one piece")
        if not 0 <= self.first_layer <= request.first_layer:
            raise ValueError("the destination begins at a later layer")
        if self.layer_bytes < 1 or self.offset < 0 or last + self.layer_bytes > len(self.memory):
            raise ValueError("the destination is too small")
        if inner[0] < self.layer_bytes or (outer[1] > 1 and outer[0] < inner[0] * inner[1]):
            raise ValueError("Layer Blocks would overlap in the destination")

    def views(self, span: Span, deadline: float = 0.0) -> Sequence[memoryview]:
        """See :class:`Destination`; never waits."""
        del deadline
        size, layers = self.layer_bytes, span.layers
        begin = self.offset + (span.first_layer - self.first_layer) * self.layer_stride
        begin += span.first * self.block_stride
        if self.layer_stride == size or layers == 1:  # the layers of a block are one run
            run, steps = layers * size, [0]
        else:
            run, steps = size, [i * self.layer_stride for i in range(layers)]
        if len(steps) == 1 and self.block_stride == run:  # and so are the blocks
            return [self.memory[begin : begin + span.count * run]]
        blocks = range(begin, begin + span.count * self.block_stride, self.block_stride)
        return [self.memory[at + step : at + step + run] for at in blocks for step in steps]


@dataclass(frozen=True, slots=True)
class Load:
    """What a node has accepted to read from storage and not yet read."""

    bytes: int = 0
    tokens: int = 0


class Fetching(Protocol):
    """Told what comes, from a thread of the transport; must not block for long."""

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        """Layer Blocks are in the destination, with their checksums (xxh3-64) in the same order.

        Nobody has compared them with the bytes yet.
        """
        ...

    def missing(self, blocks: Sequence[int]) -> None:
        """The peer does not have these; no layer of them follows."""
        ...

    def ended(self, end: End, load: Load | None) -> None:
        """Nothing more comes, and nothing writes to the destination. Called once.

        Args:
            load: the peer's, when it said so.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Layer Blocks to be sent.

    Args:
        checksums: xxh3-64 of each Layer Block, in the order of the bytes.
        buffers: the bytes.
        offsets: where each buffer begins in the file that the source shares, if it shares one.
    """

    span: Span
    checksums: Sequence[int]
    buffers: Sequence[memoryview]
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """Blocks that the server does not have, by their numbers in the request."""

    blocks: Sequence[int]


class Served(Protocol):
    """The answer to one request, made while it is sent."""

    def __iter__(self) -> Iterator[Piece | Missing]:
        """What is to be sent, in layer order; waits for what is not there yet.

        Raises:
            TimeoutError: the deadline came first.
        """
        ...

    def cancel(self) -> None:
        """Nobody wants it any more: the iteration ends soon. From any thread."""
        ...


class Source(Protocol):
    """What a server serves. Thread-safe."""

    def serve(self, request: FetchRequest) -> AbstractContextManager[Served] | End:
        """Begin to answer a request, or say why not."""
        ...

    def load(self) -> Load:
        """What is still to be read from storage."""
        ...
