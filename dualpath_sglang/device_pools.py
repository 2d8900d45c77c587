"""SGLang 0.5.23's device pools as Full Blocks: which tensors, in which order, who waits for them.

| pool | Layer Blocks | tensors of one | layer that waits |
|---|---|---|---|
| MHA | its layers | K, V | its own |
| MLA | its layers | latent | its own |
| DSA indexer | its layers | keys with scales | its own |
| Mamba state | 1 | temporal of all layers, conv of all layers | the first that has one |
| draft layers | one each | as the target's | layer ``n`` for draft ``n`` |
| any other that SGLang's linker seam describes | its layers | rows | its own |

The bytes of a block are those of the same page in a host pool (`host_pools`), so both modes share
a store; pools of the last row are kept apart from HiCache mode's by their geometry.

SGLang describes the pools of some models to a linker and refuses the others. What it refuses
(plain MHA and MLA, full and sliding-window layers side by side) is described here, by its own
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualpath_sglang import forms
from dualpath_sglang.geometries import KV, PoolFacts
from dualpath_sglang.host_layout import BlockForm
from dualpath_storage import StoreError

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One device pool.

    Args:
        facts: its part of the geometry.
        source: name of the transfer whose keys and indices it follows.
        blocks: per Layer Block its tensors in canonical order, rows first.
        gates: per Layer Block the transfer layer that waits for it.
        page_rows: rows of each tensor that a page takes.
        page_indices: device indices that a page takes in a transfer.
        translate: from the source's device indices to this pool's.
    """

    facts: PoolFacts
    source: str
    blocks: Sequence[Tensors]
    gates: tuple[int, ...]
    page_rows: int
    page_indices: int
    translate: Callable[[torch.Tensor], torch.Tensor]

    @property
    def name(self) -> str:
        """SGLang's name of the pool."""
        return self.facts.name

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.blocks[0][0].device

    @property
    def page_count(self) -> int:
        """Whole pages that every tensor holds."""
        rows = min(int(t.shape[0]) for tensors in self.blocks for t in tensors)
        return rows // self.page_rows

    def pages(self, indices: torch.Tensor, count: int) -> list[int]:
        """Page numbers of the device indices of ``count`` pages.

        Raises:
            ValueError: they are not whole pages of the pool.
        """
        if indices.numel() != count * self.page_indices:
            raise ValueError(
                f"{count} pages of {self.name} need {count * self.page_indices} device indices, "
                f"not {indices.numel()}"
            )
        starts = self.translate(indices.flatten()[:: self.page_indices])
        pages = []
        for start in starts.tolist():
            page, offset = divmod(int(start), self.page_indices)
            if offset or not 0 <= page < self.page_count:
                raise ValueError(f"{start} is not the first index of a page of {self.name}")
            pages.append(page)
        return pages


@dataclass(frozen=True, slots=True)
class DevicePools:
    """The device pools of one model.

    Args:
        layers: transfer layers, the size of a layer counter.
        replicated: tensor-parallel ranks hold the same KV.
    """

    pools: Sequence[DevicePool]
    layers: int
    replicated: bool


def describe(params: Any, components: set[Any]) -> DevicePools:
    """The pools that a page of this model consists of.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: of its radix tree.

    Raises:
        StoreError: they cannot be read and written layer by layer.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    try:
        group = _group(kvcache, params, components)
        pools = [_pool(entry, kvcache) for entry in group.entries]
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise StoreError(
            f"DualPath cannot stream into {type(kvcache).__name__} layer by layer: {error} "
            "Start SGLang with --enable-hierarchical-cache."
        ) from error
    return DevicePools(pools, int(group.num_layers), bool(group.rank_replicated))


# -- what SGLang refuses ------------------------------------------------------------------------


def _group(kvcache: Any, params: Any, components: set[Any]) -> Any:
    """SGLang's group of pools, or one made of its parts where it has none."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
    from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as linker

    strategy = assembler._select_strategy(kvcache, components)
    page_tokens = int(params.page_size)
    if isinstance(strategy, assembler._PlainKvStrategy):
        entry = _plain_entry(linker, kvcache, params, _identity_layers(kvcache))
        replicated = not hasattr(kvcache, "k_buffer")
        layers = int(kvcache.layer_num)
        entries = [entry, *_draft_entries(linker, params)]
        return linker.DevicePoolGroup(entries, layers, page_tokens, rank_replicated=replicated)
    if isinstance(strategy, assembler._SwaStrategy):
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise ValueError("Draft layers beside sliding-window layers are not supported.")
        full, window = assembler._swa_layer_mappings(kvcache)
        entries = [
            linker._mha_device_pool_entry(
                linker.PoolName.KV, kvcache.full_kv_pool, full, page_tokens
            ),
            linker._mha_device_pool_entry(
                linker.PoolName.SWA, kvcache.swa_kv_pool, window, page_tokens
            ),
        ]
        return linker.DevicePoolGroup(entries, max({*full, *window}) + 1, page_tokens)
    return linker.resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=page_tokens, params=params, components=components
    )


def _identity_layers(pool: Any) -> dict[int, int]:
    return {layer: layer for layer in range(int(pool.layer_num))}


