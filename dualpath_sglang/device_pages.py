"""Pages of a device pool, gathered into host memory block by block.

On a device: one gather for each tensor into a bounce buffer there, then one bulk copy, all on a
stream of its own. Launches go by layers, never by pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


class TensorPages:
    """Reads pages of one pool; for one thread at a time.

    Args:
        blocks: per Layer Block its tensors in canonical order, rows first and contiguous.
        page_rows: rows of each tensor that a page takes.

    Raises:
        ValueError: a tensor has no contiguous rows.
    """

    def __init__(self, blocks: Sequence[Sequence[torch.Tensor]], page_rows: int) -> None:
        self._views = [_by_page(t, page_rows) for tensors in blocks for t in tensors]
        self.block_bytes = sum(view.shape[1] for view in self._views)
        self._device = self._views[0].device
        self._stream = None
        if self._device.type != "cpu":
            self._stream = torch.get_device_module(self._device).Stream(self._device)

    def gather(self, pages: Sequence[int], memory: memoryview, stride: int) -> None:
        """Copy whole pages to host memory, page ``i`` to ``i * stride``; done on return."""
        count = len(pages)
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=count * stride)
        target = whole.view(count, stride)[:, : self.block_bytes]
        index = torch.tensor(list(pages), dtype=torch.int64)
        if self._stream is None:
            self._collect(index, target)
            return
        with self._on_stream():
            bounce = torch.empty(
                (count, stride), dtype=torch.uint8, device=self._device
            )  # padded, so that one copy of contiguous memory does
            self._collect(index.to(self._device), bounce[:, : self.block_bytes])
            whole.view(count, stride).copy_(bounce, non_blocking=True)
        self._stream.synchronize()

    def _collect(self, index: torch.Tensor, target: torch.Tensor) -> None:
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            target[:, begin:end] = view.index_select(0, index)
            begin = end

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        manager: contextlib.AbstractContextManager[object] = torch.get_device_module(
            self._device
        ).stream(self._stream)
        return manager


def _by_page(tensor: torch.Tensor, page_rows: int) -> torch.Tensor:
    """The same memory as ``[page, bytes]``, free of any inference mode it was made in."""
    row_bytes = tensor[0].numel() * tensor.element_size()
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if not tensor[0].is_contiguous() or (page_rows > 1 and row_bytes != stride_bytes):
        raise ValueError("its rows are not contiguous.")
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        view.set_(
            tensor.untyped_storage(),
            tensor.storage_offset() * tensor.element_size(),
            (tensor.shape[0] // page_rows, row_bytes * page_rows),
            (stride_bytes * page_rows, 1),
        )
    return view
