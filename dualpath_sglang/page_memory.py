"""The pages of a pool's own memory, cut into the pieces of Full Blocks only when asked for.

A batch of small pages has thousands of pieces. Alive at the same time they would set off Python's
garbage collector, which takes a tenth of a second in a process as large as SGLang's; and small
pieces are copied, which is quicker for a page as a whole than piece by piece.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from dualpath_storage.blocks import MIN_DIRECT_BYTES, CopyingPieces
from dualpath_storage.geometry import PAGE_BYTES
from dualpath_storage.memory import lies_in_huge_pages


class _Extent(NamedTuple):
    """A piece of page 0, and the distance to that of page 1."""

    view: memoryview
    begin: int
    end: int
    stride: int


class _Component(NamedTuple):
    """One component of all pages: ``[page, layer, bytes]``, bytes ``begin..end`` of each layer."""

    array: npt.NDArray[np.uint8]
    begin: int
    end: int


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
                (pages, self.layers, size),
                np.uint8,
                buffer=first.view,
                offset=first.begin,
                strides=(first.stride, max(steps, default=size), 1),
            )
            components.append(_Component(array, begin, begin + size))
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

    def copy_to(self, block: memoryview) -> None:
        if self._memory.components is None:
            super().copy_to(block)
            return
        layers = self._layers_of(block)
        for array, begin, end in self._memory.components:
            layers[:, begin:end] = array[self._page]

    def copy_from(self, block: memoryview) -> None:
        if self._memory.components is None:
            super().copy_from(block)
            return
        layers = self._layers_of(block)
        for array, begin, end in self._memory.components:
            array[self._page] = layers[:, begin:end]

    def _layers_of(self, block: memoryview) -> npt.NDArray[np.uint8]:
        memory = self._memory
        shape = (memory.layers, memory.layer_bytes)
        return np.ndarray(shape, np.uint8, buffer=block)


def _suits_direct_io(extent: _Extent) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(extent.view)) + extent.begin
    size = extent.end - extent.begin
    return size >= MIN_DIRECT_BYTES and not (address | extent.stride | size) % PAGE_BYTES


def memory_view(address: int, size: int) -> memoryview:
    """Writable bytes at an address. The caller keeps their owner alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
