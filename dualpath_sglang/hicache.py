"""SGLang's L3: Full Blocks under the host tier of its hierarchical cache.

A thin adapter: SGLang's keys, host indices and pools become keys, pages and memory of
:class:`~dualpath_sglang.kvcache.KVCache`. SGLang calls it from three threads at a time, and an
exception costs it a whole batch or a thread, so nothing here raises once it is attached: what
cannot be answered is a miss, what cannot be written is reported as not written.

A page is usable only when every pool that it needs has it: side pools (indexer, sliding window,
Mamba state, draft) are stored under the page's own key and evicted with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from dualpath_sglang import host_pools
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.geometries import KV
from dualpath_sglang.guard import all_false, all_false_by_pool, all_none, length, never_raises
from dualpath_sglang.host_layout import HostLayout
from dualpath_sglang.host_pages import HostPages, StoredPool, raw_keys
from dualpath_sglang.identity import identify
from dualpath_sglang.kvcache import WriteResult
from dualpath_sglang.metrics import Metrics
from dualpath_sglang.node.report import Node
from dualpath_sglang.paths.host_reader import HostReader
from dualpath_sglang.pool import Pool
from dualpath_sglang.request_hints import RequestHints
from dualpath_sglang.second_path import ServedStore
from dualpath_sglang.served_model import served_model
from dualpath_sglang.served_role import served_role
from dualpath_sglang.shards import Rank
from dualpath_storage import StoreError, key_bytes

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 4096


class DualPathStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped to mypy
    """DualPath behind SGLang's ``HiCacheStorage``.

    Args:
        storage_config: ranks and settings, from SGLang's cache controller.
        kwargs: unused; SGLang's dynamic loader passes it.

    Raises:
        ConfigError: a setting is unknown or malformed.
        StoreError: the store cannot be opened, or the model's weights cannot be identified.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        del kwargs
        extra = dict(storage_config.extra_config or {})
        config = self._config = DualPathConfig.load(extra)
        identity = identify(
            served_model(storage_config.model_name),
            model_id=config.model_id,
            weights_revision=config.weights_revision,
            cache_dir=None if config.read_only else config.store_options().root,
        )
        self._samples = _Samples() if storage_config.enable_storage_metrics else None
        self._refused: dict[str, str] = {}
        self._noted: set[str] = set()
        self._suspended = False
        self.hints = RequestHints()
        """What `hint_hooks` sees of requests: SGLang's calls do not say whose they are."""
        self._asking = threading.local()
        # Last: whatever failed before has left nothing behind.
        node = Node(
            "hicache",
            int(storage_config.tp_rank),
            host=config.machine_name,
            facts=served_role(config),
        )
        self._served = ServedStore(config, node)
        self._cache = self._served.cache
        others = self._served.others
        self._reader = (
            None if others is None else HostReader(self._cache, others, config.hedge_after)
        )
        self._metrics = Metrics(
            "hicache", int(storage_config.tp_rank), enabled=storage_config.enable_storage_metrics
        )
        self._metrics.follow(self._publish)
        self._pages = HostPages(
            self._cache,
            identity,
            Rank.of(storage_config),
            config.namespace,
            flat=not extra.get("interface_v1"),
            reader=self._reader,
        )

    def _publish(self) -> None:
        stats = self._cache.stats()
        self._metrics.cache(stats)
        reader, others = self._reader, self._served.others
        if reader is None:
            self._metrics.paths(stats.read_bytes, 0, 0, 0)
        else:
            self._metrics.paths(
                stats.read_bytes, reader.remote_bytes, reader.own_agent_bytes, reader.hedges
            )
            self._metrics.hinted(dict(reader.hinted))
        if others is not None:
            self._metrics.nodes(others.usable, others.counts)

    # -- pools ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach the anchor pool; SGLang undoes the whole attach when this raises.

        Raises:
            StoreError: the pool's pages cannot be addressed.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pages.attach(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Attach a pool of a hybrid group, now or at any later time. Never raises."""
        name = str(host_pool_name)
        try:
            self._pages.attach(name, host_pool)
            self._refused.pop(name, None)
        except Exception as error:  # noqa: BLE001 -- told by on_host_pools_registered
            self._refused[name] = str(error)
            logger.error("DualPath cannot store the pool %s: %s", name, error)

    def on_host_pools_registered(self) -> None:
        """The pools are known.

        Raises:
            StoreError: one of them could not be attached.
        """
        if self._refused:
            raise StoreError(" ".join(self._refused.values()))

    def must_back_up(self, name: object) -> bool:
        """Whether this rank has bytes of its own in a pool that SGLang takes for replicated."""
        stored = self._pages.get(name)
        return isinstance(stored, StoredPool) and self._pages.sharded(str(name), stored.host)

    # -- looking up -------------------------------------------------------------------------

    @never_raises(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Length of the leading run of pages whose KV is present."""
        return self._prefix(raw_keys(keys), extra_info) if keys else 0

    @never_raises(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every prefix length that KV and all the given pools can restore."""
        raw = raw_keys(keys)
        pages = self._prefix(raw, extra_info, alone=not pool_transfers)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        usable = [True] * pages  # usable[n - 1]: a prefix of n pages can be restored
        for transfer in pool_transfers or []:
            if not any(usable):
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                hits[transfer.name] = self._group_pages(transfer, keys)
                continue
            present = self._present(transfer.name, raw[:pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                good = _windows(present, max(1, length(transfer.keys)))
            else:
                run = _leading(present)
                good = [n < run for n in range(pages)]
            if any(good):
                hits[transfer.name] = pages - good[::-1].index(True)
            usable = [a and b for a, b in zip(usable, good, strict=True)]
        restorable = [n + 1 for n, ok in enumerate(usable) if ok]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _prefix(
        self, raw: Sequence[bytes], extra_info: HiCacheStorageExtraInfo | None, alone: bool = True
    ) -> int:
        """Leading run of KV pages. An anchor without bytes has all of them, but never alone."""
        kv = self._pages.get(KV)
        if kv is None or self._suspended:
            return 0
        if not isinstance(kv, StoredPool):
            return 0 if kv.anchor and alone else len(raw)
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix:  # hits of the upper tiers: in use as well
            self._cache.touch(kv.pool, raw_keys(prefix))
        run = self._cache.prefix(kv.pool, raw)
        tokens = kv.pool.geometry.page_tokens
        self._metrics.count("lookups", source="index")
        self._metrics.count("hit_tokens", run * tokens)
        self._metrics.count("miss_tokens", (len(raw) - run) * tokens, reason="absent")
        return run

    def _present(self, name: object, raw: Sequence[bytes]) -> list[bool]:
        stored = self._pages.get(name)
        if stored is None:
            self._note(f"no pool {name}", "DualPath was asked for the pool %s, unknown to it", name)
            return [False] * len(raw)
        if not isinstance(stored, StoredPool):
            return [True] * len(raw)
        return self._cache.lookup(stored.pool, raw)

    def _group_pages(self, transfer: PoolTransfer, keys: Sequence[str]) -> int:
        """KV pages that the leading complete key groups of a pool of blocks cover.

        A block of ``block_pages`` pages is stored under ``group_pages`` keys: the transfer's own,
        group by group, or those of the block's last pages.
        """
        block, group = int(transfer.block_pages), int(transfer.group_pages)
        if block < 1 or group < 1:
            return 0
        names = list(transfer.keys or ())
        if not names:
            ends = range(block, len(keys) + 1, block)
            names = [key for end in ends for key in keys[end - group : end]]
        present = self._present(transfer.name, raw_keys(names))
        return min(_leading(present) // group * block, len(keys))

    # -- zero-copy transfers ----------------------------------------------------------------

    @never_raises(all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read KV pages into the host pool; the memory of a page that is not True is garbage."""
        del extra_info
        return self._get(KV, keys, host_indices)

    @never_raises(all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write KV pages; one that is there already, or left out on purpose, is a success."""
        return self._set(KV, keys, host_indices, extra_info)

    @never_raises(all_false_by_pool)
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Read pages of side pools."""
        del extra_info
        return {t.name: self._get(t.name, t.keys or [], t.host_indices) for t in transfers}

    @never_raises(all_false_by_pool)
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Write pages of side pools."""
        return {
            t.name: self._set(t.name, t.keys or [], t.host_indices, extra_info) for t in transfers
        }

    def _get(self, name: object, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        stored = self._pages.get(name)
        if stored is None or self._suspended or not keys:
            return [False] * len(keys)
        if not isinstance(stored, StoredPool):
            return [True] * len(keys)
        pages = stored.pages(len(keys), indices)
        return self._read(stored.pool, stored.layout, raw_keys(keys), pages)

    def _set(
        self,
        name: object,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        stored = self._pages.get(name)
        if stored is None:
            self._note(f"no pool {name}", "DualPath was given pages of %s, unknown to it", name)
            return [False] * len(keys)
        if not isinstance(stored, StoredPool) or self._suspended or not keys:
            return [True] * len(keys)
        pages = stored.pages(len(keys), indices)
        prefix = extra_info.prefix_keys if extra_info is not None else None
        parent = key_bytes(prefix[-1]) if prefix else None
        return self._write(stored.pool, stored.layout, raw_keys(keys), pages, parent)

    def _read(
        self, pool: Pool, layout: HostLayout, keys: Sequence[bytes], pages: Sequence[int]
    ) -> list[bool]:
        begin = time.monotonic()
        rid = getattr(self._asking, "rid", None)
        hint = None if rid is None else self.hints.of(rid)
        good = self._pages.read(pool, layout, keys, pages, self._config.read_timeout_s, hint)
        if self._samples is not None:
            self._samples.add("read", sum(good), pool.geometry.block_bytes, begin)
        return good

    def _write(
        self,
        pool: Pool,
        layout: HostLayout,
        keys: Sequence[bytes],
        pages: Sequence[int],
        parent: bytes | None,
    ) -> list[bool]:
        begin = time.monotonic()
        timeout_s = self._config.write_timeout_s
        results = self._pages.write(pool, layout, keys, pages, parent, timeout_s)
        if self._samples is not None:
            stored = results.count(WriteResult.STORED)
            self._samples.add("written", stored, pool.geometry.block_bytes, begin)
        return [result is not WriteResult.FAILED for result in results]

    @contextlib.contextmanager
    def reading_for(self, rid: str) -> Iterator[None]:
        """What this thread reads meanwhile is read for a request."""
        self._asking.rid = rid
        try:
            yield
        finally:
            self._asking.rid = None

    # -- flat pages (without the zero-copy interface) ---------------------------------------

    @never_raises(lambda *_, **__: None)
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """One KV page in a flat tensor, or None."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    @never_raises(all_none)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """KV pages in flat tensors: the given ones, or new ones."""
        del target_sizes
        kv = self._pages.get(KV)
        if not isinstance(kv, StoredPool) or self._suspended:
            return [None] * len(keys)
        answer: list[torch.Tensor | None] = []
        targets = target_locations or [None] * len(keys)
        for key, target in zip(raw_keys(keys), targets, strict=True):
            page = kv.host.get_dummy_flat_data_page() if target is None else target
            layout = host_pools.flat_page(kv.host, kv.layout.form, page)
            answer.append(page if self._read(kv.pool, layout, [key], [0])[0] else None)
        return answer

    @never_raises(lambda *_, **__: False)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """One KV page from a flat tensor."""
        return self.batch_set([key], [value], target_location, target_sizes)

    @never_raises(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """KV pages of one chain from flat tensors."""
        del target_locations, target_sizes
        kv = self._pages.get(KV)
        if not isinstance(kv, StoredPool) or self._suspended:
            return kv is not None
        parent: bytes | None = None
        for key, value in zip(raw_keys(keys), values, strict=True):
            layout = host_pools.flat_page(kv.host, kv.layout.form, value)
            if not self._write(kv.pool, layout, [key], [0], parent)[0]:
                return False
            parent = key
        return True

    @never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether the KV of one page is present."""
        return self._prefix(raw_keys([key]), None) == 1

    # -- the rest ---------------------------------------------------------------------------

    def suspend(self, reason: str) -> None:
        """Miss everything and keep nothing from now on: the model is not the one identified."""
        if not self._suspended:
            self._suspended = True
            logger.warning("DualPath stores and restores nothing from now on: %s", reason)

    @never_raises(lambda *_, **__: None)
    def clear(self) -> None:
        """Remove every block of this namespace, whichever model's."""
        removed = self._cache.clear(namespace=self._config.namespace)
        logger.info("DualPath removed %d blocks of %s", removed, self._config.namespace)

    @never_raises(lambda *_, **__: None)
    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of the transfers since the last call, for SGLang's metrics."""
        return self._samples.drain() if self._samples is not None else None

    @never_raises(lambda *_, **__: None)
    def close(self) -> None:
        """Give everything back. Later calls miss."""
        self._suspended = True
        self._metrics.close()
        self._served.close()
        logger.info("DualPath storage at %s is closed", self._cache.root)

    def note_failure(self, call: str, error: Exception) -> None:
        """Log the first failure of its kind."""
        self._note(
            f"{call} {type(error).__name__}",
            "DualPath's %s failed, which counts as a miss (further ones are not logged)",
            call,
            exc_info=error,
        )

    def _note(self, what: str, message: str, *args: object, exc_info: Any = None) -> None:
        if what not in self._noted:
            self._noted.add(what)
            logger.warning(message, *args, exc_info=exc_info)


class _Samples:
    """Sizes and speeds of transfers, kept until SGLang collects them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def add(self, what: str, pages: int, page_bytes: int, begin: float) -> None:
        """Note a transfer that began at ``begin`` (monotonic seconds) and has just ended."""
        seconds = time.monotonic() - begin
        if not pages or seconds <= 0:
            return
        with self._lock:
            counts, speeds = self._metrics.backup_pgs, self._metrics.backup_bandwidth
            if what == "read":
                counts, speeds = self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth
            if len(counts) < _MAX_SAMPLES:
                counts.append(pages)
                speeds.append(pages * page_bytes / seconds / 1e9)

    def drain(self) -> StorageMetrics:
        with self._lock:
            full, self._metrics = self._metrics, StorageMetrics()
        return full


def _leading(present: Sequence[bool]) -> int:
    return present.index(False) if False in present else len(present)


def _windows(present: Sequence[bool], length: int) -> list[bool]:
    """For each page whether it is there, and as many before it as make up ``length``."""
    run, good = 0, []
    for i, there in enumerate(present):
        run = run + 1 if there else 0
        good.append(run >= min(length, i + 1))
    return good
