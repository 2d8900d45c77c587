"""Hooks into SGLang 0.5.23 for streaming mode, for the processes that schedule.

``UnifiedRadixCache.finish_external_linker_loads``, around
    The verdict on a load, by request instead of by batch; who failed is computed anew.

``Scheduler.get_next_batch_to_run`` and ``process_prefill_chunk``, before
    A request whose load failed neither decodes nor goes on to its next chunk. And the linker
    hears whether others decode, who would wait with a load.

``Scheduler.process_batch_result``, around
    A request whose load failed goes back to the queue.

``SchedulerOutputStreamer.stream_output``, before
    Its client hears nothing of that.

``UnifiedCacheLinkerWrapper.match``, around
    Requests that cannot be taken back get no hits: streaming sessions, beams, diffusion models.
    Hits are reported as those of storage. What the router says of a request is noted.

``UnifiedCacheLinkerWrapper._tail_hashes``, around
    A queued request is matched at every scheduling pass; its keys are hashed once.

``UnifiedCacheLinkerWrapper._sync_restorable_prefix``, around
    SGLang marks the lengths one by one: 16 384 of them keep the scheduler for tens of
    milliseconds. A run is marked at once. And a rank that cannot answer yet says so to all.

``PrefillAdder.add_one_req``, around
    A request whose lookup has no answer yet stays in the queue, and those behind it go on.

``UnifiedCacheLinkerWrapper._offload_node``, before
    Which key precedes the pages, so that none outlives its prefix in the store.

``UnifiedCacheLinkerWrapper.release_request``, before
    Nothing is promised to a request that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualpath_sglang import recovery
from dualpath_sglang.recovery import Recovery
from dualpath_storage import StoreError

_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECOVERY = "_dualpath_recovery"
_REQUEST = "_dualpath_matched"
_KEYS = "_dualpath_tail_keys"
_WAITS = "_dualpath_waits"
_NOTED = "_dualpath_hint_noted"


def _hooks() -> list[tuple[str, Callable[..., Any], str]]:
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    streamer = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    prefill = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
    return [
        (f"{cache}.finish_external_linker_loads", finish_loads, "AROUND"),
        (f"{_SCHEDULER}.get_next_batch_to_run", before_planning, "BEFORE"),
        (f"{prefill}.process_prefill_chunk", before_planning, "BEFORE"),
        (f"{_SCHEDULER}.process_batch_result", process_result, "AROUND"),
        (f"{streamer}.stream_output", stream, "BEFORE"),
        (f"{_WRAPPER}.match", match, "AROUND"),
        (f"{_WRAPPER}._tail_hashes", tail_keys, "AROUND"),
        (f"{_WRAPPER}._sync_restorable_prefix", longest_common, "AROUND"),
        ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", add_request, "AROUND"),
        (f"{_WRAPPER}._offload_node", before_offload, "BEFORE"),
        (f"{_WRAPPER}.release_request", release, "BEFORE"),
    ]


def register() -> None:
    """Register the hooks; SGLang applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in _hooks():
        HookRegistry.register(target, hook, HookType[kind])


def require_applied() -> None:
    """SGLang logs a hook that it cannot apply, and goes on without.

    Raises:
        StoreError: one is missing, without which a failed load would fail its request.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target, _, _ in _hooks() if target not in HookRegistry._patched]
    if missing:
        raise StoreError(
            f"DualPath's hooks into SGLang are not in place ({', '.join(missing)}): it streams "
            "only as a plugin, of which SGLANG_PLUGINS must not leave it out, on a version of "
            "SGLang that it knows."
        )


def _linker(wrapper: Any) -> Any | None:
    """Our linker behind SGLang's wrapper, if it is ours."""
    linker = getattr(wrapper, "cache_linker", None)
    return linker if hasattr(linker, "failed") else None


def _recovery(scheduler: Any) -> Recovery | None:
    wrapper = getattr(scheduler.tree_cache, "linker", None)
    return getattr(wrapper, _RECOVERY, None)


# -- failed loads -------------------------------------------------------------------------------


def finish_loads(original: Callable[..., Any], cache: Any, reqs: list[Any]) -> Any:
    """Wait for the loads of the batch that just ran, and note whose failed, on any rank."""
    wrapper = cache.linker
    linker = _linker(wrapper)
    if linker is None:
        return original(cache, reqs)
    failed = _failed_on_any_rank(wrapper, linker)
    if failed:
        if not hasattr(wrapper, _RECOVERY):
            setattr(wrapper, _RECOVERY, Recovery())
        getattr(wrapper, _RECOVERY).note(req for req in reqs if req.rid in failed)
    return []


