"""What SGLang's host pools keep, and in which order it makes a Full Block.

| pool | layers | components of a layer | a component of a page |
|---|---|---|---|
| MHA | its layers | K, V | ``[token, head, dim]`` |
| K only | its layers | K | ``[token, head, dim]`` |
| MLA | its layers | latent | ``[token, dim]`` |
| rows: DSA and QSA indexer, DeepSeek-V4 | its layers | row | bytes |
| state: Mamba | 1 | temporal, conv 0.., side states | bytes |
| anything else | 1 | the pool's own extents or flat page | opaque |

Pools are known by the exact name of their class, and read by attribute: a subclass may keep more
than its parent, and this module stays free of SGLang. An opaque page is correct but private: its
geometry names class and layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dualpath_sglang import forms
from dualpath_sglang.host_layout import (
    BlockForm,
    Component,
    ExtentLayout,
    FlatLayout,
    HostLayout,
    flat_view,
    layout_of,
)
from dualpath_storage.errors import StoreError

logger = logging.getLogger(__name__)


def describe(pool: Any, *, flat: bool = False) -> HostLayout | None:
    """How the pages of a host pool are Full Blocks.

    Args:
        pool: an SGLang host pool.
        flat: SGLang exchanges whole pages as flat tensors (no zero-copy interface), so a pool
            of unknown order is stored in the order of those.

    Returns:
        None when the pool holds no bytes: an anchor that only counts slots, or the stand-in for
        a replicated pool that another rank keeps.

    Raises:
        StoreError: the pages of this pool cannot be addressed.
    """
    name = type(pool).__name__
    if name == "PageInterleaveHostPool":
        raise StoreError(
            "DualPath cannot store host pools that are striped over ranks; start SGLang without "
            "--enable-kv-cache-sharding."
        )
    empty = pool.size == 0 or getattr(pool, "layer_num", 1) == 0
    if empty or is_anchor(pool) or getattr(pool, "_is_dummy", False):
        return None
    return _known(pool, None) or _opaque(pool, flat)


def is_anchor(pool: Any) -> bool:
    """Whether the pool only counts slots, on every rank: other pools hold what its pages need."""
    return type(pool).__name__ == "LogicalHostPool"


def is_head_sharded(pool: Any) -> bool:
    """Whether tensor-parallel ranks hold different heads or channels of it, by its kind."""
    names = {cls.__name__ for cls in type(pool).__mro__}
    return bool(names & {"MHATokenToKVPoolHost", "MambaPoolHost"})


def draft_layers(pool: Any) -> int:
    """Layers of speculative draft models that are packed behind the target's."""
    own = getattr(pool, "target_layer_num", None)
    return 0 if own is None else max(0, int(pool.layer_num) - int(own))


def layer_range(pool: Any) -> tuple[int, int]:
    """The layers ``[first, end)`` of the model that this pool covers, as far as it says."""
    return int(getattr(pool, "start_layer", 0)), int(getattr(pool, "end_layer", 0))


def indices_per_page(pool: Any) -> int:
    """Host indices that one page takes, over all ranks of a decode-context group."""
    return int(getattr(pool, "logical_page_size", 0) or pool.page_size)


def flat_page(pool: Any, form: BlockForm, tensor: torch.Tensor) -> HostLayout:
    """One page that SGLang hands over as a flat tensor, as a block of the pool's form.

    Raises:
        StoreError: it is no such block.
    """
    layout = _known(pool, tensor)
    if layout is None and "flat=" in form.form:
        layout = layout_of([flat_view(tensor)[None, None]], form.dtype, form.form)
    if layout is None or layout.form != form:
        raise StoreError(f"A flat page of {type(pool).__name__} is no {form}.")
    return layout


_Description = tuple[list[Component], str, str]


def _known(pool: Any, flat: torch.Tensor | None) -> HostLayout | None:
    describer = _DESCRIBERS.get(type(pool).__name__)
    found = describer(pool, flat) if describer is not None else None
    return None if found is None else layout_of(*found)


def _token_axes(
    buffer: torch.Tensor, layout: str, page_tokens: int, inner: int
) -> torch.Tensor | None:
    """A pool's buffer as ``[page, layer, token, ...]`` with ``inner`` axes behind the token."""
    behind = list(range(3, 3 + inner))
    if layout == "layer_first":  # [layer, page * token, ...]
        return buffer.unflatten(1, (-1, page_tokens)).permute(1, 0, 2, *behind)
    if layout == "page_first":  # [page * token, layer, ...]
        return buffer.unflatten(0, (-1, page_tokens)).permute(0, 2, 1, *behind)
    if layout == "page_first_direct":
        return buffer
    if layout == "page_head" and inner == 2:  # [page, head, token, layer, dim]
        return buffer.permute(0, 3, 2, 1, 4)
    return None


