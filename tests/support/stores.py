"""A store seen from outside the server that writes it: where blocks lie, and how to hurt them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_storage import Geometry, StoreOptions, pieces_of
from dualpath_storage.paths import GEOMETRY_FILE, segment_path
from tests.support.index_choice import index_of, source

HEADER_BYTES = 4096


def geometries(root: Path) -> dict[str, Geometry]:
    """By pool; the shards of a pool are told apart by `pool/shard`."""
    found = {}
    for file in sorted(root.glob(f"*/{GEOMETRY_FILE}")):
        geometry = Geometry.from_json(file.read_text())
        name = geometry.pool + (f"/{geometry.shard}" if geometry.shard else "")
        found[name] = geometry
    return found


def block_count(root: Path, pool: str = "kv") -> int:
    geometry = geometries(root).get(pool)
    if geometry is None:
        return 0
    with index_of(root) as index:
        return sum(1 for _ in index.entries(geometry))


def chain(root: Path, pool: str = "kv", index_setting: str | None = None) -> list[bytes]:
    """Keys of the longest chain of a pool, parents first."""
    geometry = geometries(root)[pool]
    with index_of(root, index_setting) as index:
        parents = {entry.key: entry.parent for entry in index.entries(geometry)}

    def line(key: bytes) -> list[bytes]:
        keys = []
        while key in parents:
            keys.append(key)
            key = parents[key]
        return keys[::-1]

    return max((line(key) for key in parents), key=len)


def corrupt(
    root: Path, key: bytes, layer: int, pool: str = "kv", index_setting: str | None = None
) -> None:
    """Flip a byte of one layer of one block."""
    geometry = geometries(root)[pool]
    with index_of(root, index_setting) as index:
        place = index.lookup(geometry, [key])[0]
    assert place is not None, "no such block"
    path = segment_path(root / geometry.id, place.segment)
    offset = place.slot * geometry.slot_bytes + HEADER_BYTES + layer * geometry.layer_bytes + 7
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/seg-*"))


def keys_of(prompt: list[int], page_tokens: int) -> list[bytes]:
    """The keys of a prompt's pages, as SGLang makes them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    whole = len(prompt) // page_tokens * page_tokens
    hashes = get_storage_hash_str(RadixKey(prompt[:whole]), None, page_size=page_tokens)
    return [bytes.fromhex(name) for name in hashes]


def replace_blocks(root: Path, index: str | None = None) -> int:
    """Write every block anew: under its key and with right checksums, but with other bytes."""
    cache = KVCache(StoreOptions(root=root, capacity_bytes=1 << 30), index=source(index))
    random = np.random.default_rng(0)
    replaced = 0
    try:
        names = {g: [entry.key for entry in cache.index.entries(g)] for g in cache.geometries()}
        cache.clear()
        for geometry, keys in names.items():
            pool = cache.attach(geometry)
            for key in keys:
                numbers = random.standard_normal(geometry.block_bytes // 4, dtype=np.float32)
                pieces = pieces_of(memoryview(numbers).cast("B"), geometry)
                replaced += cache.write(pool, [key], [pieces]) == [WriteResult.STORED]
    finally:
        cache.close()
    return replaced
