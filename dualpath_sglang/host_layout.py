"""Access to the pages of a host pool as Full Blocks: views where possible, staging where not.

A Full Block is ``[layer, component, ...]`` (see `host_pools` for the components of each pool).
Where a (layer, component) of a page is contiguous in the pool, its view is lent as it is;
otherwise pages pass through bounded staging memory. Both give the same bytes, so a store written
under one layout of the host pool is read under another.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dualpath_sglang.page_memory import PageMemory, memory_view
from dualpath_storage.blocks import Pieces
from dualpath_storage.errors import StoreError
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned

STAGING_BYTES = 64 << 20
"""Staging memory of one call; a call on more pages goes through it in turns."""

Bytes: TypeAlias = npt.NDArray[np.uint8]

Component: TypeAlias = "torch.Tensor | list[torch.Tensor]"
"""``[page, layer, ...]`` in canonical order (not in memory), or per layer ``[page, ...]``."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The part of a geometry that the host pool decides; ``form`` names what the bytes are."""

    layers: int
    layer_bytes: int
    dtype: str
    form: str


def _keep(done: Sequence[bool]) -> None:
    """Pages that were read in place are where they belong."""


@dataclass(slots=True)
class Window:
    """Memory of some pages, lent for one write or read.

    Args:
        pieces: per page, in canonical order.
        commit: to be called after reading, with the outcome of each page.
    """

    pieces: list[Pieces]
    commit: Callable[[Sequence[bool]], None] = _keep


class HostLayout(Protocol):
    """The pages of one host pool as Full Blocks. Thread-safe."""

    form: BlockForm
    page_count: int
    window_pages: int
    """Most pages of one window."""

    def window(self, pages: Sequence[int], *, fill: bool) -> AbstractContextManager[Window]:
        """Lend pages: filled with their bytes to be written, or to be read into.

        Raises:
            StoreError: the pool no longer has the form it was described with.
        """
        ...


def layout_of(components: list[Component], dtype: str, form: str) -> HostLayout:
    """Direct access if every (layer, component) of a page is contiguous, staged otherwise."""
    by_layer = [c if isinstance(c, list) else list(c.unbind(1)) for c in components]
    slices = [t for layer in zip(*by_layer, strict=True) for t in layer]
    layers, pages = len(by_layer[0]), int(slices[0].shape[0])
    layer_bytes = sum(c[0][0].numel() * c[0].element_size() for c in by_layer)
    block = BlockForm(layers, layer_bytes, dtype, form)
    if all(t[0].is_contiguous() for t in slices):
        return DirectLayout(block, slices, pages)
    return StagedLayout(block, components, pages)


class DirectLayout:
    """Views of the pool's own memory."""

    window_pages = 1 << 30

    def __init__(self, form: BlockForm, slices: list[torch.Tensor], page_count: int) -> None:
        """
        Args:
            slices: per layer and component ``[page, ...]``, contiguous within a page.
        """
        self.form = form
        self.page_count = page_count
        self._memory = PageMemory(slices, form.layers)

    @contextmanager
    def window(self, pages: Sequence[int], *, fill: bool) -> Iterator[Window]:
        """Views of the pages; nothing is copied."""
        del fill
        yield Window([self._memory.pieces(page) for page in pages])


class StagedLayout:
    """Pages whose layers are interleaved, transposed on their way."""

    def __init__(self, form: BlockForm, components: list[Component], page_count: int) -> None:
        self.form = form
        self.page_count = page_count
        self._views: list[Bytes] = []
        for tensor in components:
            assert isinstance(tensor, torch.Tensor), "layers in buffers of their own are direct"
            self._views.append(tensor.view(torch.uint8).numpy())
        self._staging = Staging(form.layers * form.layer_bytes)
        self.window_pages = self._staging.slots

    @contextmanager
    def window(self, pages: Sequence[int], *, fill: bool) -> Iterator[Window]:
        """Staging slots, copied from the pool before, or to the pool after."""
        with self._staging.lend(len(pages)) as blocks:
            pairs = list(zip(self._views, self._parts(blocks), strict=True))
            if fill:
                for pool, block in pairs:
                    for i, page in enumerate(pages):
                        np.copyto(block[i], pool[page])

            def commit(done: Sequence[bool]) -> None:
                for pool, block in pairs:
                    for i, page in enumerate(pages):
                        if done[i]:
                            np.copyto(pool[page], block[i])

            yield Window(_layers_of(blocks, self.form), commit)

    def _parts(self, blocks: Bytes) -> Iterator[Bytes]:
        """The staged ``[page, block bytes]`` seen as each component's ``[page, layer, ...]``."""
        by_layer = blocks.reshape(len(blocks), self.form.layers, self.form.layer_bytes)
        begin = 0
        for view in self._views:
            end = begin + math.prod(view.shape[2:])
            yield by_layer[:, :, begin:end].reshape(by_layer.shape[:2] + view.shape[2:])
            begin = end


