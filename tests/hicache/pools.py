"""Real host pools of SGLang in this process, and what a page of them holds, said by SGLang.

A pool is filled through SGLang's own per-layer views, so that the order of the bytes in a Full
Block is checked against SGLang and not against a second copy of our arithmetic.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

LAYERS, HEADS, DIM, PAGE_TOKENS, PAGES = 3, 2, 16, 4, 9
V_DIM = 24
LATENT, ROPE = 24, 8


def mha_pool(
    layout: str,
    *,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = PAGE_TOKENS,
    v_dim: int = DIM,
    pages: int = PAGES,
    cls: type | None = None,
) -> Any:
    """An empty MHA host pool of exactly ``pages`` pages."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    device = MHATokenToKVPool(
        size=4 * page_tokens,
        page_size=page_tokens,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=v_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return (cls or get_mha_host_pool_cls(info))(
        info, 2.0, 0, page_tokens, layout, False, device_capacity_tokens=device.size,
        start_layer=0, end_layer=layers, host_token_capacity=pages * page_tokens,
    )  # fmt: skip


def mla_pool(
    layout: str,
    *,
    layers: int = LAYERS,
    page_tokens: int = PAGE_TOKENS,
    dcp: tuple[int, int] = (0, 1),
) -> Any:
    """An empty MLA host pool; with ``dcp`` (rank, size) it holds that part of each page."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=4 * page_tokens, page_size=page_tokens, dtype=torch.float32, kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE, layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, page_tokens, layout, False,
        dcp_size=dcp[1], dcp_rank=dcp[0], device_capacity_tokens=device.size, start_layer=0,
        end_layer=layers, target_layer_num=layers,
        host_token_capacity=PAGES * page_tokens // dcp[1],
    )  # fmt: skip


def layer_views(pool: Any) -> list[list[torch.Tensor]]:
    """Per layer, SGLang's views of K and V (or of the latent).

    Each is ``[token slot, ...]``, or ``[page, token, ...]`` in the layouts that keep pages apart.
    """
    if hasattr(pool, "kv_cache_dim"):
        if pool.layout == "page_first_direct":
            return [[pool.kv_buffer[:, i]] for i in range(pool.layer_num)]
        return [[ref] for ref in pool.data_refs]
    if pool.layout == "page_head":
        parts = [pool.k_buffer, pool.v_buffer]  # [page, head, token, layer, dim]
        return [[p[:, :, :, i].transpose(1, 2) for p in parts] for i in range(pool.layer_num)]
    return [[pool.k_data_refs[i], pool.v_data_refs[i]] for i in range(pool.layer_num)]


def page_rows(pool: Any, view: torch.Tensor, page: int) -> torch.Tensor:
    """The tokens of one page in a view of :func:`layer_views`."""
    if pool.layout in ("page_first_direct", "page_head"):
        return view[page]
    return view[page * pool.page_size : (page + 1) * pool.page_size]


def block_bytes(pool: Any, page: int) -> bytes:
    """The Full Block of a page: layer by layer, K before V, tokens in order."""
    return b"".join(
        page_rows(pool, view, page).contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for views in layer_views(pool)
        for view in views
    )


def fill(pool: Any, seed: int) -> None:
    """Random numbers everywhere."""
    source = np.random.default_rng(seed)
    for views in layer_views(pool):
        for view in views:
            view.copy_(torch.from_numpy(source.standard_normal(tuple(view.shape), "f4")))


def host_indices(pages: list[int], step: int = PAGE_TOKENS) -> torch.Tensor:
    """Host indices of whole pages, as SGLang's controller hands them over."""
    starts = torch.tensor(pages, dtype=torch.int64) * step
    return (starts[:, None] + torch.arange(step)).flatten()


def keys(count: int, seed: int = 0) -> list[str]:
    """Page hashes as SGLang makes them."""
    return [hashlib.sha256(f"{seed}/{i}".encode()).hexdigest() for i in range(count)]
