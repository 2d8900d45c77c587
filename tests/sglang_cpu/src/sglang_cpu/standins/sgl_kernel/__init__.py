"""Stand-in for the CUDA wheel `sglang-kernel`, in torch, with what SGLang's CPU engine calls.

Anything else can be imported (SGLang does so at module level) and raises when called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from . import kvcacheio

__all__ = ["assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu", "kvcacheio"]
__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """`req_to_token[request, start:end] = next (end - start) entries of out_cache_loc`."""
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in spans:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move rows within each buffer: row src_loc[i] to row tgt_loc[i], all read before written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * row_bytes, row_bytes) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * row_bytes, row, row_bytes)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
