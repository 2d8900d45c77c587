"""The pages of a process's host pools, moved to and from the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dualpath_sglang import host_pools
from dualpath_sglang.geometries import KV, PoolFacts, is_sharded, pool_geometry
from dualpath_sglang.host_layout import HostLayout
from dualpath_sglang.identity import Identity
from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.pool import Pool
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.shards import Rank
from dualpath_storage import Geometry, Pieces, key_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPool:
    """A host pool whose pages are blocks of the cache.

    Args:
        host: SGLang's pool.
        step: host indices a page.
    """

    host: Any
    step: int
    layout: HostLayout
    pool: Pool

    def pages(self, count: int, indices: torch.Tensor | None) -> list[int]:
        """Page numbers of the host indices of ``count`` pages.

        Raises:
            ValueError: they are not whole pages of the pool.
        """
        if indices is None or indices.numel() != count * self.step:
            raise ValueError(f"{count} pages need {count * self.step} host indices")
        pages = []
        for index in indices[:: self.step].tolist():
            page, offset = divmod(int(index), self.step)
            if offset or not 0 <= page < self.layout.page_count:
                raise ValueError(f"host index {index} is not the start of a page")
            pages.append(page)
        return pages


@dataclass(frozen=True, slots=True)
class EmptyPool:
    """A host pool without bytes on this rank.

    Args:
        anchor: it only counts slots, on every rank; otherwise it stands in for the pool of the
            rank that holds the replicated bytes, and that rank's answer decides.
    """

    host: Any
    anchor: bool


class BlockReader(Protocol):
    """Reads whole blocks, as :meth:`KVCache.read` does."""

    def read(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        pieces: Sequence[Pieces],
        *,
        timeout_s: float,
        hint: ReadHint | None = None,
    ) -> list[bool]:
        """True for a block that is whole; the memory of any other is garbage."""
        ...


class HostPages:
    """Host pools by name, with the geometry that each has in the cache. Thread-safe.

    Args:
        identity: of the model that fills the pools.
        rank: of this process.
        flat: SGLang exchanges whole pages as flat tensors.
        reader: reads blocks in place of the cache, and can be told who is to read them.
    """

    def __init__(
        self,
        cache: KVCache,
        identity: Identity,
        rank: Rank,
        namespace: str,
        *,
        flat: bool = False,
        reader: BlockReader | None = None,
    ) -> None:
        self._cache = cache
        self._reader = reader
        self._identity = identity
        self._rank = rank
        self._namespace = namespace
        self._flat = flat
        self._page_tokens = 0
        self._pools: dict[str, StoredPool | EmptyPool] = {}

    def get(self, name: object) -> StoredPool | EmptyPool | None:
        """The pool of that name, if it is attached."""
        return self._pools.get(str(name))

    def attach(self, name: str, host: Any) -> None:
        """Take a pool in use; the anchor first.

        Raises:
            StoreError: its pages cannot be addressed.
        """
        known = self._pools.get(name)
        if known is not None and known.host is host:
            return
        step = host_pools.indices_per_page(host)
        if name == KV:
            self._page_tokens = step
        layout = host_pools.describe(host, flat=self._flat)
        if layout is None:
            self._pools[name] = EmptyPool(host, host_pools.is_anchor(host))
            return
        geometry = self._geometry(name, host, layout)
        writer = self._rank.writes(self.sharded(name, host))
        self._pools[name] = StoredPool(
            host, step, layout, self._cache.attach(geometry, writer=writer)
        )
        logger.info(
            "DualPath stores the pool %s as %s: %d layers of %d bytes a page, %s, %s, shard %s, %s",
            name,
            geometry.id,
            geometry.layers,
            geometry.layer_bytes,
            geometry.form,
            type(layout).__name__,
            geometry.shard or "none",
            "read and written" if writer else "read",
        )

    def sharded(self, name: str, host: Any) -> bool:
        """Whether tensor-parallel ranks hold different bytes of a pool."""
        return is_sharded(self._rank, name, host_pools.is_head_sharded(host))

    def _geometry(self, name: str, host: Any, layout: HostLayout) -> Geometry:
        facts = PoolFacts(
            name,
            layout.form,
            host_pools.is_head_sharded(host),
            host_pools.layer_range(host),
            packed_drafts=host_pools.draft_layers(host),
            format_tag=getattr(host, "storage_format_tag", None),
        )
        return pool_geometry(
            facts,
            identity=self._identity,
            rank=self._rank,
            namespace=self._namespace,
            page_tokens=self._page_tokens,
        )

    def read(
        self,
        pool: Pool,
        layout: HostLayout,
        keys: Sequence[bytes],
        pages: Sequence[int],
        timeout_s: float,
        hint: ReadHint | None = None,
    ) -> list[bool]:
        """Read blocks into pages; after a window with a miss, the rest is not tried."""
        deadline = time.monotonic() + timeout_s
        done: list[bool] = []
        for i in range(0, len(keys), layout.window_pages):
            part = keys[i : i + layout.window_pages]
            left = deadline - time.monotonic()
            if left <= 0 or not all(done):
                break
            with layout.window(pages[i : i + len(part)], fill=False) as window:
                if self._reader is None:
                    good = self._cache.read(pool, part, window.pieces, timeout_s=left)
                else:
                    good = self._reader.read(pool, part, window.pieces, timeout_s=left, hint=hint)
                window.commit(good)
            done += good
        return done + [False] * (len(keys) - len(done))

    def write(
        self,
        pool: Pool,
        layout: HostLayout,
        keys: Sequence[bytes],
        pages: Sequence[int],
        parent: bytes | None,
        timeout_s: float,
    ) -> list[WriteResult]:
        """Write pages as blocks of one chain."""
        deadline = time.monotonic() + timeout_s
        results: list[WriteResult] = []
        for i in range(0, len(keys), layout.window_pages):
            part = keys[i : i + layout.window_pages]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            with layout.window(pages[i : i + len(part)], fill=True) as window:
                results += self._cache.write(
                    pool, part, window.pieces, parent=parent, timeout_s=left
                )
            parent = part[-1]
        return results + [WriteResult.FAILED] * (len(keys) - len(results))


def raw_keys(keys: Sequence[str]) -> list[bytes]:
    """Page hashes as bytes, all at once when they are what SGLang makes them."""
    try:
        raw = bytes.fromhex("".join(keys))
    except ValueError:
        return [key_bytes(key) for key in keys]
    if len(raw) != 32 * len(keys) or any(len(key) != 64 for key in keys):
        return [key_bytes(key) for key in keys]
    return [raw[i : i + 32] for i in range(0, len(raw), 32)]
