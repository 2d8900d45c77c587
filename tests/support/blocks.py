"""Blocks whose bytes follow from their key, and memory to read and write them with."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Sequence

from dualpath_storage import Geometry, Pieces
from dualpath_storage.geometry import align_up

CANARY = 0xA5
"""What memory holds before anything is read into it."""

_KINDS = {
    # K and V of a layer are pieces of their own; pages on page borders.
    "mha": {"layers": 6, "layer_bytes": 8192, "form": "mha k[token,head=2,dim=64] v[...]"},
    # One piece a layer; neither layers nor blocks end on a page border.
    "mla": {"layers": 3, "layer_bytes": 2304, "form": "mla [token,dim=576]"},
    # One Full Block above the sizes at which peers broke.
    "large": {"layers": 61, "layer_bytes": 73728, "form": "mla [token,dim=576]"},
    # More pieces than one vectored I/O takes.
    "scattered": {"layers": 2, "layer_bytes": 1400 * 64, "form": "mha [token,...]"},
}
PIECES_A_LAYER = {"mha": 2, "mla": 1, "large": 1, "scattered": 1400}


def geometry(kind: str = "mha", **changes: object) -> Geometry:
    """A geometry of a kind, with some fields changed."""
    fields: dict[str, object] = {
        "model": f"tiny-{kind}",
        "weights": "0",
        "pool": "kv",
        "dtype": "bfloat16",
        "page_tokens": 16,
    }
    return Geometry(**{**fields, **_KINDS[kind], **changes})  # type: ignore[arg-type]


def pieces_a_layer(of: Geometry) -> int:
    """Pieces that a layer of such a block has in this file's memory."""
    return PIECES_A_LAYER.get(of.model.removeprefix("tiny-"), 1)


def key(*name: object) -> bytes:
    """A key by name."""
    return hashlib.sha256(repr(name).encode()).digest()


def chain(name: object, pages: int) -> list[bytes]:
    """The keys of a chain."""
    return [key(name, page) for page in range(pages)]


def content(of: Geometry, block: bytes) -> bytes:
    """The one right content of a block."""
    return hashlib.shake_128(of.id.encode() + block).digest(of.block_bytes)


def blank(of: Geometry, *, misaligned: int = 0) -> list[memoryview]:
    """Memory of one block, filled with canaries, its pieces in any order.

    Args:
        misaligned: bytes by which every piece misses its alignment.
    """
    count = of.layers * pieces_a_layer(of)
    size = of.block_bytes // count
    room = align_up(size + misaligned)
    area = memoryview(mmap.mmap(-1, count * room))
    area[:] = bytes([CANARY]) * len(area)
    order = list(range(count))
    random.Random(of.id).shuffle(order)
    return [area[i * room + misaligned : i * room + misaligned + size] for i in order]


def filled(of: Geometry, block: bytes, *, misaligned: int = 0) -> list[memoryview]:
    """Memory that holds the right content of a block."""
    pieces = blank(of, misaligned=misaligned)
    fill(pieces, content(of, block))
    return pieces


def fill(pieces: Pieces, data: bytes) -> None:
    """Spread contiguous bytes over pieces."""
    offset = 0
    for piece in pieces:
        piece[:] = data[offset : offset + len(piece)]
        offset += len(piece)
    assert offset == len(data)


def dump(pieces: Sequence[memoryview]) -> bytes:
    """The contiguous bytes in pieces."""
    return b"".join(pieces)


def holds(of: Geometry, block: bytes, pieces: Pieces) -> bool:
    """Whether memory holds the right content of a block."""
    return dump(pieces) == content(of, block)
