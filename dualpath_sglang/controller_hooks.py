"""Hooks into SGLang 0.5.23's cache controller, for the processes that schedule.

``HiCacheController.attach_storage_backend``, around
    ``dualpath`` goes through SGLang's loader for ``dynamic`` backends, with the zero-copy calls
    on, and the controller keeps the name.

``StorageBackendFactory.create_backend``, around
    With decode-context parallelism SGLang lets only ``file`` and ``mooncake`` attach, because
    others' keys do not tell the shards apart; DualPath's geometry does.

``HybridCacheController.attach_storage_backend``, around
    It registers side pools after its base class has finished; when one is refused there, half an
    attach would be left behind.

``HybridCacheController.should_backup``, after
    A draft's heads are sharded although the model is replicated: every rank stores its own.

``StorageAttachment.apply_runtime_config``, before
    Has the backend told which keys precede each batch, and so the parent of each page.

``SchedulerWeightUpdaterManager.flush_cache_after_weight_update``, before
    KV of replaced weights must neither be stored as that of the old ones, nor the other way.

``HybridCacheController``, which every server uses but a decode server that only offloads, calls
its base class's attach: that one hook serves both, at start and at run time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dualpath_sglang.plugin import BACKEND_NAME

LOADER = {
    "backend_name": BACKEND_NAME,
    "module_path": "dualpath_sglang.hicache",
    "class_name": "DualPathStorage",
    "interface_v1": 1,
}
"""What SGLang's loader of dynamic backends looks for in the extra configuration."""

_SRT = "sglang.srt"
_REPLACED = "_dualpath_weights_replaced"


def register() -> None:
    """Register the hooks; SGLang applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    controller = f"{_SRT}.managers.cache_controller.HiCacheController"
    hybrid = f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    factory = f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory"
    attachment = f"{_SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment"
    updater = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for target, hook, kind in (
        (f"{controller}.attach_storage_backend", attach, HookType.AROUND),
        (f"{factory}.create_backend", create, HookType.AROUND),
        (f"{hybrid}.attach_storage_backend", attach_or_detach, HookType.AROUND),
        (f"{hybrid}.should_backup", back_up_shards, HookType.AFTER),
        (f"{attachment}.apply_runtime_config", pass_prefix_keys, HookType.BEFORE),
        (f"{updater}.flush_cache_after_weight_update", weights_replaced, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind)


def attach(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach through the dynamic loader, under the name that the user gave.

    Raises:
        ValueError: the served weights are not those that were loaded, and have no name.
    """
    call = inspect.signature(original).bind(controller, *args, **kwargs)
    if call.arguments["storage_backend"] != BACKEND_NAME:
        return original(controller, *args, **kwargs)
    extra = call.arguments.get("storage_backend_extra_config") or {}
    if getattr(controller, _REPLACED, False) and not extra.get("weights_revision"):
        raise ValueError(
            "The model's weights were replaced while it was served, so DualPath cannot tell what "
            "they are; attach it with weights_revision set to a text that names them."
        )
    from sglang.srt.runtime_context import get_parallel

    call.arguments["storage_backend_extra_config"] = {**extra, **LOADER}
    # See `create` for the name that passes SGLang's check.
    decode_context = get_parallel().attn_dcp_size > 1
    call.arguments["storage_backend"] = "file" if decode_context else "dynamic"
    result = original(*call.args, **call.kwargs)
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    controller.storage_backend_type = BACKEND_NAME
    return result


def create(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    storage_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The loader for what :func:`attach` marked, under whichever name it had to pass."""
    extra = getattr(storage_config, "extra_config", None) or {}
    if extra.get("backend_name") == BACKEND_NAME:
        backend_name = "dynamic"
    return original(factory, backend_name, storage_config, *args, **kwargs)


def attach_or_detach(
    original: Callable[..., Any], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    """Undo an attach whose side pools were refused."""
    was_attached = controller.enable_storage
    try:
        return original(controller, storage_backend, *args, **kwargs)
    except Exception:
        if storage_backend == BACKEND_NAME and controller.enable_storage and not was_attached:
            controller.detach_storage_backend()
        raise


def back_up_shards(result: bool, controller: Any, transfer: Any) -> bool:
    """Also back up the pools of which this rank holds a shard of its own."""
    if result or controller.storage_backend_type != BACKEND_NAME:
        return result
    return bool(backend_of(controller).must_back_up(transfer.name))


def pass_prefix_keys(
    attachment: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have SGLang hand over the keys that precede each batch."""
    if kwargs.get("storage_backend") != BACKEND_NAME:
        return None
    return (attachment, *args), {**kwargs, "hicache_storage_pass_prefix_keys": True}


def weights_replaced(updater: Any, *_: Any, **__: Any) -> None:
    """Stop for a model that is no longer the one that was identified."""
    tree_cache = getattr(updater.scheduler, "tree_cache", None)
    linker = getattr(getattr(tree_cache, "linker", None), "cache_linker", None)
    if linker is not None and hasattr(linker, "suspend"):
        linker.suspend("the model's weights were replaced")
    controller = getattr(tree_cache, "cache_controller", None)
    if controller is None:
        return
    setattr(controller, _REPLACED, True)
    if getattr(controller, "storage_backend_type", None) == BACKEND_NAME:
        backend_of(controller).suspend(
            "the model's weights were replaced; detach, and attach with weights_revision set"
        )


def backend_of(controller: Any) -> Any:
    """The backend itself, also behind SGLang's failure injector."""
    backend = controller.storage_backend
    return getattr(backend, "_backend", backend)
