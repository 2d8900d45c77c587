"""The compute quota inside SGLang 0.5.23's ``PrefillAdder``, which fills one prefill batch.

SGLang cuts a request when the batch has fewer tokens left than it needs (``rem_chunk_tokens``).
While it decides about a request, this lowers that number to what the quota allows, so that its own
code does the cutting; a request that was cut before is limited as its shortest-prefill-first policy
limits one (``chunked_req_limit``). Three methods of each adder are wrapped, on the object:

``add_chunked_req``
    the next chunk of the request in parts, which SGLang puts into the batch first
``_select_prefill_admission``
    how much of a request of the queue goes in; it knows what the host tier or storage will load
``add_one_req_ignore_eos``
    the same where there is no radix cache and the output's length is known

SGLang allows one request in parts at a time. It takes that for given, because one fills the batch;
here others follow it, so none of them may be cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dualpath_sglang.scheduling.quota import (
    AttentionModel,
    Rules,
    Work,
    continued,
    fit,
    passed_over,
)


@dataclass(frozen=True, slots=True)
class _Stop:
    """Nothing of this request now. ``pass_over``: those behind it may still go."""

    pass_over: bool


class Packing:
    """Fills the batches of one scheduler by a quota.

    Args:
        scheduler: SGLang's; its queue, and what cuts have to be aligned to.
        rules: their unit is the page.
        note_failure: hears of what went wrong here; the request is then treated as without quota.
    """

    def __init__(
        self,
        scheduler: Any,
        model: AttentionModel,
        rules: Rules,
        note_failure: Callable[[Exception], None],
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._rules = rules
        self._note_failure = note_failure

    def adder(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An adder of SGLang's that keeps to the quota."""
        adder = make(*args, **kwargs)
        if adder.dllm_config is not None or adder.rem_chunk_tokens is None:
            return adder
        rules = replace(self._rules, unit=self._unit(adder))
        for name, method in (
            ("add_chunked_req", self._continue),
            ("_select_prefill_admission", self._select),
            ("add_one_req_ignore_eos", self._add_uncached),
        ):
            setattr(adder, name, functools.partial(method, getattr(adder, name), adder, rules))
        return adder

    def _unit(self, adder: Any) -> int:
        """What a cut is a multiple of: pages, and what kernels ask for."""
        align = self._scheduler.truncation_align_size or 1
        return math.lcm(adder.page_size, align, max(1, adder.mamba_chunk_grid))

    # -- the wrapped methods --------------------------------------------------------------------

    def _continue(self, original: Callable[..., Any], adder: Any, rules: Rules, req: Any) -> Any:
        try:
            new = _length(req) - req.prefix_len
            chunk = continued(
                self._model,
                rules,
                Work(req.prefix_len, new),
                (_waiting(other) for other in self._scheduler.waiting_queue),
                adder.rem_chunk_tokens,
            )
            if chunk < new:
                limit = adder.chunked_req_limit
                adder.chunked_req_limit = chunk if limit is None else min(limit, chunk)
        except Exception as error:  # noqa: BLE001 -- SGLang's scheduler goes on without a quota
            self._note_failure(error)
        return original(req)

    def _select(
        self,
        original: Callable[..., Any],
        adder: Any,
        rules: Rules,
        req: Any,
        *,
        host_hit_length: int,
        has_chunked_req: bool = False,
        **kwargs: Any,
    ) -> Any:
        prefix = req.prefix_len + host_hit_length
        work = Work(prefix, _length(req) - prefix)
        call = functools.partial(
            original,
            req,
            host_hit_length=host_hit_length,
            has_chunked_req=has_chunked_req,
            **kwargs,
        )
        allowed = self._allow(adder, rules, work, has_chunked_req)
        if isinstance(allowed, _Stop):
            return _verdict(allowed)
        admission = self._limited(adder, allowed, adder._replay_len(req, prefix), call)
        if has_chunked_req and getattr(admission, "is_chunked", False):
            return _verdict(self._stop(adder, rules, work))
        return admission

    def _add_uncached(
        self, original: Callable[..., Any], adder: Any, rules: Rules, req: Any
    ) -> Any:
        work = Work(req.prefix_len, _length(req) - req.prefix_len)
        has_chunked_req = self._scheduler.chunked_req is not None
        allowed = self._allow(adder, rules, work, has_chunked_req)
        if not isinstance(allowed, _Stop) and has_chunked_req and work.new > adder.rem_chunk_tokens:
            allowed = self._stop(adder, rules, work)
        if isinstance(allowed, _Stop):
            return _verdict(allowed)
        saved = adder.rem_chunk_tokens
        limit = saved if allowed is None else min(saved, allowed)
        adder.rem_chunk_tokens = limit
        try:
            verdict = original(req)
        finally:
            adder.rem_chunk_tokens += saved - limit
        return verdict if adder.new_chunked_req is None else _verdict(_Stop(pass_over=False))

    # -- deciding -------------------------------------------------------------------------------

    def _allow(
        self, adder: Any, rules: Rules, work: Work, has_chunked_req: bool
    ) -> int | _Stop | None:
        """How many tokens of a request may go in; None where the quota sets no limit."""
        if adder.new_chunked_req is not None or (has_chunked_req and rules.share == 0):
            return _Stop(pass_over=False)  # what was cut is the last of its batch
        try:
            taken = [Work(r.prefix_len, r.extend_end - r.prefix_len) for r in adder.can_run_list]
            chunk = fit(self._model, rules, taken, work)
            if chunk == work.new:
                return None
            if has_chunked_req:
                return self._stop(adder, rules, work)
            return chunk if chunk > 0 else _Stop(pass_over=False)
        except Exception as error:  # noqa: BLE001 -- SGLang's scheduler goes on without a quota
            self._note_failure(error)
            return None

    def _stop(self, adder: Any, rules: Rules, work: Work) -> _Stop:
        """Leave out a request that would have to be cut while another is in parts."""
        if adder.is_hybrid_ssm_cache:
            return _Stop(pass_over=False)  # SGLang takes back its state slot only at the end
        tokens = self._scheduler.chunked_prefill_size
        return _Stop(passed_over(self._model, rules, work, tokens))

    def _limited(self, adder: Any, tokens: int | None, replay: int, call: Callable[[], Any]) -> Any:
        if tokens is None:
            return call()
        saved = adder.rem_chunk_tokens
        adder.rem_chunk_tokens = min(saved, tokens + replay)
        try:
            return call()
        finally:
            adder.rem_chunk_tokens = saved


def _verdict(stop: _Stop) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE if stop.pass_over else AddReqResult.OTHER


def _length(req: Any) -> int:
    """Tokens whose KV a request needs before it decodes."""
    return len(req.full_untruncated_fill_ids)


def _waiting(req: Any) -> Work:
    """A request of the queue, with the hit that the last look at it has found."""
    total = len(req.origin_input_ids) + len(req.output_ids)
    cached = max(0, min((req.prefix_len or 0) + req.host_hit_length, total - 1))
    return Work(cached, total - cached)
