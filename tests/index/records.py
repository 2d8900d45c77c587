"""Records to publish."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath_sglang.index import Record
from dualpath_storage import NO_PARENT, Placement
from tests.support.blocks import geometry

KV = geometry("mha")
INDEXER = geometry("mla", model=KV.model, pool="indexer")
OTHER = geometry("mha", model="other")
FOREVER_S = 60.0


def records(
    keys: Sequence[bytes],
    *,
    parent: bytes = NO_PARENT,
    segment: int = 1,
    slot: int = 0,
    generation: int = 1,
) -> list[Record]:
    """A chain in neighbouring slots."""
    return [
        Record(key, before, Placement(segment, slot + i, generation))
        for i, (key, before) in enumerate(zip(keys, [parent, *keys[:-1]], strict=True))
    ]
