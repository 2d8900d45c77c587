"""The pages that are exchanged: a real SGLang host pool, filled and checked byte by byte."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = np.uint64
_POISON = 0xA5
_TURN = 0x9E3779B97F4A7C15  # odd: different turns differ in every word


@dataclass(frozen=True, slots=True)
class Case:
    """Shape of the pages of one case.

    Args:
        name: as it stands in the rows.
        pages: pages of one turn.
        page_tokens, layers, heads, head_dim: of the model; two bytes an element.
    """

    name: str
    pages: int
    page_tokens: int
    layers: int
    heads: int
    head_dim: int

    @property
    def page_bytes(self) -> int:
        """K and V of one page, all layers."""
        return 2 * 2 * self.page_tokens * self.layers * self.heads * self.head_dim

    @property
    def total_bytes(self) -> int:
        """Payload of one turn."""
        return self.pages * self.page_bytes


def prepare_sglang() -> None:
    """Make SGLang importable in this process. Call it before the first import of SGLang."""
    import torch

    torch.set_num_threads(1)  # as SGLang does in the process that moves the pages
    if torch.cuda.is_available():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang_cpu import boot  # type: ignore[import-untyped]  # of the test environment

    boot.install()


class PagePool:
    """``MHATokenToKVPoolHost`` on the CPU in the layout ``page_first_direct``.

    In turn ``n`` the pool holds a random base to which a number that belongs to ``n`` was added,
    so no byte of another turn, of poison or of nothing at all passes for a right one.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.host = _host_pool(case)
        raw = self.host.kv_buffer.view(_torch().uint8).numpy()
        # [K or V, page, words of its layers]
        self.words: npt.NDArray[np.uint64] = raw.reshape(2, case.pages, -1).view(_WORD)
        self._base = np.random.default_rng(1).integers(0, 2**64, size=self.words.shape, dtype=_WORD)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All bytes of the pool, flat."""
        flat: npt.NDArray[np.uint8] = self.words.reshape(-1).view(np.uint8)
        return flat

    @property
    def base(self) -> npt.NDArray[np.uint8]:
        """As many bytes that are not the pool's."""
        flat: npt.NDArray[np.uint8] = self._base.reshape(-1).view(np.uint8)
        return flat

    def fill(self, turn: int) -> None:
        """Put the content of a turn into every page."""
        np.add(self._base, _offset(turn), out=self.words)

    def poison(self) -> None:
        """Overwrite every page."""
        self.memory.fill(_POISON)

    def wrong(self, turn: int) -> list[int]:
        """Pages in which not every byte is that of the turn."""
        bad: list[int] = []
        step = max(1, (16 << 20) // self.case.page_bytes)
        for first in range(0, self.case.pages, step):
            part = slice(first, first + step)
            expected = self._base[:, part] + _offset(turn)
            equal = (self.words[:, part] == expected).all(axis=(0, 2))
            bad += [first + int(i) for i in np.flatnonzero(~equal)]
        return bad

    def flip(self, page: int) -> None:
        """Change one bit in the middle of a page."""
        self.words[1, page, self.words.shape[2] // 2] ^= _WORD(1)

    def indices(self, pages: npt.NDArray[np.int64]) -> Any:
        """SGLang's host indices (tokens) of some pages, as a tensor."""
        tokens = pages[:, None] * self.case.page_tokens + np.arange(self.case.page_tokens)
        return _torch().from_numpy(tokens.reshape(-1).astype(np.int64))


def _offset(turn: int) -> np.uint64:
    return _WORD(turn * _TURN % 2**64)


def _torch() -> Any:
    import torch

    return torch


def _host_pool(case: Case) -> Any:
    """SGLang's host pool over a device pool that is only described."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    dtype = torch.bfloat16
    shape = (case.page_tokens, case.heads, case.head_dim)
    k, v = ([torch.zeros(shape, dtype=dtype) for _ in range(case.layers)] for _ in range(2))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(k),
            v=tuple(v),
            k_data_ptrs=torch.tensor([t.data_ptr() for t in k]),
            v_data_ptrs=torch.tensor([t.data_ptr() for t in v]),
            layout=KVBufferLayout.NHD,
        ),
        page_size=case.page_tokens,
        head_num=case.heads,
        head_dim=case.head_dim,
        v_head_dim=case.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=case.page_tokens,
        layout="page_first_direct",
        pin_memory=False,
        device_capacity_tokens=case.page_tokens,
        start_layer=0,
        end_layer=case.layers,
        host_token_capacity=case.pages * case.page_tokens,
    )
