"""The header page of a slot.

| offset | field | written by | checked by |
|---|---|---|---|
| 0 | magic ``DPBLOCK1`` | writer | every reader |
| 8 | format version, layers (u32 each) | writer | every reader |
| 16 | geometry id (16 bytes) | writer | every reader |
| 32 | key (32 bytes) | writer | every reader: another page's bytes can never pass |
| 64 | parent's key, zeros when unknown | writer | scan, to rebuild the eviction order |
| 96 | generation (u64) | writer | readers that come through an index entry |
| 104 | payload bytes (u64) | writer | every reader |
| 128 | xxh3-64 of each Layer Block (u64 each) | writer | readers, per layer |
| 4088 | xxh3-64 of bytes 0..4087 | writer | every reader, before any other field |

All integers are little-endian. A slot whose header does not check is empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from dualpath_storage.blocks import Pieces
from dualpath_storage.geometry import MAX_LAYERS, PAGE_BYTES, Geometry

MAGIC = b"DPBLOCK1"
VERSION = 1
HEADER_BYTES = PAGE_BYTES
EMPTY_HEADER = bytes(HEADER_BYTES)

_FIXED = struct.Struct("<8sII16s32s32sQQ16x")
_SUM_OFFSET = HEADER_BYTES - 8
_SUM = struct.Struct("<Q")
_BITE_BYTES = 64 << 10

assert _FIXED.size == 128
assert _FIXED.size + 8 * MAX_LAYERS <= _SUM_OFFSET


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header whose own checksum was right."""

    geometry_id: bytes
    key: bytes
    parent: bytes
    generation: int
    payload_bytes: int
    checksums: tuple[int, ...]


def encode_into(
    page: memoryview,
    geometry: Geometry,
    key: bytes,
    parent: bytes,
    generation: int,
    checksums: list[int],
) -> None:
    """Write the header of a block into a 4096-byte page."""
    assert len(page) == HEADER_BYTES and len(checksums) == geometry.layers
    page[:] = EMPTY_HEADER
    _FIXED.pack_into(
        page,
        0,
        MAGIC,
        VERSION,
        geometry.layers,
        geometry.id_bytes,
        key,
        parent,
        generation,
        geometry.block_bytes,
    )
    struct.pack_into(f"<{len(checksums)}Q", page, _FIXED.size, *checksums)
    _SUM.pack_into(page, _SUM_OFFSET, xxhash.xxh3_64_intdigest(page[:_SUM_OFFSET]))


def decode(page: memoryview) -> Header | None:
    """The header in a 4096-byte page, or None when it does not check."""
    if page[:8] != MAGIC:
        return None
    (checksum,) = _SUM.unpack_from(page, _SUM_OFFSET)
    if checksum != xxhash.xxh3_64_intdigest(page[:_SUM_OFFSET]):
        return None
    _, version, layers, geometry_id, key, parent, generation, payload = _FIXED.unpack_from(page)
    if version != VERSION or not 1 <= layers <= MAX_LAYERS:
        return None
    checksums = struct.unpack_from(f"<{layers}Q", page, _FIXED.size)
    return Header(geometry_id, key, parent, generation, payload, checksums)


def layer_checksums(pieces: Pieces, layers: int) -> list[int]:
    """xxh3-64 of each of ``layers`` Layer Blocks, each ``len(pieces) // layers`` pieces long.

    In bites for which xxhash keeps the interpreter: to let go of it for some microseconds can cost
    5 ms, until a busy thread gives it back.
    """
    per_layer = len(pieces) // layers
    if per_layer == 1 and len(pieces[0]) <= _BITE_BYTES:
        return [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
    sums = []
    state = xxhash.xxh3_64()
    update = state.update
    last = per_layer - 1
    for i, piece in enumerate(pieces):
        if len(piece) <= _BITE_BYTES:
            update(piece)
        else:
            for begin in range(0, len(piece), _BITE_BYTES):
                update(piece[begin : begin + _BITE_BYTES])
        if i % per_layer == last:
            sums.append(state.intdigest())
            state.reset()
    return sums
