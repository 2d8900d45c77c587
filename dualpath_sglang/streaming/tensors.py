"""Landing in tensors: the paged pools of an engine, on a CUDA device or in host memory.

A piece of staging memory goes to the device as one bulk copy, headers and padding included, and
is scattered there with one kernel for each tensor of each layer: launches go by layers, never by
pages. All of it runs on one side stream, with an event a layer, so a forward waits for the layer
it is about to read and no more. On a CPU the same code runs without the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from dualpath_sglang.streaming.landing import Landed, Staged
from dualpath_storage.geometry import PAGE_BYTES, align_up

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def pinned_memory(size_bytes: int) -> memoryview:
    """Page-aligned host memory that a CUDA device copies from at full speed.

    Raises:
        RuntimeError: there is no device to pin it for, or not that much memory.
    """
    whole = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    begin = align_up(whole.data_ptr(), PAGE_BYTES) - whole.data_ptr()
    return memoryview(whole[begin : begin + size_bytes].numpy())


class DeviceFence:
    """An event on a stream; see :class:`~dualpath_sglang.streaming.landing.Fence`."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: Any, stream: Any) -> None:
        self._device = device
        self._event = device.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait(self._device.current_stream())

    def finished(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class DeviceCopier:
    """The side stream of a device, and the memory there that bulk copies go to.

    One buffer is enough: the stream copies and scatters a piece before it copies the next.

    Args:
        piece_bytes: memory kept for copies; a larger piece makes it grow.
    """

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self.stream = self._module.Stream() if device.type == "cpu" else self._module.Stream(device)
        with self.on_stream():
            self._buffer = torch.empty(piece_bytes, dtype=torch.uint8, device=device)

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Everything inside goes to the side stream."""
        manager: contextlib.AbstractContextManager[Any] = self._module.stream(self.stream)
        return manager

    def wait_for(self, event: Any) -> None:
        """The side stream goes on after ``event``."""
        if self.device.type != "cpu":
            self.stream.wait_event(event)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Start one bulk copy; the bytes on the device, until the next call."""
        if source.numel() > self._buffer.numel():
            self._buffer = torch.empty(source.numel(), dtype=torch.uint8, device=self.device)
        copied = self._buffer[: source.numel()]
        copied.copy_(source, non_blocking=True)
        return copied

    def fence(self) -> DeviceFence:
        """What the side stream has been told up to now."""
        return DeviceFence(self._module, self.stream)


class TensorLanding:
    """The pages of one pool, see :class:`~dualpath_sglang.streaming.landing.Landing`.

    Args:
        layers: the tensors of each layer in the canonical order of a Layer Block, for example
            ``[k, v]`` (MHA) or ``[kv]`` (MLA). The first dimension counts rows, and a row is
            contiguous. A page is ``page_rows`` rows of every tensor.
        page_rows: rows a page: the page's tokens, or 1 where a row is a page.
        copier: the device's; only host tensors need none.

    Raises:
        ValueError: the tensors are not such.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        *,
        page_rows: int,
        copier: DeviceCopier | None = None,
    ) -> None:
        if not layers or not all(layers):
            raise ValueError("every layer needs at least one tensor")
        tensors = [tensor for layer in layers for tensor in layer]
        self.device = tensors[0].device
        if any(tensor.device != self.device for tensor in tensors):
            raise ValueError("the tensors of a pool lie on more than one device")
        if self.device.type != "cpu" and copier is None:
            raise ValueError("tensors of a device need its copier")
        self._copier = copier
        self._word = _common_word(tensors, page_rows)
        self._layers = [[_by_page(t, page_rows, self._word) for t in layer] for layer in layers]
        self.pages = min(t.shape[0] for layer in self._layers for t in layer)
        self.layer_bytes = tuple(
            sum(t.shape[1] for t in layer) * self._word.itemsize for layer in self._layers
        )

    def target(self, pages: Sequence[int], after: object | None = None) -> TensorTarget:
        """See :class:`~dualpath_sglang.streaming.landing.Landing`."""
        if pages and not 0 <= min(pages) <= max(pages) < self.pages:
            raise ValueError(f"the pool has {self.pages} pages, not {min(pages)}..{max(pages)}")
        index = torch.tensor(list(pages), dtype=torch.int64)
        if self._copier is None:
            return TensorTarget(self._layers, self._word, index, None)
        with self._copier.on_stream():
            if self.device.type == "cuda":
                index = index.pin_memory()  # or the host would wait for the stream
            index = index.to(self.device, non_blocking=True)
            if after is not None:
                self._copier.wait_for(after)
        return TensorTarget(self._layers, self._word, index, self._copier)


class TensorTarget:
    """See :class:`~dualpath_sglang.streaming.landing.Target`."""

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        word: torch.dtype,
        index: torch.Tensor,
        copier: DeviceCopier | None,
    ) -> None:
        self._layers = layers
        self._word = word
        self._index = index
        self._copier = copier

    def land(self, staged: Staged) -> Landed:
        size = staged.count * staged.shape.stride
        source = torch.frombuffer(staged.memory, dtype=torch.uint8, count=size)
        if self._copier is None:
            for layer in range(staged.shape.first, staged.shape.end):
                self._scatter(source, staged, layer)
            return Landed()
        with self._copier.on_stream():
            bulk = self._copier.copy(source)
            copied = self._copier.fence()
            fences = []
            for layer in range(staged.shape.first, staged.shape.end):
                self._scatter(bulk, staged, layer)
                fences.append(self._copier.fence())
        return Landed(copied, fences)

    def _scatter(self, bulk: torch.Tensor, staged: Staged, layer: int) -> None:
        """One layer of every block of the piece: one kernel for each tensor."""
        shape, word = staged.shape, self._word
        words = bulk.view(word).view(staged.count, shape.stride // word.itemsize)
        size = shape.geometry.layer_bytes
        begin = (shape.lead + (layer - shape.first) * size) // word.itemsize
        rows = self._index[staged.begin : staged.begin + staged.count]
        for pages in self._layers[layer]:
            pages.index_copy_(0, rows, words[:, begin : begin + pages.shape[1]])
            begin += pages.shape[1]


def _common_word(tensors: Sequence[torch.Tensor], page_rows: int) -> torch.dtype:
    """The widest integer in which every page of every tensor can be counted and addressed."""
    for word in _WORDS:
        size = word.itemsize
        if all(
            _row_bytes(t) * page_rows % size == 0
            and _stride_bytes(t) * page_rows % size == 0
            and t.storage_offset() * t.element_size() % size == 0
            for t in tensors
        ):
            return word
    raise AssertionError("a byte always fits")


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor[0].numel() * tensor.element_size())


def _stride_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.stride(0) * tensor.element_size())


def _by_page(tensor: torch.Tensor, page_rows: int, word: torch.dtype) -> torch.Tensor:
    """The same memory as [page, word]."""
    if tensor.dim() < 1 or tensor.shape[0] < page_rows or not tensor[0].is_contiguous():
        raise ValueError("a tensor of the pool has no contiguous rows")
    if page_rows > 1 and _stride_bytes(tensor) != _row_bytes(tensor):
        raise ValueError("the rows of a page do not lie side by side")
    view = torch.empty(0, dtype=word, device=tensor.device)
    view.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.element_size() // word.itemsize,
        (tensor.shape[0] // page_rows, _row_bytes(tensor) * page_rows // word.itemsize),
        (_stride_bytes(tensor) * page_rows // word.itemsize, 1),
    )
    return view