def _mha(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    buffers = [pool.kv_buffer[0], pool.kv_buffer[1]]
    return _heads(pool, flat, ("k", "v"), buffers)


def _key_only(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    return _heads(pool, flat, ("k",), [pool.k_buffer])


def _heads(
    pool: Any,
    flat: torch.Tensor | None,
    names: tuple[str, ...],
    buffers: list[torch.Tensor],
) -> _Description | None:
    if flat is not None:
        halves = flat.chunk(len(buffers))
        buffers = [_one_page(pool, half, b) for half, b in zip(halves, buffers, strict=True)]
    views = [_token_axes(b, pool.layout, int(pool.page_size), 2) for b in buffers]
    components: list[Component] = [view for view in views if view is not None]
    if len(components) < len(views):
        return None
    parts = [
        (n, int(b.shape[3]), int(b.shape[4]))
        for n, b in zip(names, views, strict=True)
        if b is not None
    ]
    return components, forms.dtype_name(pool.dtype), forms.heads(parts)


def _mla(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    buffer = pool.kv_buffer
    if getattr(pool, "_native_buffers", None) is not None:
        return None
    if flat is not None:
        buffer = _one_page(pool, flat, buffer)
    view = _token_axes(buffer, pool.layout, int(pool.page_size), 2)
    if view is None or pool.layout == "page_head":
        return None
    return [view.squeeze(3)], forms.dtype_name(pool.dtype), forms.latent(int(view.shape[4]))


def _one_page(pool: Any, flat: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A flat page with the axes of its pool, whose page axis then holds that page alone."""
    tokens = int(pool.page_size)
    axis, extent = {"layer_first": (1, tokens), "page_first": (0, tokens)}.get(pool.layout, (0, 1))
    shape = list(buffer.shape)
    shape[axis] = extent
    return flat.view(buffer.dtype).view(shape)


def _indexer(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    return _rows(pool.index_k_with_scale_buffer, pool.layout, forms.INDEXER, flat)


def _paged(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    return _rows(pool.kv_buffer, pool.layout, f"rows {pool.pool_name}", flat)


def _rows(
    buffer: torch.Tensor | list[torch.Tensor], layout: str, kind: str, flat: torch.Tensor | None
) -> _Description | None:
    """``[page, layer, (1,) bytes]``, or by layer, in one buffer or in one for each."""
    if flat is not None or layout not in ("layer_first", "page_first", "page_first_direct"):
        return None
    component: Component
    if isinstance(buffer, list):
        component, last = list(buffer), buffer[0]
    elif layout == "layer_first":
        component = last = buffer.transpose(0, 1)
    else:
        component = last = buffer
    return [component], forms.dtype_name(last.dtype), forms.rows(kind, int(last.shape[-1]))


def _state(pool: Any, flat: torch.Tensor | None) -> _Description | None:
    if flat is not None or pool.layout not in ("page_first", "page_first_direct"):
        return None
    named = [("temporal", pool.temporal_buffer)]
    named += [(f"conv{i}", b) for i, b in enumerate(pool.conv_buffer)]
    named += [(f"side{i}", b) for i, b in enumerate(pool.slot_state_buffers)]
    named = [(name, b) for name, b in named if b.numel()]
    components: list[Component] = [b.unsqueeze(1) for _, b in named]
    form = forms.state([(name, b.dtype, b.shape[1:]) for name, b in named])
    return components, forms.dtype_name(pool.dtype), form


_DESCRIBERS: dict[str, Callable[[Any, torch.Tensor | None], _Description | None]] = {
    "MHATokenToKVPoolHost": _mha,
    "AsymmetricMHATokenToKVPoolHost": _mha,
    "MHATokenToKOnlyPoolHost": _key_only,
    "MLATokenToKVPoolHost": _mla,
    "DSAIndexerPoolHost": _indexer,
    "DeepSeekV4PagedHostPool": _paged,
    "DeepSeekV4StateHostPool": _paged,
    "QSAIndexerPoolHost": _paged,
    "MambaPoolHost": _state,
}


def _opaque(pool: Any, flat: bool) -> HostLayout:
    """By the pool's own extents where it has them, by its flat pages otherwise."""
    name, step = type(pool).__name__, indices_per_page(pool)
    form = f"opaque {name} {pool.layout}"
    dtype = forms.dtype_name(pool.dtype)
    sizes = None if flat else _extents(pool, step)
    if sizes:
        return ExtentLayout(
            BlockForm(1, sum(sizes), dtype, f"{form} extents={sizes}"), pool, step, sizes
        )
    try:
        size = flat_view(pool.get_dummy_flat_data_page()).nbytes
        return FlatLayout(BlockForm(1, size, dtype, f"{form} flat={size}"), pool, step)
    except Exception as error:
        raise StoreError(
            f"DualPath cannot address the pages of the host pool {name} in layout {pool.layout}: "
            f"{error}."
        ) from error


def _extents(pool: Any, step: int) -> list[int] | None:
    """Bytes of each extent of a page, or None when the pool does not say where they are."""
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(step))
        return [int(size) for size in sizes]
    except Exception as error:  # noqa: BLE001 -- pools refuse this call with whatever they like
        logger.debug("%s has no extents: %s", type(pool).__name__, error)
        return None
