"""What goes over a TCP connection, once both ends trust each other.

Every frame begins with 24 bytes, integers in network order:

| offset | field | |
|---|---|---|
| 0 | magic, ``DF`` | |
| 2 | kind (u8), and a zero byte | |
| 4 | request (u32) | the client's number of a fetch, or of a PING |
| 8 | layer (u32) | the first, of DATA; how it ended, of END |
| 12 | block (u32) | number of the first, of DATA |
| 16 | length (u32) | of all that follows |
| 20 | crc32 of bytes 0..19 | |

| kind | from | what follows |
|---|---|---|
| FETCH | client | geometry id (16), timeout in ms (u32), first and end layer (u16), keys (32);
  the highest bit of the first layer: only what is in memory |
| CANCEL | client | |
| PING | client | |
| DATA | server | blocks and layers (u32 each), xxh3-64 of each Layer Block |
| MISSING | server | block numbers (u32 each) |
| END, LOAD | server | bytes and tokens that are to be read from storage (u64 each) |

Then comes the frame's seal, over all before it: a crc32, or a MAC where there is a secret
(:mod:`.seal`). In a DATA frame the payload comes last: block by block, and in each layer by layer.

All is bounded before it is read. A frame that does not check ends the connection: after it nobody
knows where the next one begins. Payload is checked by Layer Block, so that a flipped bit in it
costs one block. That a piece is of the block that it says is the word of the peer.
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
from dualpath_sglang.transport.seal import CRC_BYTES, MAC_BYTES

MAGIC = b"DF"
HEAD = struct.Struct("!2sBxIIIII")
HEAD_BYTES = HEAD.size
MAX_DATA_BYTES = 64 << 20
"""Payload of one DATA frame; a Layer Block may be as large."""
DATA_HEAD = struct.Struct("!II")
MAX_LAYER_BLOCKS = 1 << 16
"""Of one DATA frame."""
_FETCH = struct.Struct("!16sIHH")
_LOAD = struct.Struct("!QQ")
_CACHED_ONLY = 0x8000
"""Beside the first layer: there are fewer layers than that."""


class Kind(enum.IntEnum):
    """What a frame is."""

    FETCH = 1
    CANCEL = 2
    DATA = 3
    MISSING = 4
    END = 5
    PING = 6
    LOAD = 7


_KINDS = {kind.value: kind for kind in Kind}
_LONGEST = {
    Kind.FETCH: _FETCH.size + 32 * MAX_BLOCKS + MAC_BYTES,
    Kind.CANCEL: MAC_BYTES,
    Kind.DATA: DATA_HEAD.size + 8 * MAX_LAYER_BLOCKS + MAC_BYTES + MAX_DATA_BYTES,
    Kind.MISSING: 4 * MAX_BLOCKS + MAC_BYTES,
    Kind.END: _LOAD.size + MAC_BYTES,
    Kind.PING: MAC_BYTES,
    Kind.LOAD: _LOAD.size + MAC_BYTES,
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
        known = _KINDS.get(kind)
        if known is None or length > _LONGEST[known]:
            raise PeerLostError("a frame came that is not of this protocol")
        return cls(known, request, layer, block, length)


def fetch_body(request: FetchRequest) -> bytes:
    """What a FETCH says."""
    timeout_ms = max(1, min(round(1000 * request.timeout_s), 0xFFFFFFFF))
    first = request.first_layer | (_CACHED_ONLY if request.cached_only else 0)
    fixed = _FETCH.pack(request.geometry_id, timeout_ms, first, request.end_layer)
    return fixed + b"".join(request.keys)


def parse_fetch(content: bytes) -> FetchRequest:
    """The request of a FETCH.

    Raises:
        PeerLostError: it is malformed.
    """
    try:
        geometry_id, timeout_ms, first, end = _FETCH.unpack_from(content)
        packed = content[_FETCH.size :]
        keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        cached_only, first = bool(first & _CACHED_ONLY), first & ~_CACHED_ONLY
        return FetchRequest(geometry_id, keys, first, end, timeout_ms / 1000, cached_only)
    except (struct.error, ValueError) as error:
        raise PeerLostError(f"a request came that cannot be one: {error}") from error


def data_front(span: Span, checksums: Sequence[int]) -> bytes:
    """What a DATA frame says of its payload."""
    packed = struct.pack(f"!{len(checksums)}Q", *checksums)
    return DATA_HEAD.pack(span.count, span.layers) + packed


def data_span(
    head: Head, fixed: bytes | memoryview, layer_bytes: int, seal_bytes: int = CRC_BYTES
) -> Span:
    """What is in a DATA frame, from the first bytes after its head.

    Raises:
        PeerLostError: its length says otherwise.
    """
    count, layers = DATA_HEAD.unpack(fixed)
    blocks = count * layers
    length = DATA_HEAD.size + blocks * (8 + layer_bytes) + seal_bytes
    if not 1 <= blocks <= MAX_LAYER_BLOCKS or head.length != length:
        raise PeerLostError("a piece came that is not as long as it says")
    return Span(head.layer, head.layer + layers, head.block, count)


def parse_checksums(packed: bytes | memoryview) -> tuple[int, ...]:
    """The checksums of a DATA frame; whole ones."""
    return struct.unpack(f"!{len(packed) // 8}Q", packed)


def missing_body(blocks: Sequence[int]) -> bytes:
    """What a MISSING says."""
    return struct.pack(f"!{len(blocks)}I", *blocks)


def parse_missing(content: bytes, blocks: int) -> tuple[int, ...]:
    """Block numbers of a MISSING, all below ``blocks``.

    Raises:
        PeerLostError: it is malformed.
    """
    if len(content) % 4:
        raise PeerLostError("a list of blocks came that is cut short")
    numbers = struct.unpack(f"!{len(content) // 4}I", content)
    if any(number >= blocks for number in numbers):
        raise PeerLostError("a block was said to be missing that nobody asked for")
    return numbers


def load_body(load: Load) -> bytes:
    """What an END or a LOAD says."""
    return _LOAD.pack(load.bytes, load.tokens)


def parse_load(content: bytes) -> Load:
    """The peer's read queue.

    Raises:
        PeerLostError: it is malformed.
    """
    if len(content) != _LOAD.size:
        raise PeerLostError("a read queue came that is malformed")
    return Load(*_LOAD.unpack(content))


def parse_end(head: Head) -> End:
    """How a fetch ended.

    Raises:
        PeerLostError: in no way that can be sent.
    """
    try:
        end = End(head.layer)
    except ValueError:
        end = End.LOST
    if end is End.LOST:
        raise PeerLostError("an end came that is none")
    return end