class ExtentLayout:
    """A pool of unknown order that says where the extents of a page are: stored as they are."""

    window_pages = 1 << 30

    def __init__(self, form: BlockForm, pool: Any, step: int, sizes: list[int]) -> None:
        """
        Args:
            step: host indices a page.
            sizes: bytes of each extent of a page.
        """
        self.form = form
        self.page_count = int(pool.size) // step
        self._pool, self._step, self._sizes = pool, step, sizes

    @contextmanager
    def window(self, pages: Sequence[int], *, fill: bool) -> Iterator[Window]:
        """Views of the extents, asked for anew each time: such a pool may move its pages."""
        del fill
        starts = torch.tensor(list(pages), dtype=torch.int64) * self._step
        indices = (starts[:, None] + torch.arange(self._step)).flatten()
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        if list(sizes) != self._sizes * len(pages):
            raise StoreError(f"The extents of {type(self._pool).__name__} changed their sizes.")
        views = [memory_view(p, s) for p, s in zip(pointers, sizes, strict=True)]
        each = len(self._sizes)
        yield Window([views[i : i + each] for i in range(0, len(views), each)])


class FlatLayout:
    """A pool of unknown order that copies whole pages out and in: stored as it gives them."""

    def __init__(self, form: BlockForm, pool: Any, step: int) -> None:
        self.form = form
        self.page_count = int(pool.size) // step
        self._pool, self._step = pool, step
        self._staging = Staging(form.layer_bytes)
        self.window_pages = self._staging.slots

    @contextmanager
    def window(self, pages: Sequence[int], *, fill: bool) -> Iterator[Window]:
        """Staging slots, copied from the pool before, or to the pool after."""
        with self._staging.lend(len(pages)) as blocks:
            if fill:
                for i, page in enumerate(pages):
                    data = flat_view(self._pool.get_data_page(page * self._step))
                    np.copyto(blocks[i], data.numpy())

            def commit(done: Sequence[bool]) -> None:
                like = self._pool.get_dummy_flat_data_page()
                for i, page in enumerate(pages):
                    if done[i]:
                        # Copied: staging memory is lent again, and a pool may keep the tensor.
                        data = torch.from_numpy(blocks[i].copy()).view(like.dtype)
                        self._pool.set_from_flat_data_page(page * self._step, data)

            yield Window(_layers_of(blocks, self.form), commit)


class Staging:
    """Page-aligned memory in slots of one block, one piece of it for every call in progress.

    Args:
        block_bytes: payload of a slot.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._slot_bytes = align_up(block_bytes)
        self.slots = max(1, STAGING_BYTES // self._slot_bytes)
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, count: int) -> Iterator[Bytes]:
        """``[count, block bytes]``, at most ``slots`` of them."""
        assert 0 < count <= self.slots
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            raw = np.frombuffer(aligned(self.slots * self._slot_bytes), dtype=np.uint8)
            memory = raw.reshape(self.slots, self._slot_bytes)
        try:
            yield memory[:count, : self._block_bytes]
        finally:
            with self._lock:
                self._free.append(memory)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in its logical order: its memory if that is the order there."""
    return tensor.flatten().view(torch.uint8)


def _layers_of(blocks: Bytes, form: BlockForm) -> list[Pieces]:
    size = form.layer_bytes
    starts = range(0, form.layers * size, size)
    return [[memoryview(block[i : i + size]) for i in starts] for block in blocks]
