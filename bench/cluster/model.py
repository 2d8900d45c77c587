"""The model that prefill pretends to run: its blocks, their names and bytes, and its compute time.

Tokens are not scaled; bytes are. A storage NIC of 200 Mbit/s stands for one GPU's share (1/8) of
the paper's 400 Gbit/s, so KV bytes a token are 1/256 of the model's, and everything takes the time
that it takes there. Layers are fewer and pages longer, so that an I/O is not too small to be worth
its work on two cores.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath_storage import Geometry, pieces_of

STAMP_BYTES = 32


@dataclass(frozen=True, slots=True)
class Model:
    """Prefill of one engine.

    Args:
        name: also that of its blocks.
        layers, page_tokens, layer_bytes: of a block.
        token_s: seconds of all layers to compute one new token, attention left out.
        pair_s: seconds of all layers for one new token to attend to one earlier token.
    """

    name: str
    layers: int
    page_tokens: int
    layer_bytes: int
    token_s: float
    pair_s: float

    @property
    def geometry(self) -> Geometry:
        """Of its blocks."""
        return Geometry(
            model=f"bench-{self.name}",
            weights="0",
            pool="kv",
            dtype="bfloat16",
            page_tokens=self.page_tokens,
            layers=self.layers,
            layer_bytes=self.layer_bytes,
            form="mha k[token] v[token]",
        )

    def layer_s(self, new: int, cached: int) -> float:
        """Seconds of one layer for ``new`` tokens behind ``cached`` ones."""
        return new * (self.token_s + self.pair_s * (cached + new / 2)) / self.layers


MODELS = {
    # Qwen2.5-32B FP16: 262144 B a token; 65 GFLOP a token and 4 x 40 x 128 FLOP a pair and layer
    # (64), at 400 TFLOP/s. Reading a hit takes five times as long as computing the rest.
    "io_bound": Model("io_bound", 16, 256, 16 << 10, 65e9 / 4e14, 64 * 20480 / 4e14),
    # The same KV, and ten times the work: a PE's own NIC would nearly do.
    "compute_bound": Model("compute_bound", 16, 256, 16 << 10, 65e9 / 4e13, 64 * 20480 / 4e13),
}


def key(trajectory: str, page: int) -> bytes:
    """Name of a page of a trajectory."""
    return hashlib.sha256(f"{trajectory}#{page}".encode()).digest()


def keys(trajectory: str, first: int, end: int) -> list[bytes]:
    """Of pages ``[first, end)``."""
    return [key(trajectory, page) for page in range(first, end)]


def stamp(name: bytes, layer: int) -> bytes:
    """What a Layer Block begins with: no other one does."""
    return hashlib.blake2b(name, digest_size=STAMP_BYTES, salt=layer.to_bytes(8, "little")).digest()


class Contents:
    """Bytes of blocks: a stamp a layer, and behind it the same noise in all. Thread-safe."""

    def __init__(self, geometry: Geometry) -> None:
        assert geometry.layer_bytes > STAMP_BYTES
        self.geometry = geometry
        self._noise = random.Random(7).randbytes(geometry.block_bytes)

    def of(self, names: Sequence[bytes]) -> list[list[memoryview]]:
        """New memory with the bytes of these blocks."""
        return [self._block(name) for name in names]

    def _block(self, name: bytes) -> list[memoryview]:
        layers = pieces_of(memoryview(bytearray(self._noise)), self.geometry)
        for layer, view in enumerate(layers):
            view[:STAMP_BYTES] = stamp(name, layer)
        return layers

    def wrong(self, name: bytes, layer: int, view: memoryview) -> bool:
        """Whether these are other bytes than those of a Layer Block.

        The stamp is compared here; the rest is what the store's checksum has passed.
        """
        return view[:STAMP_BYTES] != stamp(name, layer)
