"""Hooks into SGLang 0.5.23 that tell the storage backend who is to read a request's hit.

SGLang's calls of a storage backend do not say for which request they are.

``Scheduler._prefetch_kvcache`` and ``DecodePreallocQueue._start_hicache_prefetch``, before
    A prefill server, and a decode server, is about to have a request's hit read: what the router
    says of it is noted.

``HybridCacheController._page_transfer``, around
    The thread that reads a hit says whose it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dualpath_sglang.controller_hooks import backend_of
from dualpath_sglang.plugin import BACKEND_NAME

_SRT = "sglang.srt"


def register() -> None:
    """Register the hooks; SGLang applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hybrid = f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    decode = f"{_SRT}.disaggregation.decode_hicache_mixin.DecodeHiCachePreallocMixin"
    for target, hook, kind in (
        (f"{_SRT}.managers.scheduler.Scheduler._prefetch_kvcache", before_prefetch, "BEFORE"),
        (f"{decode}._start_hicache_prefetch", before_prefetch, "BEFORE"),
        (f"{hybrid}._page_transfer", transfer, "AROUND"),
    ):
        HookRegistry.register(target, hook, HookType[kind])


def before_prefetch(owner: Any, req: Any, *_: Any, **__: Any) -> None:
    """Note what the router says of a request that is about to be read."""
    backend = _backend(getattr(getattr(owner, "tree_cache", None), "cache_controller", None))
    if backend is None:
        return
    try:
        backend.hints.note(req.rid, getattr(req, "kv_hints", None))
    except Exception as error:  # noqa: BLE001 -- then it is read as if nothing had been said
        backend.note_failure("hint", error)


def transfer(
    original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any
) -> Any:
    """Read for a request."""
    backend = _backend(controller)
    rid = getattr(operation, "request_id", None)
    whose = (
        contextlib.nullcontext()
        if backend is None or not isinstance(rid, str)
        else backend.reading_for(rid)
    )
    with whose:
        return original(controller, operation, *args, **kwargs)


def _backend(controller: Any) -> Any | None:
    """Our backend behind SGLang's controller, if it is ours."""
    if getattr(controller, "storage_backend_type", None) != BACKEND_NAME:
        return None
    backend = backend_of(controller)
    return backend if hasattr(backend, "reading_for") else None
