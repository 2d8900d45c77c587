"""Names and places of Full Blocks: keys, placements, and the memory that holds a block."""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dualpath_storage.geometry import Geometry

KEY_BYTES = 32
MIN_DIRECT_BYTES = 16 << 10
"""A piece is a segment of the device's request, which takes some hundred of them."""
NO_PARENT = bytes(KEY_BYTES)

Pieces: TypeAlias = Sequence[memoryview]
"""One block's memory: byte views in canonical order, the same number of pieces for every
layer, the pieces of a layer adding up to ``layer_bytes``. Writable when it is read into."""


class CopyingPieces(Sequence[memoryview]):
    """Pieces that may know a quicker way than to be copied one by one."""

    @property
    def suit_direct_io(self) -> bool:
        """Whether a device can take them as they are, at least as quickly as copies of them.

        So it is when each is aligned to a page, at least :data:`MIN_DIRECT_BYTES` long, and in
        one piece of physical memory.
        """
        return False

    def copy_to(self, others: Sequence[Pieces], area: memoryview, stride: int) -> bool:
        """Put the pieces of some blocks, this one among them, end to end into ``area``.

        Args:
            stride: where block ``i`` begins in ``area``, divided by ``i``.

        Returns:
            False when nothing was copied, since there is no quicker way for all of them.
        """
        del others, area, stride
        return False

    def copy_from(self, others: Sequence[Pieces], area: memoryview, stride: int) -> bool:
        """Inverse of :meth:`copy_to`."""
        del others, area, stride
        return False


def gather(blocks: Sequence[Pieces], area: memoryview, stride: int) -> None:
    """Put the pieces of block ``i`` end to end into ``area`` from ``i * stride`` on."""
    first = blocks[0] if blocks else None
    if isinstance(first, CopyingPieces) and first.copy_to(blocks, area, stride):
        return
    for piece, place in _pairs(blocks, area, stride):
        place[:] = piece


def scatter(blocks: Sequence[Pieces], area: memoryview, stride: int) -> None:
    """Inverse of :func:`gather`."""
    first = blocks[0] if blocks else None
    if isinstance(first, CopyingPieces) and first.copy_from(blocks, area, stride):
        return
    for piece, place in _pairs(blocks, area, stride):
        piece[:] = place


def _pairs(
    blocks: Sequence[Pieces], area: memoryview, stride: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """Each piece, and its place in ``area``."""
    for i, pieces in enumerate(blocks):
        offset = i * stride
        for piece in pieces:
            yield piece, area[offset : offset + len(piece)]
            offset += len(piece)


def key_bytes(key: str) -> bytes:
    """A page's name as 32 bytes: 64 hex digits as they are, any other text by its SHA-256."""
    if len(key) == 2 * KEY_BYTES:
        with contextlib.suppress(ValueError):
            raw = bytes.fromhex(key)
            if len(raw) == KEY_BYTES:  # fromhex() skips white space
                return raw
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def pieces_of(buffer: memoryview, geometry: Geometry) -> list[memoryview]:
    """Cut one contiguous block into its layers.

    Args:
        buffer: at least ``geometry.block_bytes`` bytes, format ``B``.
    """
    size = geometry.layer_bytes
    return [buffer[i : i + size] for i in range(0, geometry.block_bytes, size)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a block lies: a slot of a segment, and the generation that was written there."""

    segment: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One block to read: what it must be, where it should lie, where its bytes go."""

    key: bytes
    placement: Placement
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One block to write: a taken slot, the block's names, and its bytes."""

    key: bytes
    parent: bytes
    placement: Placement
    pieces: Pieces


class WriteStatus(enum.Enum):
    """Outcome of writing one block into its slot."""

    OK = "ok"
    TIMEOUT = "timeout"
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    IO_ERROR = "io_error"
    """The device failed at this place: it is not to be used again."""
    UNAVAILABLE = "unavailable"
    """The system refuses for now."""


class ReadStatus(enum.Enum):
    """Outcome of reading one block; everything but OK is a miss, the value is its reason."""

    OK = "ok"
    ABSENT = "absent"
    CHECKSUM = "checksum"
    HEADER = "header"
    GENERATION = "generation"
    SHORT = "short"
    MISSING = "missing"
    IO_ERROR = "io_error"
    """The device failed at this place."""
    UNAVAILABLE = "unavailable"
    """The system refuses for now, which says nothing about the block."""
    TIMEOUT = "timeout"

    @property
    def damaged(self) -> bool:
        """The bytes in the slot are not the block's: its index entry should go."""
        return self in (
            ReadStatus.CHECKSUM,
            ReadStatus.HEADER,
            ReadStatus.GENERATION,
            ReadStatus.SHORT,
            ReadStatus.MISSING,
            ReadStatus.IO_ERROR,
        )
