"""What goes over the unix socket between a node's agent and readers on the same machine.

The bytes of Layer Blocks do not: the agent passes the descriptor of its memory, a sealed file,
once, with its hello, and then says where in it they are. Integers are as the machine has them.

| kind | from | body |
|---|---|---|
| hello (no head) | agent | ``DPLOCAL``, version (u8), size of the file (u64); and the descriptor |
| FETCH | reader | geometry id (16), timeout in s (f64), first and end layer (u16), flags (u32):
  1 for only what is in memory; keys (32 each) |
| CANCEL | reader | nothing of this fetch is looked at any more |
| DATA | agent | first and end layer, first block, blocks (u32 each); where the layers of each block
  begin in the file (u64 each); xxh3-64 of each Layer Block |
| MISSING | agent | block numbers, as over a network |
| SYNC | agent | asks for TAKEN: what was named so far may be something else afterwards |
| TAKEN | reader | all that came before the SYNC was copied |
| END | agent | how it ended (u32), bytes and tokens to be read from storage (u64 each) |

Each begins with its kind (u32), the reader's number of the fetch (u32), and its length (u32).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath_sglang.transport.base import (
    MAX_BLOCKS,
    End,
    FetchRequest,
    Load,
    PeerLostError,
    Piece,
    Span,
)

VERSION = 2
MAGIC = b"DPLOCAL"
HELLO = struct.Struct("=7sBQ")
HEAD = struct.Struct("=III")
MAX_LAYER_BLOCKS = 1 << 16
"""Of one DATA frame."""
_FETCH = struct.Struct("=16sdHHI")
_DATA = struct.Struct("=IIII")
_END = struct.Struct("=IQQ")
_CACHED_ONLY = 1


class Kind(enum.IntEnum):
    """What a frame is."""

    FETCH = 1
    CANCEL = 2
    DATA = 3
    MISSING = 4
    SYNC = 5
    TAKEN = 6
    END = 7


_LONGEST = {
    Kind.FETCH: _FETCH.size + 32 * MAX_BLOCKS,
    Kind.CANCEL: 0,
    Kind.DATA: _DATA.size + 16 * MAX_LAYER_BLOCKS,
    Kind.MISSING: 4 * MAX_BLOCKS,
    Kind.SYNC: 0,
    Kind.TAKEN: 0,
    Kind.END: _END.size,
}


def frame(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEAD.pack(kind, number, len(body)) + body


def parse_head(data: bytes) -> tuple[Kind, int, int]:
    """Kind, number and length.

    Raises:
        PeerLostError: it is none.
    """
    kind, number, length = HEAD.unpack(data)
    if kind not in Kind.__members__.values() or length > _LONGEST[Kind(kind)]:
        raise PeerLostError("a frame came that is not of this protocol")
    return Kind(kind), number, length


def fetch_body(request: FetchRequest) -> bytes:
    """The body of a FETCH."""
    flags = _CACHED_ONLY if request.cached_only else 0
    layers = (request.first_layer, request.end_layer)
    fixed = _FETCH.pack(request.geometry_id, request.timeout_s, *layers, flags)
    return fixed + b"".join(request.keys)


def parse_fetch(body: bytes) -> FetchRequest:
    """The request in the body of a FETCH.

    Raises:
        PeerLostError: it is malformed.
    """
    try:
        geometry_id, timeout_s, first, end, flags = _FETCH.unpack_from(body)
        keys = [body[at : at + 32] for at in range(_FETCH.size, len(body), 32)]
        only = bool(flags & _CACHED_ONLY)
        return FetchRequest(geometry_id, keys, first, end, timeout_s, only)
    except (struct.error, ValueError) as error:
        raise PeerLostError(f"a request came that cannot be one: {error}") from error


def data_body(piece: Piece) -> bytes:
    """The body of a DATA."""
    span = piece.span
    return b"".join(
        (
            _DATA.pack(span.first_layer, span.end_layer, span.first, span.count),
            struct.pack(f"={len(piece.offsets)}Q", *piece.offsets),
            struct.pack(f"={len(piece.checksums)}Q", *piece.checksums),
        )
    )


@dataclass(frozen=True, slots=True)
class Named:
    """Layer Blocks in the file: where the layers of each block begin, and their checksums."""

    span: Span
    offsets: Sequence[int]
    checksums: Sequence[int]


def parse_data(body: bytes, layer_bytes: int, size: int) -> Named:
    """What is in the body of a DATA.

    Args:
        layer_bytes: of a Layer Block.
        size: of the file, outside of which nothing may be.

    Raises:
        PeerLostError: it is malformed.
    """
    if len(body) < _DATA.size:
        raise PeerLostError("a piece came that is cut short")
    first_layer, end_layer, first, count = _DATA.unpack_from(body)
    layers = end_layer - first_layer
    if layers < 1 or not 1 <= count * layers <= MAX_LAYER_BLOCKS:
        raise PeerLostError("a piece came that nobody can have meant")
    if len(body) != _DATA.size + 8 * count * (1 + layers):
        raise PeerLostError("a piece came that is not as long as it says")
    offsets = struct.unpack_from(f"={count}Q", body, _DATA.size)
    if max(offsets) + layers * layer_bytes > size:
        raise PeerLostError("a piece came that is not in the memory")
    checksums = struct.unpack_from(f"={count * layers}Q", body, _DATA.size + 8 * count)
    return Named(Span(first_layer, end_layer, first, count), offsets, checksums)


def end_body(end: End, load: Load) -> bytes:
    """The body of an END."""
    return _END.pack(end.value, load.bytes, load.tokens)


def parse_end(body: bytes) -> tuple[End, Load]:
    """How a fetch ended, and what is still to be read from storage.

    Raises:
        PeerLostError: it is malformed.
    """
    try:
        value, size, tokens = _END.unpack(body)
        end = End(value)
        if end is End.LOST:
            raise ValueError("that cannot be sent")
    except (struct.error, ValueError) as error:
        raise PeerLostError(f"an end came that is malformed: {error}") from error
    return end, Load(size, tokens)
