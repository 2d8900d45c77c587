"""Where checked Layer Blocks go: from a piece of staging memory into an engine's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualpath_storage import Geometry, Pieces


class Fence(Protocol):
    """Something a device has been told to do and will have done some time."""

    def wait(self) -> None:
        """What the calling thread tells the device from now on comes after it."""
        ...

    def finished(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it is done."""
        ...


class Shape(Protocol):
    """How layers ``[first, end)`` of blocks lie in memory.

    Block ``i`` begins at ``i * stride``, and its layers ``lead`` bytes later.
    """

    @property
    def geometry(self) -> Geometry: ...
    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def lead(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Layers of blocks with nothing between them. See :class:`Shape`."""

    geometry: Geometry
    first: int
    end: int

    @property
    def stride(self) -> int:
        """Bytes of the layers of one block."""
        return (self.end - self.first) * self.geometry.layer_bytes

    @property
    def lead(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class Staged:
    """Checked layers of some blocks of a request, side by side in staging memory.

    Args:
        memory: of the blocks, see :class:`Shape`.
        begin: number of the first block in the target.
        count: blocks.
        checksums: of all layers of each block, as they stand in its header.
    """

    memory: memoryview
    shape: Shape
    begin: int
    count: int
    checksums: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """What a device was told to do; empty where memory was simply written.

    Args:
        copied: after it, the staging memory may be used again.
        layers: after each, that layer of the shape is in the pages.
    """

    copied: Fence | None = None
    layers: Sequence[Fence] = ()


DONE = Landed()


class Target(Protocol):
    """The pages of one pool of one request."""

    def land(self, staged: Staged) -> Landed:
        """Put layers into the pages, or tell the device to."""
        ...


class Landing(Protocol):
    """The pages of one pool."""

    def target(self, pages: Sequence[int], after: object | None) -> Target:
        """The pages of a request.

        Args:
            pages: page number of each of its blocks.
            after: an event of the device; nothing may be written before it.

        Raises:
            ValueError: there are no such pages.
        """
        ...


class MemoryLanding:
    """Pages in plain memory.

    Args:
        pages: the memory of each, see :data:`dualpath_storage.Pieces`.
    """

    def __init__(self, pages: Sequence[Pieces]) -> None:
        self._pages = pages

    def target(self, pages: Sequence[int], after: object | None = None) -> MemoryTarget:
        """See :class:`Landing`."""
        assert after is None
        if pages and not 0 <= min(pages) <= max(pages) < len(self._pages):
            raise ValueError(f"there are {len(self._pages)} pages, not page {max(pages)}")
        return MemoryTarget([self._pages[page] for page in pages])


class MemoryTarget:
    """See :class:`Target`."""

    def __init__(self, blocks: Sequence[Pieces]) -> None:
        self._blocks = blocks

    def land(self, staged: Staged) -> Landed:
        shape = staged.shape
        for i in range(staged.count):
            pieces = self._blocks[staged.begin + i]
            per_layer = len(pieces) // shape.geometry.layers
            begin = i * shape.stride + shape.lead
            for piece in pieces[shape.first * per_layer : shape.end * per_layer]:
                piece[:] = staged.memory[begin : begin + len(piece)]
                begin += len(piece)
        return DONE
