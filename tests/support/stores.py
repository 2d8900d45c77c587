"""A store seen from outside the server that writes it: where blocks lie, and how to hurt them."""

from __future__ import annotations

from pathlib import Path

from dualpath_storage import Geometry
from dualpath_storage.paths import GEOMETRY_FILE, segment_path
from tests.support.index_choice import index_of

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


def chain(root: Path, pool: str = "kv") -> list[bytes]:
    """Keys of the longest chain of a pool, parents first."""
    geometry = geometries(root)[pool]
    with index_of(root) as index:
        parents = {entry.key: entry.parent for entry in index.entries(geometry)}

    def line(key: bytes) -> list[bytes]:
        keys = []
        while key in parents:
            keys.append(key)
            key = parents[key]
        return keys[::-1]

    return max((line(key) for key in parents), key=len)


def corrupt(root: Path, key: bytes, layer: int, pool: str = "kv") -> None:
    """Flip a byte of one layer of one block."""
    geometry = geometries(root)[pool]
    with index_of(root) as index:
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
