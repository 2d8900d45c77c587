"""Prefill attention that costs what it computes, for SGLang's torch_native backend.

SGLang's own pads the queries of a request to its whole context and computes all of it, so 64 new
tokens behind 8192 cached ones take as long as 8256. The kernels of every GPU backend take time for
``new * context`` instead; so does this: ``Server(..., env=slim_extend.ENVIRONMENT)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ENVIRONMENT = {"SGLANG_CPU_TEST_HOOKS": "tests.support.slim_extend:install"}
"""What loads it into every process of a server."""


def install() -> None:
    """Hook it into SGLang 0.5.23."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{native}._run_sdpa_forward_extend", run_extend, HookType.AROUND)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: int, scale: float | None
) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence.

    query: [heads, new, size]. key, value: [key heads, cached + new, size]. All of what is cached
    is seen by every new token; the two parts are merged by their log-sum-exps.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads, new, size = query.shape
    key_heads = key.shape[0]
    groups = heads // key_heads
    query = query.reshape(key_heads, groups, new, size)
    key, value = (x[:, None].expand(key_heads, groups, *x.shape[1:]) for x in (key, value))
    out, lse = flash(query, key[:, :, cached:], value[:, :, cached:], 0.0, True, scale=scale)
    if cached:
        before, lse_before = flash(
            query, key[:, :, :cached], value[:, :, :cached], 0.0, False, scale=scale
        )
        total = torch.logaddexp(lse, lse_before)
        out = out * (lse - total).exp()[..., None] + before * (lse_before - total).exp()[..., None]
    return out.reshape(heads, new, value.shape[-1])


def run_extend(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """In place of ``TorchNativeAttnBackend._run_sdpa_forward_extend``, where it is plain."""
    plain = (
        encoder_lens is None
        and kwargs.get("causal")
        and not kwargs.get("is_cross_attn")
        and kwargs.get("sliding_window_size") is None
        and query.shape[-1] == v_cache.shape[-1]
        and query.dtype == k_cache.dtype
    )
    if not plain:
        return original(
            backend,
            *(query, output, k_cache, v_cache, req_to_token, req_pool_indices),
            *(seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens),
            **kwargs,
        )
    begin = 0
    lengths = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), strict=True
    )
    for row, length, cached in lengths:
        end = begin + length - cached
        slots = req_to_token[row, :length]
        attended = attend(
            query[begin:end].movedim(0, 1),
            k_cache[slots].movedim(0, 1),
            v_cache[slots].movedim(0, 1),
            cached,
            kwargs.get("scaling"),
        )
        output[begin:end] = attended.movedim(1, 0)
        begin = end
    return output