def _plain_entry(linker: Any, pool: Any, params: Any, layers: dict[int, int]) -> Any:
    """A pool of one kind of attention, with the draft layers that SGLang packs behind it."""
    drafts = tuple(params.mtp_draft_device_pools)
    if hasattr(pool, "k_buffer"):
        if drafts:
            raise ValueError("Packed draft layers of this kind are not supported.")
        return linker._mha_device_pool_entry(
            linker.PoolName.KV, pool, layers, int(params.page_size)
        )
    if getattr(pool, "kv_scale_buffer", None) is not None:
        raise ValueError("Scales beside the latent cache are not supported.")
    buffers = [*pool.kv_buffer, *(buffer for draft in drafts for buffer in draft.kv_buffer)]
    mapping = linker._with_packed_draft_mapping(
        layers,
        target_device_layer_num=len(pool.kv_buffer),
        draft_layer_num=len(buffers) - len(pool.kv_buffer),
    )
    return linker.DevicePoolEntry(
        name=linker.PoolName.KV,
        indices_from_pool=linker.PoolName.KV,
        device_pool=pool,
        components=[buffers],
        layer_mapping=mapping,
        page_size=int(params.page_size),
        rows_are_pages=False,
    )


def _draft_entries(linker: Any, params: Any) -> list[Any]:
    """Draft pools that share the target's slots but are stored apart from it."""
    entries = []
    for pool in params.sidecar_draft_device_pools:
        if not hasattr(pool, "k_buffer"):
            raise ValueError(f"A draft in {type(pool).__name__} is not supported.")
        entries.append(
            linker._mha_device_pool_entry(
                linker.PoolName.DRAFT,
                pool,
                _identity_layers(pool),
                int(params.page_size),
                indices_from_pool=linker.PoolName.KV,
            )
        )
    return entries


# -- from SGLang's entries to blocks ------------------------------------------------------------


def _pool(entry: Any, kvcache: Any) -> DevicePool:
    name = str(entry.name)
    buffers = [buffer for component in entry.components for buffer in component]
    drafts = 0
    if name == "mamba":
        blocks: list[Tensors] = [buffers]
        kind = _state_form(entry.components)
        gates: tuple[int, ...] = (min(entry.layer_mapping),)
        dtype = entry.components[-1][0].dtype
    else:
        pool = entry.device_pool
        heads = name != "indexer" and hasattr(pool, "k_buffer")
        if heads:
            _check_heads(pool)
            half = len(buffers) // 2
            blocks = [[buffers[i], buffers[half + i]] for i in range(half)]
        else:
            blocks = [[buffer] for buffer in buffers]
        kind = _form(name, pool, blocks[0])
        gates = _gates(entry.layer_mapping, len(blocks))
        dtype = blocks[0][0].dtype
        own = int(getattr(pool, "layer_num", len(blocks)))
        drafts = max(0, len(blocks) - own) if name in (KV, "indexer") else 0
    page_rows = int(entry._row_span)
    page_indices = int(entry.page_size)
    form = BlockForm(
        len(blocks),
        _bytes(blocks[0], page_rows),
        forms.dtype_name(dtype),
        kind,
    )
    if any(_bytes(block, page_rows) != form.layer_bytes for block in blocks):
        raise ValueError(f"the layers of the pool {name} differ in size.")
    first = int(getattr(kvcache, "start_layer", 0))
    facts = PoolFacts(
        name,
        form,
        head_sharded=name == "mamba" or hasattr(entry.device_pool, "k_buffer"),
        layers=(first, int(getattr(kvcache, "end_layer", None) or first + len(blocks))),
        packed_drafts=drafts,
    )
    return DevicePool(
        facts,
        str(entry.indices_from_pool),
        blocks,
        gates,
        page_rows,
        page_indices,
        entry.translate_indices,
    )


def _bytes(block: Tensors, page_rows: int) -> int:
    return sum(page_rows * t[0].numel() * t.element_size() for t in block)


def _gates(mapping: dict[int, Any], count: int) -> tuple[int, ...]:
    """Per Layer Block the first transfer layer that needs it."""
    gates = [0] * count
    for layer in sorted(mapping, reverse=True):
        mapped = mapping[layer]
        for index in (mapped,) if isinstance(mapped, int) else mapped:
            if index < count:  # the V halves lie behind
                gates[index] = layer
    return tuple(gates)


def _check_heads(pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise ValueError(f"its rows are laid out as {layout}, not one token after the other.")


def _form(name: str, pool: Any, block: Tensors) -> str:
    """What `host_pools` calls the same bytes; others get a name of their own."""
    if hasattr(pool, "k_buffer") and len(block) == 2:
        parts = zip(("k", "v"), block, strict=True)
        return forms.heads([(part, int(t.shape[1]), int(t.shape[2])) for part, t in parts])
    width = int(block[0].shape[-1])
    if name == KV and hasattr(pool, "kv_lora_rank"):
        return forms.latent(width)
    if name == "indexer":
        return forms.rows(forms.INDEXER, width)
    return f"device {type(pool).__name__} {name} {list(block[0].shape[1:])}"


def _state_form(components: Sequence[Tensors]) -> str:
    """Temporal state first, then convolutions; a model without the former has only the latter."""
    names = ["temporal", *(f"conv{i}" for i in range(len(components)))]
    if len(components) == 1:
        names = names[1:]
    return forms.state(
        [
            (name, layers[0].dtype, [len(layers), 1, *layers[0].shape[1:]])
            for name, layers in zip(names, components, strict=False)
        ]
    )