def _failed_on_any_rank(wrapper: Any, linker: Any) -> set[str]:
    import torch

    rids, wrapper.inflight_load_rids = wrapper.inflight_load_rids, []
    if not rids:
        return set()
    index, wrapper.inflight_load_index = wrapper.inflight_load_index, -1
    bad = linker.failed(index)
    landed = torch.tensor([int(rid not in bad) for rid in rids], dtype=torch.int)
    wrapper.cache._all_reduce_attn_groups(landed, torch.distributed.ReduceOp.MIN)
    for rid in rids:
        wrapper.private_load_indices.pop(rid, None)
    return {rid for rid, ok in zip(rids, landed.tolist(), strict=True) if not ok}


def before_planning(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Called with the last batch and the running one, in this or the other order."""
    wrapper = getattr(scheduler.tree_cache, "linker", None)
    if (linker := _linker(wrapper)) is None:
        return
    given = dict(kwargs)
    last, running = given.get("last_batch"), given.get("running_batch")
    if args or running is None:
        last, running = scheduler.last_batch, scheduler.running_batch
    linker.begin_pass(
        decoding=any(
            not req.finished()
            for batch in (last, running)
            if batch is not None
            for req in batch.reqs
        )
    )
    if (state := _recovery(scheduler)) is not None:
        state.detach(scheduler, last, running)


def process_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Take failed requests back once their result is out of the way."""
    state = _recovery(scheduler)
    if state is None:
        return original(scheduler, batch, *args, **kwargs)
    with state.processing(scheduler, batch):
        return original(scheduler, batch, *args, **kwargs)


def stream(
    streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out who goes back to the queue."""
    return (streamer, recovery.visible(reqs), *args), kwargs


# -- matching -----------------------------------------------------------------------------------


def match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """No hits for requests that could not be taken back."""
    if (linker := _linker(wrapper)) is None:
        return original(wrapper, key, req, result)
    session = getattr(req, "session", None)
    if (session is not None and session.streaming) or req.beam_group is not None or req.is_dllm():
        return result
    setattr(wrapper, _REQUEST, req)
    setattr(req, _WAITS, False)
    if not getattr(req, _NOTED, False):  # it is matched at every scheduling pass
        linker.hints.note(req.rid, getattr(req, "kv_hints", None))
        setattr(req, _NOTED, True)
    req.host_hit_is_storage = True  # or SGLang would report hits as those of host memory
    try:
        return original(wrapper, key, req, result)
    finally:
        setattr(wrapper, _REQUEST, None)


def tail_keys(
    original: Callable[..., list[str]], wrapper: Any, key: Any, result: Any, device_hit_len: int
) -> list[str]:
    """The keys of a request's tokens from ``device_hit_len`` on, from the last time if possible.

    They are kept with the request, whose tokens only grow: as many are the same.
    """
    req = getattr(wrapper, _REQUEST, None)
    count, page = len(key), wrapper.cache.page_size
    begin, known_count, known = getattr(req, _KEYS, (0, -1, []))
    if known_count == count and device_hit_len >= begin and (device_hit_len - begin) % page == 0:
        return list(known[(device_hit_len - begin) // page :])
    keys = original(wrapper, key, result, device_hit_len)
    if req is not None and keys:
        setattr(req, _KEYS, (device_hit_len, count, keys))
    return keys


def longest_common(
    original: Callable[..., int],
    wrapper: Any,
    restorable: Sequence[int],
    *,
    num_pages: int,
    device_hit_pages: int,
) -> int:
    """The longest length that every rank can restore; none while one of them does not know."""
    linker = _linker(wrapper)
    if linker is None:
        return original(wrapper, restorable, num_pages=num_pages, device_hit_pages=device_hit_pages)
    import torch

    mask = torch.zeros(num_pages + 1, dtype=torch.int)
    if isinstance(restorable, range):
        mask[restorable.start : min(restorable.stop, num_pages + 1)] = 1
    else:
        for pages in restorable:
            mask[pages] = 1
    mask[: device_hit_pages + 1] = 0
    mask[0] = int(not linker.unanswered)  # no length of its own
    wrapper.cache._all_reduce_attn_groups(mask, torch.distributed.ReduceOp.MIN)
    common = mask.nonzero()
    if mask[0] == 0:
        if (req := getattr(wrapper, _REQUEST, None)) is not None:
            setattr(req, _WAITS, True)
        return 0
    return int(common[-1].item())


def add_request(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Pass over a request that waits for its lookup."""
    if getattr(req, _WAITS, False):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(adder, req, *args, **kw)


# -- storing ------------------------------------------------------------------------------------


def before_offload(wrapper: Any, node_id: Any, *_: Any, **__: Any) -> None:
    """Tell the key of the page before a node's first. Without it, eviction knows less."""
    if (linker := _linker(wrapper)) is None:
        return
    try:
        before = wrapper.cache.get_prefix_hash_values(node_id)
        linker.parent_key = before[-1] if before else None
    except Exception as error:  # noqa: BLE001 -- an offload must go on
        linker.note_failure("parent", error)
        linker.parent_key = None


def release(wrapper: Any, rid: str) -> None:
    """A request ended without its load."""
    if (linker := _linker(wrapper)) is not None:
        linker.forget(rid)
