"""A failed load becomes a slower answer: the request is computed anew.

SGLang 0.5.23 answers every request of a batch with an error when a load of it failed. Here only the
requests whose own pages are garbage are taken back, as if they had not been scheduled:

| when | what |
|---|---|
| its forward was launched, the load is known to have failed | ``note`` |
| the next batch is planned | ``detach`` |
| the result of its forward is processed | ``take_back`` |

``note`` keeps its KV out of the tree, and has its forward count as one that did not reach the end
of the prompt: nothing is sampled from it. ``detach`` keeps it out of the batch that decodes, and
has no next chunk made. ``take_back`` frees its slots and puts it at the front of the queue.

With overlap scheduling the three happen in this order; without, the last comes before the second.
An abort by the client, before or after, ends the request as it always does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_MARK = "_dualpath_failed_load"


@dataclass(slots=True)
class _Failed:
    """What a request was like before.

    Args:
        chunk: its prompt was not to be finished by that forward anyway.
        skip_insert: it was not to enter the tree anyway.
        hidden: its result is being processed, and there is nothing to tell the client.
    """

    chunk: bool
    skip_insert: bool
    hidden: bool = False


class Recovery:
    """Requests of one scheduler whose load failed. For the scheduler's thread."""

    def __init__(self) -> None:
        self._requests: dict[int, Any] = {}

    def note(self, requests: Iterable[Any]) -> None:
        """Their loads failed in the forward that was just launched."""
        for req in requests:
            chunk = req.inflight_middle_chunks > 0
            setattr(req, _MARK, _Failed(chunk, bool(req.skip_radix_cache_insert)))
            req.skip_radix_cache_insert = True
            if not chunk:
                req.inflight_middle_chunks += 1
            self._requests[id(req)] = req

    def detach(self, scheduler: Any, batch: Any | None, running_batch: Any | None = None) -> None:
        """Have no decode and no next chunk planned for them.

        Args:
            batch: the batch that was launched last.
            running_batch: the one that it is about to be merged with.
        """
        if not self._requests:
            return
        chunked = scheduler.chunked_req
        if chunked is not None and id(chunked) in self._requests:
            if scheduler._pending_chunked_abort_req is chunked:
                del self._requests[id(chunked)]  # SGLang aborts it now
                delattr(chunked, _MARK)
            else:
                scheduler.chunked_req = None
        _take_out(batch, list(self._requests.values()))
        if running_batch is not None:
            running_batch.batch_is_full = False

    @contextmanager
    def processing(self, scheduler: Any, batch: Any) -> Iterator[None]:
        """Around the processing of a batch's result."""
        failed = [req for req in batch.reqs if id(req) in self._requests]
        if not failed:
            yield
            return
        for req in failed:
            del self._requests[id(req)]
        again = [req for req in failed if not self._give_up(req)]
        for req in again:
            getattr(req, _MARK).hidden = True
            req.tmp_end_idx = -1  # prefill/decode disaggregation: send nothing of it
        yield
        if scheduler.chunked_req in again:
            scheduler.chunked_req = None
        # A batch whose result waited (overlap) is a copy, and the batch itself the last one.
        _take_out(scheduler.last_batch, again)
        if not scheduler.enable_overlap:
            _take_out(batch, again)
        for req in reversed(again):
            take_back(scheduler, req)

    def _give_up(self, req: Any) -> bool:
        """Whether it has ended, or is about to by itself, which SGLang knows how to deal with."""
        if not req.finished() and req.to_finish is None:
            return False
        mark: _Failed = getattr(req, _MARK)
        if not req.finished() and not mark.chunk:
            req.inflight_middle_chunks -= 1
            req.discard_output_reason = req.to_finish
        delattr(req, _MARK)
        return True


def visible(requests: Sequence[Any]) -> Sequence[Any]:
    """The requests of which a client may hear now."""
    if not any(hasattr(req, _MARK) for req in requests):
        return requests
    return [req for req in requests if not _hidden(req)]


def _hidden(req: Any) -> bool:
    mark = getattr(req, _MARK, None)
    return mark is not None and mark.hidden


def _take_out(batch: Any | None, requests: Sequence[Any]) -> None:
    if batch is not None and requests and any(req in requests for req in batch.reqs):
        batch.filter_batch(reqs_to_exclude=requests)


def take_back(scheduler: Any, req: Any) -> None:
    """Free what a request holds, and queue it again before all others."""
    from sglang.srt.managers.schedule_batch import release_req

    mark: _Failed = getattr(req, _MARK)
    delattr(req, _MARK)
    if not req.kv.holds_kv:  # SGLang has taken it back already
        req.skip_radix_cache_insert = mark.skip_insert
        return
    counted_before = req.retracted_stain
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=scheduler.hisparse_coordinator,
        offload_kv=False,
    )
    req.skip_radix_cache_insert = mark.skip_insert
    if not counted_before:  # it has not been told yet which tokens were cached
        req.retracted_stain = False
        req.cached_tokens = 0
        req.cached_tokens_device = req.cached_tokens_host = req.cached_tokens_storage = 0
        req._cache_breakdown_computed = False
    scheduler.waiting_queue.insert(0, req)
    req.time_stats.set_wait_queue_entry_time()
    req.arrival_processed_tokens = scheduler.processed_tokens_counter
    logger.warning("The load of request %s failed; it is computed anew", req.rid)
