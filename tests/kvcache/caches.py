"""A cache whose blocks hold what their keys say, so that every hit can be checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.pool import Pool
from dualpath_storage import Geometry, Placement, StoreOptions
from tests.support import blocks
from tests.support.index_choice import let_go, source

MIB = 1 << 20
STORED, PRESENT = WriteResult.STORED, WriteResult.PRESENT
DROPPED, FAILED = WriteResult.DROPPED, WriteResult.FAILED
PENDING = WriteResult.PENDING


class WrongBytesError(AssertionError):
    """A hit with other bytes than the block's: the one thing that must never happen."""


def options(root: Path, **changes: object) -> StoreOptions:
    """Options of a small store."""
    fields: dict[str, object] = {
        "capacity_bytes": 8 * MIB,
        "min_free_fraction": 0.0,
        "io_threads": 4,
        **changes,
    }
    return StoreOptions(root, **fields)  # type: ignore[arg-type]


def open_cache(root: Path, **changes: object) -> KVCache:
    return KVCache(options(root, **changes), index=source())


def write(
    pool: Pool, cache: KVCache, keys: Sequence[bytes], parent: bytes | None = None
) -> list[WriteResult]:
    """Write the right contents of a chain."""
    memory = [blocks.filled(pool.geometry, key) for key in keys]
    return cache.write(pool, keys, memory, parent=parent)


def read(
    pool: Pool, cache: KVCache, keys: Sequence[bytes], layers: tuple[int, int] | None = None
) -> list[bool]:
    """Read blocks; every hit is compared byte by byte.

    Raises:
        WrongBytesError: a hit was wrong.
    """
    of = pool.geometry
    memory = [blocks.blank(of) for _ in keys]
    good = cache.read(pool, keys, memory, layers=layers)
    first, end = layers or (0, of.layers)
    window = slice(first * of.layer_bytes, end * of.layer_bytes)
    for key, pieces, hit in zip(keys, memory, good, strict=True):
        if hit and blocks.dump(pieces)[window] != blocks.content(of, key)[window]:
            raise WrongBytesError(f"{key.hex()} of {of.id}")
    return good


def place(cache: KVCache, pool: Pool, key: bytes) -> Placement:
    """Where a block lies."""
    (found,) = cache.index.lookup(pool.geometry, [key])
    assert found is not None
    return found


def segment(cache: KVCache, pool: Pool, key: bytes) -> Path:
    """The segment file of a block."""
    return segment_file(cache.root, pool.geometry, place(cache, pool, key).segment)


def segment_file(root: Path, of: Geometry, number: int) -> Path:
    return root / of.id / f"seg-{number:08x}"


def overwrite(cache: KVCache, pool: Pool, key: bytes, at: int, data: bytes) -> None:
    """Change bytes of a block's slot behind everybody's back."""
    offset = place(cache, pool, key).slot * pool.geometry.slot_bytes
    with segment(cache, pool, key).open("r+b") as file:
        file.seek(offset + at)
        file.write(data)


def flip(cache: KVCache, pool: Pool, key: bytes, at: int) -> None:
    """Flip a bit of a byte of a block's slot."""
    offset = place(cache, pool, key).slot * pool.geometry.slot_bytes
    with segment(cache, pool, key).open("rb") as file:
        file.seek(offset + at)
        (byte,) = file.read(1)
    overwrite(cache, pool, key, at, bytes([byte ^ 0x04]))


def rescan(cache: KVCache, of: Geometry) -> set[bytes]:
    """Keys that a rebuild of the index would find."""
    for store in cache.stores():
        if store.geometry == of:
            return {header.key for _, header in store.scan()}
    return set()


def killed(cache: KVCache) -> None:
    """Let go of everything, as the kernel does for a killed process."""
    cache._upkeep.stop()
    cache._closed = True
    cache._readers.close()
    cache._writers.close()
    for pool in cache._attached():
        pool.store.close()
    let_go(cache._keeper.index)


def used_bytes(root: Path) -> int:
    """Bytes of all segment files, as the file system says."""
    while True:  # until nothing came or went while we looked
        paths = set(root.glob("*/seg-*"))
        total = 0
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        if paths == set(root.glob("*/seg-*")):
            return total
