"""What goes over a TCP connection, once both ends trust each other.

Every frame begins with 24 bytes, integers in network order:

| offset | field | |
|---|---|---|
| 0 | magic, ``DF`` | |
| 2 | kind (u8), and a zero byte | |
| 4 | request (u32) | the client's number of a fetch |
| 8 | layer (u32) | the first, of DATA; how it ended, of END |
| 12 | block (u32) | number of the first, of DATA |
| 16 | length (u32) | of the body that follows |
| 20 | crc32 of bytes 0..19 | |

| kind | from | body |
|---|---|---|
| FETCH | client | geometry id (16), timeout in ms (u32), first and end layer (u16), keys (32) |
| CANCEL | client | |
| DATA | server | blocks and layers (u32 each), crc32 of both and of the checksums (u32), xxh3-64
  of each Layer Block, payload: block by block, and in each layer by layer |
| MISSING | server | block numbers (u32 each) |
| END | server | bytes and tokens that are to be read from storage (u64 each) |

All bodies but that of DATA end with their crc32, and are bounded before they are read. A frame that
does not check ends the connection: after it nobody knows where the next one begins. Payload is
checked block by block, so that a flipped bit in it costs one block. That a piece is of the block
that it says is the word of the peer, which has proved that it knows the secret.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath_sglang.transport.base import (
    MAX_BLOCKS,
    End,
    FetchRequest,
    Load,
    PeerLostError,
    Span,
)

MAGIC = b"DF"
HEAD = struct.Struct("!2sBxIIIII")
HEAD_BYTES = HEAD.size
MAX_DATA_BYTES = 64 << 20
"""Payload of one DATA frame; a Layer Block may be as large."""
DATA_HEAD = struct.Struct("!III")
_DATA_SHAPE = struct.Struct("!II")
MAX_LAYER_BLOCKS = 1 << 16
"""Of one DATA frame."""
_FETCH = struct.Struct("!16sIHH")
_LOAD = struct.Struct("!QQ")
_CRC_BYTES = 4


class Kind(enum.IntEnum):
    """What a frame is."""

    FETCH = 1
    CANCEL = 2
    DATA = 3
    MISSING = 4
    END = 5


_LONGEST = {
    Kind.FETCH: _FETCH.size + 32 * MAX_BLOCKS + _CRC_BYTES,
    Kind.CANCEL: 0,
    Kind.DATA: MAX_DATA_BYTES + DATA_HEAD.size + 8 * MAX_LAYER_BLOCKS,
    Kind.MISSING: 4 * MAX_BLOCKS + _CRC_BYTES,
    Kind.END: _LOAD.size + _CRC_BYTES,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The first 24 bytes of a frame."""

    kind: Kind
    request: int
    layer: int = 0
    block: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """As it is sent."""
        fields = (MAGIC, self.kind, self.request, self.layer, self.block, self.length)
        crc = zlib.crc32(HEAD.pack(*fields, 0)[:-4])
        return HEAD.pack(*fields, crc)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Head:
        """As it came.

        Raises:
            PeerLostError: it is none.
        """
        magic, kind, request, layer, block, length, crc = HEAD.unpack(data)
        if magic != MAGIC or crc != zlib.crc32(data[:-4]):
            raise PeerLostError("what came is no frame")
        if kind not in Kind.__members__.values() or length > _LONGEST[Kind(kind)]:
            raise PeerLostError("a frame came that is not of this protocol")
        return cls(Kind(kind), request, layer, block, length)


def _sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "big")


def _opened(body: bytes) -> bytes:
    content, crc = body[:-_CRC_BYTES], body[-_CRC_BYTES:]
    if zlib.crc32(content).to_bytes(_CRC_BYTES, "big") != crc:
        raise PeerLostError("a frame came that is damaged")
    return content


def fetch_body(request: FetchRequest) -> bytes:
    """The body of a FETCH."""
    timeout_ms = max(1, min(round(1000 * request.timeout_s), 0xFFFFFFFF))
    fixed = _FETCH.pack(request.geometry_id, timeout_ms, request.first_layer, request.end_layer)
    return _sealed(fixed + b"".join(request.keys))


def parse_fetch(body: bytes) -> FetchRequest:
    """The request in the body of a FETCH.

    Raises:
        PeerLostError: it is malformed.
    """
    content = _opened(body)
    try:
        geometry_id, timeout_ms, first, end = _FETCH.unpack_from(content)
        packed = content[_FETCH.size :]
        keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        return FetchRequest(geometry_id, keys, first, end, timeout_ms / 1000)
    except (struct.error, ValueError) as error:
        raise PeerLostError(f"a request came that cannot be one: {error}") from error


def data_front(span: Span, checksums: Sequence[int]) -> bytes:
    """What comes before the payload of a DATA frame."""
    packed = struct.pack(f"!{len(checksums)}Q", *checksums)
    shape = _DATA_SHAPE.pack(span.count, span.layers)
    return DATA_HEAD.pack(span.count, span.layers, zlib.crc32(packed, zlib.crc32(shape))) + packed


def data_span(head: Head, fixed: bytes | memoryview, layer_bytes: int) -> Span:
    """What is in a DATA frame, from the first bytes of its body.

    Raises:
        PeerLostError: its length says otherwise.
    """
    count, layers, _ = DATA_HEAD.unpack(fixed)
    blocks = count * layers
    if not 1 <= blocks <= MAX_LAYER_BLOCKS or head.length != DATA_HEAD.size + blocks * (
        8 + layer_bytes
    ):
        raise PeerLostError("a piece came that is not as long as it says")
    return Span(head.layer, head.layer + layers, head.block, count)


def parse_checksums(fixed: bytes | memoryview, packed: bytes | memoryview) -> tuple[int, ...]:
    """The checksums of a DATA frame.

    Raises:
        PeerLostError: they, or the shape of the piece, were damaged on the way.
    """
    count, layers, crc = DATA_HEAD.unpack(fixed)
    if zlib.crc32(packed, zlib.crc32(_DATA_SHAPE.pack(count, layers))) != crc:
        raise PeerLostError("checksums came that are damaged")
    return struct.unpack(f"!{len(packed) // 8}Q", packed)


def missing_body(blocks: Sequence[int]) -> bytes:
    """The body of a MISSING."""
    return _sealed(struct.pack(f"!{len(blocks)}I", *blocks))


def parse_missing(body: bytes, blocks: int) -> tuple[int, ...]:
    """Block numbers in the body of a MISSING, all below ``blocks``.

    Raises:
        PeerLostError: it is malformed.
    """
    content = _opened(body)
    if len(content) % 4:
        raise PeerLostError("a list of blocks came that is cut short")
    numbers = struct.unpack(f"!{len(content) // 4}I", content)
    if any(number >= blocks for number in numbers):
        raise PeerLostError("a block was said to be missing that nobody asked for")
    return numbers


def end_body(load: Load) -> bytes:
    """The body of an END."""
    return _sealed(_LOAD.pack(load.bytes, load.tokens))


def parse_end(head: Head, body: bytes) -> tuple[End, Load]:
    """How a fetch ended, and the peer's read queue.

    Raises:
        PeerLostError: it is malformed.
    """
    content = _opened(body)
    try:
        end = End(head.layer)
        if end is End.LOST:
            raise ValueError("that cannot be sent")
        return end, Load(*_LOAD.unpack(content))
    except (struct.error, ValueError) as error:
        raise PeerLostError(f"an end came that is malformed: {error}") from error
