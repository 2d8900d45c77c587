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


def mha_device(pages: int = 4, **shape: Any) -> Any:
    """A device pool of an MHA model, on the CPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    shape = {"dtype": torch.float32, "layer_num": LAYERS, "page_size": PAGE_TOKENS} | shape
    return MHATokenToKVPool(
        size=pages * shape["page_size"], head_num=HEADS, head_dim=DIM, device="cpu",
        enable_memory_saver=False, **shape,
    )  # fmt: skip


def mla_device(page_tokens: int = PAGE_TOKENS) -> Any:
    """A device pool of an MLA model, on the CPU."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=4 * page_tokens, page_size=page_tokens, dtype=torch.float32, kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def host_of(device: Any, layout: str, *, pages: int = PAGES, cls: type | None = None) -> Any:
    """An empty MHA host pool for a device pool."""
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    info = device.get_device_pool_infos()[0].buffer_info
    return (cls or get_mha_host_pool_cls(info))(
        info, 2.0, 0, device.page_size, layout, False, device_capacity_tokens=device.size,
        start_layer=0, end_layer=device.layer_num, host_token_capacity=pages * device.page_size,
    )  # fmt: skip


def mha_pool(layout: str, *, cls: type | None = None, **shape: Any) -> Any:
    """An empty MHA host pool of ``PAGES`` pages."""
    return host_of(mha_device(**shape), layout, cls=cls)


def mla_pool(layout: str, *, page_tokens: int = PAGE_TOKENS, dcp: tuple[int, int] = (0, 1)) -> Any:
    """An empty MLA host pool; with ``dcp`` (rank, size) it holds that part of each page."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = mla_device(page_tokens)
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, page_tokens, layout, False,
        dcp_size=dcp[1], dcp_rank=dcp[0], device_capacity_tokens=device.size, start_layer=0,
        end_layer=LAYERS, target_layer_num=LAYERS,
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


def indexer_pool(layout: str) -> Any:
    """The index keys of a sparse-attention model, beside an MLA anchor."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.runtime_context import get_parallel

    page_tokens = 64
    with get_parallel().override(attn_dcp_size=1):
        device = DSATokenToKVPool(
            size=2 * page_tokens, page_size=page_tokens, kv_lora_rank=LATENT, layer_num=LAYERS,
            dtype=torch.bfloat16, qk_rope_head_dim=ROPE, device="cpu", index_head_dim=128,
            enable_memory_saver=False, kv_cache_dim=LATENT + ROPE,
            skip_topk_layers=[False, True, False],
        )  # fmt: skip
    anchor = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, page_tokens, layout, False,
        device_capacity_tokens=device.size, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS, host_token_capacity=PAGES * page_tokens,
    )  # fmt: skip
    return DSAIndexerPoolHost(
        decl=make_dsa_indexer_pool_decl(device), anchor_host=anchor, pin_memory=False
    )


def paged_pool(layout: str) -> Any:
    """A compressed pool of DeepSeek-V4: one row of bytes a page and layer."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    rows = [torch.zeros(4, 96, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        "deepseek_v4_c4", rows, 96, PAGES, PAGE_TOKENS, layout, pin_memory=False
    )


def mamba_pool(layout: str, *, side: bool = False) -> Any:
    """States of a linear-attention model: one slot a page, two convolutions of another dtype."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    slots = 4
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, 2, 5),
        conv=(
            torch.zeros(LAYERS, slots, 7, dtype=torch.bfloat16),
            torch.zeros(LAYERS, slots, 3, dtype=torch.bfloat16),
        ),
        extra_checkpoint_buffers=(torch.zeros(slots, 11),) if side else (),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)
