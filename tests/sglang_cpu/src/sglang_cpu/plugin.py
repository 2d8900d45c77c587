"""SGLang plugin (entry point `sglang.srt.plugins`): HiCache without CUDA. For SGLang 0.5.23.

Each change has one reason, given beside it. None is made when the process has a CUDA device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import sglang_cpu

HOST_MEMORY_RESERVE_BYTES = 1 << 30

_DIRECT = (
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_all_layer_direct_lf_pf",
)
_MLA = (
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
)
_MHA = (
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
)
# SGLang module -> kernels that it imports from sgl_kernel.kvcacheio on CUDA only
KERNELS = {
    "sglang.srt.mem_cache.pool_host.mha": (*_DIRECT, *_MHA, *_MLA),
    "sglang.srt.mem_cache.pool_host.mla": (*_DIRECT, *_MLA),
}


def register() -> None:
    """Entry point. Does nothing unless SGLang's CPU engine is wanted and there is no CUDA."""
    if not sglang_cpu.active():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _place_kernels()
    _host_pools(HookRegistry, HookType)
    _layer_loads(HookRegistry, HookType)
    _mla_attention()
    _sliding_window(HookRegistry, HookType)
    _disaggregation(HookRegistry, HookType)
    if os.environ.get("SGLANG_CPU_JUNK_FREED") == "1":
        _junk_freed(HookRegistry, HookType)
    if hooks := os.environ.get("SGLANG_CPU_TEST_HOOKS"):
        module, _, function = hooks.partition(":")
        getattr(importlib.import_module(module), function)()


def _place_kernels() -> None:
    from sgl_kernel import kvcacheio

    for module_name, names in KERNELS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(module, name, getattr(kvcacheio, name))


def _host_pools(registry: Any, hook: Any) -> None:
    """Plain memory instead of cudaHostRegister, and a reserve that fits a small test machine."""
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_MEMORY_RESERVE_BYTES

    def unpinned(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "pin_memory": False}

    registry.register(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", unpinned, hook.BEFORE
    )


def _layer_loads(registry: Any, hook: Any) -> None:
    """Loads on a thread with real events: torch.cpu's streams and events do nothing."""
    from sglang.srt.mem_cache.l2_transfer import TransferCompletion

    from sglang_cpu.layer_loads import LayerLoads, LoadSwitches

    loads = LayerLoads(LoadSwitches.from_environment(), TransferCompletion)
    events = "sglang.srt.managers.cache_controller.LayerLoadingEvent"
    registry.register(f"{events}.__init__", loads.after_events_made, hook.AFTER)
    registry.register(f"{events}.wait", loads.wait_for_layer, hook.REPLACE)
    registry.register(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device",
        loads.around_submit,
        hook.AROUND,
    )


def _mla_attention() -> None:
    """torch_native has no MLA handler and falls back to un-absorbed MHA: wrong tokens, silently."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _sliding_window(registry: Any, hook: Any) -> None:
    """torch_native writes sliding-window layers where they belong and reads them elsewhere."""

    def translated(
        backend: Any, q: Any, o: Any, k: Any, v: Any, slots: Any, *a: Any, **kw: Any
    ) -> Any:
        if kw.get("sliding_window_size") is not None and backend.use_sliding_window_kv_pool:
            pool = backend.token_to_kv_pool
            flat = pool.translate_loc_from_full_to_swa(slots.reshape(-1).long())
            slots = flat.view(slots.shape).clamp(min=0)
        return (backend, q, o, k, v, slots, *a), kw

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for method in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        registry.register(f"{native}.{method}", translated, hook.BEFORE)


def _disaggregation(registry: Any, hook: Any) -> None:
    """The host-tensor path of a KV sender uses pinned memory and CUDA events; numpy's does not."""

    def without_host_tensors(transfer_class: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(transfer_class, "supports_host_tensor_indices", False):
            transfer_class.supports_host_tensor_indices = False
        return transfer_class

    registry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", without_host_tensors, hook.AFTER
    )


def _junk_freed(registry: Any, hook: Any) -> None:
    """For tests: when a tier is cleared, overwrite it.

    SGLang leaves the bytes of freed slots and hands the same slots out again, so a hit that loads
    nothing at all would look right.
    """
    import torch

    def overwrite(pool: Any) -> None:
        for buffer in _tensors(pool):
            # Finite, so that it makes wrong answers, not NaN in what happens to sit beside it.
            if buffer.is_floating_point() and buffer.itemsize > 1:
                buffer.uniform_(-4, 4)
            else:
                buffer.view(torch.uint8).random_(0, 64)

    def after_device_clear(_result: None, allocator: Any) -> None:
        overwrite(allocator.get_kvcache())

    def after_host_clear(_result: None, pool: Any) -> None:
        overwrite(pool)

    for target, after in (
        ("mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear", after_device_clear),
        ("mem_cache.allocator.token.TokenToKVPoolAllocator.clear", after_device_clear),
        ("mem_cache.allocator.swa.SWATokenToKVPoolAllocator.clear", after_device_clear),
        ("mem_cache.pool_host.base.HostKVCache.clear", after_host_clear),
    ):
        registry.register(f"sglang.srt.{target}", after, hook.AFTER)


def _tensors(pool: Any) -> Iterator[Any]:
    """The KV tensors that a device or host pool holds itself (not properties that view them)."""
    for name in ("full_kv_pool", "swa_kv_pool"):
        if (inner := getattr(pool, "__dict__", {}).get(name)) is not None:
            yield from _tensors(inner)
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        buffers = getattr(pool, "__dict__", {}).get(name)
        if buffers is not None:
            yield from buffers if isinstance(buffers, (list, tuple)) else (buffers,)
