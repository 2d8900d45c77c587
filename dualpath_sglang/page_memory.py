"""The pages of a pool's own memory, cut into the pieces of Full Blocks only when asked for.

A batch of small pages has thousands of pieces. Alive at the same time they would set off Python's
garbage collector, which takes a tenth of a second in a process as large as SGLang's. What is copied
goes many pages at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from dualpath_storage.blocks import MIN_DIRECT_BYTES, CopyingPieces, Pieces
from dualpath_storage.geometry import PAGE_BYTES
from dualpath_storage.memory import lies_in_huge_pages


class _Extent(NamedTuple):
    """A piece of page 0, and the distance to that of page 1."""

    view: memoryview
    begin: int
    end: int
    stride: int


class _Component(NamedTuple):
    """One component of all pages: ``[page, layer]``, at ``begin`` in each Layer Block.

    An element is all bytes of a layer's piece: few elements are copied without letting go of the
    interpreter, which a busy thread of SGLang's gives back only after 5 ms.
    """

    array: npt.NDArray[np.void]
    begin: int


class PageMemory:
    """Pages in the memory of a pool.

    Args:
        slices: by layer and then component ``[page, ...]``, contiguous within a page.
        layers: how many layers they are.
    """

    def __init__(self, slices: Sequence[torch.Tensor], layers: int) -> None:
        self.layers = layers
        self.extents: list[_Extent] = []
        self._tensors = slices  # keeps the memory alive while it is lent
        views: dict[int, memoryview] = {}
        for t in slices:
            storage = t.untyped_storage()
            base = storage.data_ptr()
            if base not in views:
                views[base] = memory_view(base, storage.nbytes())
            begin = t.data_ptr() - base
            end = begin + t[0].numel() * t.element_size()
            stride = t.stride(0) * t.element_size()
            self.extents.append(_Extent(views[base], begin, end, stride))
        self.layer_bytes = sum(e.end - e.begin for e in self.extents) // layers
        self.components = self._components(int(slices[0].shape[0]))
        self.suits_direct_io = all(map(_suits_direct_io, self.extents)) and all(
            lies_in_huge_pages(base, len(view)) for base, view in views.items()
        )

    def pieces(self, page: int) -> PagePieces:
        """The pieces of a page."""
        return PagePieces(self, page)

    def _components(self, pages: int) -> list[_Component] | None:
        """Arrays over all pages; None when the layers of a component are not evenly spaced."""
        per_layer = len(self.extents) // self.layers
        components: list[_Component] = []
        begin = 0
        for i in range(per_layer):
            extents = self.extents[i::per_layer]
            first = extents[0]
            size = first.end - first.begin
            steps = {b.begin - a.begin for a, b in pairwise(extents)}
            alike = {(id(e.view), e.stride, e.end - e.begin) for e in extents}
            if len(steps) > 1 or len(alike) > 1:
                return None
            array = np.ndarray(
                (pages, self.layers),
                f"V{size}",
                buffer=first.view,
                offset=first.begin,
                strides=(first.stride, max(steps, default=size)),
            )
            components.append(_Component(array, begin))
            begin += size
        return components


class PagePieces(CopyingPieces):
    """The pieces of one page."""

    __slots__ = ("_extents", "_memory", "_page")

    def __init__(self, memory: PageMemory, page: int) -> None:
        self._memory = memory
        self._extents = memory.extents
        self._page = page

    @property
    def suit_direct_io(self) -> bool:
        return self._memory.suits_direct_io

    def __len__(self) -> int:
        return len(self._extents)

    def __iter__(self) -> Iterator[memoryview]:
        page = self._page
        return iter([v[b + page * s : e + page * s] for v, b, e, s in self._extents])

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            page = self._page
            return [v[b + page * s : e + page * s] for v, b, e, s in self._extents[index]]
        view, begin, end, stride = self._extents[index]
        return view[begin + self._page * stride : end + self._page * stride]

    def copy_to(self, others: Sequence[Pieces], area: memoryview, stride: int) -> bool:
        pages = self._pages_of(others)
        for page, block in self._pairs(pages or (), area, stride):
            block[:] = page
        return pages is not None

    def copy_from(self, others: Sequence[Pieces], area: memoryview, stride: int) -> bool:
        pages = self._pages_of(others)
        for page, block in self._pairs(pages or (), area, stride):
            page[:] = block
        return pages is not None

    def _pages_of(self, others: Sequence[Pieces]) -> list[int] | None:
        """The pages of some blocks; None when they are not all of this memory."""
        memory = self._memory
        if memory.components is None:
            return None
        pages = [o._page for o in others if isinstance(o, PagePieces) and o._memory is memory]
        return pages if len(pages) == len(others) else None

    def _pairs(
        self, pages: Sequence[int], area: memoryview, stride: int
    ) -> Iterator[tuple[npt.NDArray[np.void], npt.NDArray[np.void]]]:
        """The layers of each component of each page, and of the block in ``area``."""
        layers, size = self._memory.layers, self._memory.layer_bytes
        for array, begin in self._memory.components or ():
            shape, strides = (len(pages), layers), (stride, size)
            blocks = np.ndarray(shape, array.dtype, area, offset=begin, strides=strides)
            yield from zip((array[page] for page in pages), blocks, strict=True)


def _suits_direct_io(extent: _Extent) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(extent.view)) + extent.begin
    size = extent.end - extent.begin
    return size >= MIN_DIRECT_BYTES and not (address | extent.stride | size) % PAGE_BYTES


def memory_view(address: int, size: int) -> memoryview:
    """Writable bytes at an address. The caller keeps their owner alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
