"""The geometry of an SGLang pool, the same for its device pool and its host pool.

Both modes build it here, so that a page written in one is read in the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualpath_sglang.host_layout import BlockForm
from dualpath_sglang.identity import Identity
from dualpath_sglang.shards import Rank
from dualpath_storage import Geometry

KV = "kv"
"""The anchor pool, whose page size is everybody's."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a pool adds to the identity of its blocks.

    Args:
        name: SGLang's name of the pool.
        form: what the bytes of a block are.
        head_sharded: tensor-parallel ranks hold different heads or channels of it.
        layers: the model's layers ``[first, end)`` of this pipeline stage.
        packed_drafts: layers of speculative draft models packed behind the target's.
        format_tag: SGLang's own name for an unusual format of the bytes.
    """

    name: str
    form: BlockForm
    head_sharded: bool
    layers: tuple[int, int]
    packed_drafts: int = 0
    format_tag: str | None = None


def is_sharded(rank: Rank, name: str, head_sharded: bool) -> bool:
    """Whether tensor-parallel ranks hold different bytes of a pool.

    SGLang calls a model replicated as a whole; a draft's heads and a state's channels are sharded
    all the same.
    """
    return not rank.replicated or (name != KV and head_sharded)


def pool_geometry(
    facts: PoolFacts, *, identity: Identity, rank: Rank, namespace: str, page_tokens: int
) -> Geometry:
    """The geometry of a pool's blocks on this rank."""
    form = facts.form.form
    if facts.format_tag:
        form += f" format={facts.format_tag}"
    # Drafts stay in the unit of the pages they belong to, so they are told apart by form.
    if facts.packed_drafts or facts.name.startswith("draft"):
        form += f" draft={facts.packed_drafts or 'all'}:{identity.draft}"
    return Geometry(
        model=identity.model,
        weights=identity.weights,
        pool=facts.name,
        dtype=facts.form.dtype,
        page_tokens=page_tokens,
        layers=facts.form.layers,
        layer_bytes=facts.form.layer_bytes,
        form=form,
        shard=rank.shard(
            sharded=is_sharded(rank, facts.name, facts.head_sharded), layers=facts.layers
        ),
        namespace=namespace,
    )
