"""Names of what the bytes of a Layer Block are, as they stand in a geometry.

A host pool and a device pool that hold the same bytes get the same name here, which is what lets
the two modes share a store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def heads(parts: Sequence[tuple[str, int, int]]) -> str:
    """Attention with heads: name, heads and width of each part, in the order of their bytes."""
    return " ".join(["mha", *(f"{n}[token,head={h},dim={d}]" for n, h, d in parts)])


def latent(width: int) -> str:
    """Latent attention."""
    return f"mla [token,dim={width}]"


def rows(kind: str, elements: int) -> str:
    """One row a page."""
    return f"{kind} [elements={elements}]"


INDEXER = "dsa-indexer"
"""The rows of a sparse-attention indexer: keys with their scales."""


def state(parts: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> str:
    """The state of a linear-attention model: name, dtype and shape of each part."""
    named = [
        f"{name}:{dtype_name(dtype)}[{','.join(str(n) for n in shape)}]"
        for name, dtype, shape in parts
    ]
    return " ".join(["state", *named])


def dtype_name(dtype: torch.dtype) -> str:
    """As geometries write it."""
    return str(dtype).removeprefix("torch.")
