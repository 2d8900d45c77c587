"""The blocks of the cluster: chains whose every byte is known."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from dualpath_storage import Geometry

LAYERS, LAYER_BYTES = 16, 32 << 10
BLOCKS, CHAINS = 16, 10
"""Blocks of a chain, which is what a load asks for, and how many chains there are."""

Bytes = npt.NDArray[np.uint8]


def geometry() -> Geometry:
    """Blocks of 512 KiB."""
    return Geometry(
        model="chaos",
        weights="w",
        pool="kv",
        dtype="bf16",
        page_tokens=64,
        layers=LAYERS,
        layer_bytes=LAYER_BYTES,
        form="test",
    )


def keys(chain: int) -> list[bytes]:
    """Of one chain."""
    return [hashlib.sha256(f"{chain}/{block}".encode()).digest() for block in range(BLOCKS)]


def contents(chain: int) -> Bytes:
    """What the blocks of a chain hold, a row each: a function of their names alone."""
    rows = [np.random.default_rng(list(key)).bytes(LAYERS * LAYER_BYTES) for key in keys(chain)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(BLOCKS, -1)
