"""Streaming mode: prefix hits read layer by layer, straight into the pages of the forward.

A thin adapter between SGLang's ``UnifiedCacheLinker`` and the parts that do the work:

    lookup  ->  PrefixLookups (from memory, else later)  ->  admission (stall budget)
    load    ->  requests kept for the batch
    start   ->  LayerStreamer: reads, checks, lands     ->  LayerCounter: layer i is there
    finish  ->  results by request; who failed is computed anew (`linker_hooks`)
    offload ->  Offloads: gather, write, publish

It runs on the scheduler's thread, where an exception ends the server and a wait holds up every
decode: nothing here raises once it is built, and nothing waits without a limit. What must be the
same on every rank (whether a load or an offload is taken on) is decided by the calls alone; what a
rank could not do shows in the results, of which SGLang takes the minimum.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from dualpath_sglang import device_pools, linker_hooks
from dualpath_sglang.admission import PageCost, admit
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.device_pages import TensorPages
from dualpath_sglang.geometries import KV, is_sharded, pool_geometry
from dualpath_sglang.guard import length, never_raises
from dualpath_sglang.host_pages import raw_keys
from dualpath_sglang.identity import identify
from dualpath_sglang.layer_counter import GRACE_S, LayerCounter
from dualpath_sglang.lookups import Need, PrefixLookups
from dualpath_sglang.metrics import Metrics
from dualpath_sglang.node.report import Node
from dualpath_sglang.offloads import STAGING_BYTES, OffloadPart, Offloads
from dualpath_sglang.pool import Pool
from dualpath_sglang.request_hints import RequestHints
from dualpath_sglang.request_ledger import RequestLedger
from dualpath_sglang.scrubber import Scrubber
from dualpath_sglang.second_path import ServedStore
from dualpath_sglang.served_model import served_model
from dualpath_sglang.served_rank import this_rank
from dualpath_sglang.served_role import served_role
from dualpath_sglang.streaming.load import Load, LoadRequest, LoadResult, Outcome, PoolLoad
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_sglang.streaming.tensors import DeviceCopier, TensorLanding, pinned_memory
from dualpath_storage import Geometry, StoreError, key_bytes
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned

logger = logging.getLogger(__name__)

_OFFLOAD_SHARE = 4
"""An offload keeps its pages: at most one in so many may wait for one."""
_SLACK = 4.0
_SLACK_S = 1.0
"""A load is given up at this many times its predicted duration, and this much more."""
_HEADROOM = 0.8
"""Share of what a load may take that a hit may be predicted to take."""
_DRAIN_S = 30.0
_UNUSABLE = LoadResult(Outcome.ERROR, "unusable")


def _nothing(*_: Any, **__: Any) -> Sequence[int]:
    return ()


class DualPathLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is untyped to mypy
    """DualPath behind SGLang's ``UnifiedCacheLinker``. See the module.

    Args:
        server_args: of the server; unused, since what counts has been published.
        params: SGLang's ``CacheInitParams``.
        components: of the radix tree.
        extra_config: DualPath's settings.
        forward_stream: the stream that computes pages; None when the current one does.

    Raises:
        ConfigError: a setting is unknown or malformed.
        StoreError: the store cannot be opened, the model's weights cannot be identified, or its
            pools cannot be streamed into.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        linker_hooks.require_applied()
        self.forward_stream = forward_stream
        config = self._config = DualPathConfig.load(extra_config)
        described = device_pools.describe(params, components)
        self._device_pools = {pool.name: pool for pool in described.pools}
        self.pools = {_pool_name(name): pool for name, pool in self._device_pools.items()}
        rank = this_rank(params, replicated=described.replicated)
        identity = identify(
            served_model(getattr(server_args, "served_model_name", None)),
            model_id=config.model_id,
            weights_revision=config.weights_revision,
            cache_dir=None if config.read_only else config.store_options().root,
        )
        self._noted: set[str] = set()
        self._suspended = False
        self._metrics = Metrics("streaming", rank.tp[0], enabled=bool(params.enable_metrics))
        node = Node("streaming", rank.tp[0], host=config.machine_name, facts=served_role(config))
        self._served = ServedStore(config, node)
        self._cache = self._served.cache
        try:
            self._stored: dict[str, Pool] = {}
            for pool in described.pools:
                geometry = pool_geometry(
                    pool.facts,
                    identity=identity,
                    rank=rank,
                    namespace=config.namespace,
                    page_tokens=int(params.page_size),
                )
                writer = rank.writes(is_sharded(rank, pool.name, pool.facts.head_sharded))
                self._stored[pool.name] = self._cache.attach(geometry, writer=writer)
                _log_pool(geometry, writer)
            self._build(config, params, described.layers)
        except BaseException:
            self._served.close()
            raise

    def _build(self, config: DualPathConfig, params: Any, layers: int) -> None:
        device = self._device_pools[KV].device
        stream_options = config.stream_options()
        memory = None
        copier = None
        if device.type == "cuda":
            memory = pinned_memory(stream_options.staging_bytes)
        if device.type != "cpu":
            copier = DeviceCopier(device, stream_options.piece_bytes)
        self._landings: dict[str, TensorLanding] = {}
        self._sources: dict[str, TensorPages] = {}
        with torch.inference_mode(False):  # other threads write through these views
            for name, pool in self._device_pools.items():
                try:
                    landing = TensorLanding(pool.blocks, page_rows=pool.page_rows, copier=copier)
                    self._sources[name] = TensorPages(pool.blocks, pool.page_rows)
                except ValueError as error:
                    raise StoreError(f"DualPath cannot stream into {name}: {error}") from error
                self._landings[name] = landing
        self._streamer = LayerStreamer(
            self._cache, stream_options, memory=memory, paths=self._served.others
        )
        for stored in self._stored.values():
            self._streamer.check(stored.geometry)
        self._streamer.measure(self._stored[KV])
        self.layer_done_counter = LayerCounter(
            layers, on_wait=partial(self._metrics.observe, "layer_wait_seconds")
        )
        if "mamba" in self._device_pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        needs = [
            Need(self._stored[p.name], None if p.source == KV else p.source)
            for p in sorted(self._device_pools.values(), key=lambda p: p.name != KV)
        ]
        self._lookups = PrefixLookups(self._cache, needs, config.lookup_wait_s)
        largest = max(align_up(s.geometry.block_bytes) for s in self._stored.values())
        size = max(STAGING_BYTES, largest)
        self._offloads = Offloads(
            self._cache,
            timeout_s=config.write_timeout_s,
            max_pages=max(1, self._device_pools[KV].page_count // _OFFLOAD_SHARE),
            memory=pinned_memory(size) if device.type == "cuda" else aligned(size),
            on_stored=lambda keys: self._lookups.written(key.hex() for key in keys),
        )
        self._scrubber = Scrubber(self._cache)
        self._pending: dict[str, LoadRequest | None] = {}
        self._pending_bytes = 0
        self._loads: dict[int, tuple[Load | None, Sequence[str]]] = {}
        self._ledger = RequestLedger(self._metrics, self._stored[KV].geometry.page_tokens)
        self.unanswered = False
        """Whether the last lookup has no answer yet, so that its request should wait."""
        self.decoding = False
        self.hints = RequestHints()
        """What `linker_hooks` sees of a request beside its id."""
        self.parent_key: str | None = None
        """The page before the first of the next offload, if known; set by `linker_hooks`."""
        self._metrics.follow(self._publish)

    # -- looking up -------------------------------------------------------------------------

    @never_raises(_nothing)
    def lookup(self, rid: str, transfers: list[Any]) -> Sequence[int]:
        """Every prefix length, in pages, that all pools can restore and that is worth loading."""
        begin = time.monotonic()
        self.unanswered = False
        keys = next(t.keys for t in transfers if str(t.name) == KV)
        if self._suspended or self._ledger.barred(rid):
            return []
        windows = {str(t.name): length(t.keys) for t in transfers if str(t.name) != KV}
        found = self._lookups.restorable(rid, keys, windows)
        self._metrics.observe("lookup_seconds", time.monotonic() - begin)
        self.unanswered = found is None
        if found is None:
            return []
        kept, decision = admit(found, self._cost(windows), self._affordable_bytes())
        self._ledger.decided(rid, decision, len(keys), found, kept)
        return kept

    def begin_pass(self, *, decoding: bool) -> None:
        """The scheduler plans its next batch.

        Args:
            decoding: whether other requests would wait with a load.
        """
        self.decoding = decoding
        self._lookups.begin_round()

    def _cost(self, windows: Mapping[str, int]) -> PageCost:
        every, once = 0, 0
        for pool in self._device_pools.values():
            size = self._stored[pool.name].geometry.block_bytes
            if pool.source == KV:
                every += size
            else:
                once += size * windows.get(pool.source, 0)
        return PageCost(every, once)

    def _affordable_bytes(self) -> int | None:
        budget_s = self._config.load_timeout_s
        if self.decoding:
            budget_s = min(budget_s, self._config.stall_budget_s)
        affordable = self._streamer.forecast().affordable_bytes(_HEADROOM * budget_s)
        return None if affordable is None else affordable - self._pending_bytes

    # -- loading ----------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Take a load on for the next batch. Always True: every rank must answer the same."""
        try:
            request: LoadRequest | None = self._request(rid, transfers)
        except Exception as error:  # noqa: BLE001 -- it fails with its batch instead
            self.note_failure("load", error)
            request = None
        self._pending[rid] = request
        self._pending_bytes = sum(_size(r) for r in self._pending.values() if r is not None)
        return True

    def _request(self, rid: str, transfers: list[Any]) -> LoadRequest:
        by_name = {str(t.name): t for t in transfers}
        loads = []
        for pool in self._device_pools.values():
            transfer = by_name[pool.source]
            keys = raw_keys(transfer.keys)
            loads.append(
                PoolLoad(
                    self._stored[pool.name],
                    self._landings[pool.name],
                    keys,
                    pool.pages(transfer.device_indices, len(keys)),
                    pool.gates,
                )
            )
        return LoadRequest(rid, loads, self._pages_free(), self.hints.of(rid))

    def _pages_free(self) -> Any:
        """An event after which the forwards that were launched up to now are over."""
        device = self._device_pools[KV].device
        if device.type == "cpu":
            return None
        event = torch.get_device_module(device).Event()
        event.record(self.forward_stream)
        return event

    def cancel_queued_load(self, rid: str) -> bool:
        """Give up a load that has not started."""
        if rid not in self._pending:
            return False
        request = self._pending.pop(rid)
        self._pending_bytes -= 0 if request is None else _size(request)
        self._lookups.forget(rid)
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what was queued; the index of its layers, -1 when there is nothing."""
        if not self._pending:
            return -1
        pending, self._pending = self._pending, {}
        self._pending_bytes = 0
        requests = [request for request in pending.values() if request is not None]
        deadline = time.monotonic() + self._timeout_s(requests)
        counter = self.layer_done_counter
        index = counter.open(deadline)
        load = None
        try:
            load = self._streamer.start(
                requests,
                layers=counter.num_layers,
                deadline=deadline,
                on_layer=partial(counter.announce, index),
            )
        except Exception as error:  # noqa: BLE001 -- the requests have failed then
            self.note_failure("start", error)
            for layer in range(counter.num_layers):
                counter.announce(index, layer)
        self._loads[index] = (load, list(pending))
        return index

    def _timeout_s(self, requests: Sequence[LoadRequest]) -> float:
        """A load that takes far longer than predicted is not waited for to the very end."""
        forecast = self._streamer.forecast()
        size = sum(_size(request) for request in requests)
        if forecast.bytes_per_s is None or forecast.stalled:
            return self._config.load_timeout_s
        return min(self._config.load_timeout_s, _SLACK * forecast.read_s(size) + _SLACK_S)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of a batch is written any more; whether all of it landed."""
        return not self.failed(counter_index)

    def failed(self, index: int) -> dict[str, LoadResult]:
        """The same, as the requests whose pages are garbage. Asked a second time, nothing."""
        load, rids = self._loads.pop(index, (None, ()))
        results: dict[str, LoadResult] = {}
        try:
            if load is not None:
                results = load.wait(max(0.0, load.deadline + GRACE_S - time.monotonic()))
        except Exception as error:  # noqa: BLE001 -- the requests have failed then
            self.note_failure("finish", error)
        in_time = self.layer_done_counter.close(index)
        bad: dict[str, LoadResult] = {}
        for rid in rids:
            result = results.get(rid, _UNUSABLE)
            if not in_time and result.ok:
                result = LoadResult(Outcome.TIMEOUT, "layer")
            self._ledger.ended(rid, result)
            if result.ok:
                self._lookups.forget(rid)
            else:
                bad[rid] = result
                self._lookups.doubt(rid)
                self._cache.release(rid)
        for request in () if load is None else load.requests:
            if request.rid in bad and bad[request.rid].outcome is Outcome.MISS:
                for part in request.pools:
                    self._scrubber.suspect(part.pool, part.keys)
        return bad

    def forget(self, rid: str) -> None:
        """A request ended without a load."""
        self._lookups.forget(rid)
        self.hints.forget(rid)

    # -- storing ----------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Store pages that are not stored yet; whether there will be a result."""
        del session_id
        parent, self.parent_key = self.parent_key, None
        kv = next((t for t in transfers if str(t.name) == KV), None)
        pages = 0 if kv is None else length(kv.keys)
        if not pages or self._suspended:
            return False
        parts: list[OffloadPart] | None = None
        ready: list[Any] = []
        try:
            parts = self._parts(transfers, parent)
            ready = self.record_offload_ready() if parts else []
        except Exception as error:  # noqa: BLE001 -- its result says so
            self.note_failure("offload", error)
            parts = None
        return self._offloads.submit(pages, parts, ready)

    def _parts(self, transfers: list[Any], parent: str | None) -> list[OffloadPart]:
        by_name = {str(t.name): t for t in transfers}
        parts = []
        for pool in self._device_pools.values():
            transfer = by_name.get(pool.source)
            stored = self._stored[pool.name]
            if transfer is None or not length(transfer.keys) or not stored.writer:
                continue
            keys = raw_keys(transfer.keys)
            pages = pool.pages(transfer.device_indices, len(keys))
            before = key_bytes(parent) if parent and pool.source == KV else None
            parts.append(OffloadPart(stored, self._sources[pool.name], keys, pages, before))
        return parts

    def num_completed_offloads(self) -> int:
        """Results of offloads that can be taken."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest result of an offload."""
        return self._offloads.pop()

    # -- the rest ---------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """Miss everything and keep nothing from now on: the model is not the one identified."""
        if not self._suspended:
            self._suspended = True
            logger.warning("DualPath stores and restores nothing from now on: %s", reason)

    @never_raises(lambda *_, **__: None)
    def reset(self) -> None:
        """The tree and the pages are about to be forgotten: end what still touches them."""
        self._pending, self._pending_bytes = {}, 0
        for index, (load, _) in list(self._loads.items()):
            if load is not None:
                load.cancel()
                load.wait(GRACE_S)
            self.layer_done_counter.close(index)
        self._loads.clear()
        self.layer_done_counter.reset()
        if not self._offloads.drain(min(_DRAIN_S, self._config.write_timeout_s)):
            logger.warning("The store does not keep up: some pages are not stored")
        self._offloads.abandon()
        self._lookups.clear()
        self._ledger.clear()
        self.hints.clear()

    @never_raises(lambda *_, **__: None)
    def close(self) -> None:
        """Give everything back. Later calls miss."""
        self._suspended = True
        self.reset()
        self._metrics.close()
        self._offloads.close()
        self._scrubber.close()
        self._lookups.close()
        self._streamer.close()
        self._served.close()
        logger.info("DualPath's store at %s is closed", self._cache.root)

    def _publish(self) -> None:
        self._metrics.cache(self._cache.stats())
        streamed = self._streamer.stats()
        self._metrics.stream(streamed)
        self._metrics.paths(
            streamed.read_bytes,
            streamed.remote_bytes,
            streamed.own_agent_bytes,
            streamed.hedges,
        )
        self._metrics.hinted(streamed.hinted)
        others = self._served.others
        if others is not None:
            self._metrics.nodes(others.usable, others.counts)
        self._metrics.lookups(dict(self._lookups.sources))
        self._metrics.gauge("offload_waiting_pages", self._offloads.waiting_pages)

    def note_failure(self, call: str, error: Exception) -> None:
        """Log the first failure of its kind."""
        what = f"{call} {type(error).__name__}"
        if what not in self._noted:
            self._noted.add(what)
            logger.warning(
                "DualPath's %s failed, which counts as a miss (further ones are not logged)",
                call,
                exc_info=error,
            )


def _pool_name(name: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return PoolName(name)


def _size(request: LoadRequest) -> int:
    return sum(len(load.keys) * load.pool.geometry.block_bytes for load in request.pools)


def _log_pool(geometry: Geometry, writer: bool) -> None:
    logger.info(
        "DualPath streams the pool %s from %s: %d layers of %d bytes a page, %s, shard %s, %s",
        geometry.pool,
        geometry.id,
        geometry.layers,
        geometry.layer_bytes,
        geometry.form,
        geometry.shard or "none",
        "read and written" if writer else "read",
    )
