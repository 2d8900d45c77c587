"""A small cache for the parts of streaming mode that know no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import Geometry, StoreOptions, pieces_of
from dualpath_storage.memory import aligned


def geometry(pool: str = "kv", layers: int = 2, layer_bytes: int = 512) -> Geometry:
    return Geometry(
        model="tiny",
        weights="w1",
        pool=pool,
        dtype="float32",
        page_tokens=4,
        layers=layers,
        layer_bytes=layer_bytes,
        form="test",
    )


def chain(count: int, seed: int = 0) -> list[str]:
    """Page hashes as SGLang writes them."""
    return [f"{seed + 1:032x}{i:032x}" for i in range(count)]


def put(cache: KVCache, pool: Pool, names: list[str], parent: str | None = None) -> None:
    """Store a chain of blocks."""
    block = aligned(pool.geometry.block_bytes)[: pool.geometry.block_bytes]
    keys = [bytes.fromhex(name) for name in names]
    before = bytes.fromhex(parent) if parent else None
    cache.write(pool, keys, [pieces_of(block, pool.geometry)] * len(keys), parent=before)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[KVCache]:
    options = StoreOptions(root=tmp_path / "store", capacity_bytes=64 << 20, direct_io="off")
    with KVCache(options) as opened:
        yield opened


@pytest.fixture
def pool(cache: KVCache) -> Pool:
    return cache.attach(geometry())
