"""What fixes the bytes of a Full Block, and therefore which blocks may ever be exchanged.

Two engines share a block only if every field of their geometry is equal: the id is a digest
over all of them, it names the directory of the segments and stands in every block header.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields

from dualpath_storage.errors import StoreError

PAGE_BYTES = 4096
"""Alignment of everything in a segment file: direct I/O needs no more on any known device."""

MAX_LAYERS = 495
"""Layer checksums that fit in one header page."""


def align_up(size: int, unit: int = PAGE_BYTES) -> int:
    """Smallest multiple of ``unit`` that is not less than ``size``."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Geometry:
    """Identity and shape of the Full Blocks of one pool of one engine rank.

    Args:
        model: model identity (its name and a digest of its configuration).
        weights: revision or fingerprint of the weights; equal shapes with other weights differ.
        pool: the engine's pool, ``kv`` or a side pool such as ``indexer``.
        dtype: element type of the pool.
        page_tokens: tokens a page.
        layers: Layer Blocks in a Full Block (1 for a pool that is not cut by layer).
        layer_bytes: bytes of one Layer Block.
        form: what the bytes are, for example ``mla [token,dim=576]``.
        shard: which part of the model this rank holds, for example ``tp0/2``; empty when the
            bytes are the same on every rank.
        namespace: the operator's name for a tenant; nothing crosses it.

    Raises:
        StoreError: a field is empty or out of range.
    """

    model: str
    weights: str
    pool: str
    dtype: str
    page_tokens: int
    layers: int
    layer_bytes: int
    form: str
    shard: str = ""
    namespace: str = "default"
    id: str = field(init=False, compare=False, repr=False)
    unit: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "weights", "pool", "dtype", "form", "namespace"):
            if not getattr(self, name):
                raise StoreError(f"A geometry needs a {name}.")
        if self.page_tokens < 1 or self.layer_bytes < 1:
            raise StoreError("A geometry needs at least one token a page and one byte a layer.")
        if not 1 <= self.layers <= MAX_LAYERS:
            raise StoreError(f"A Full Block has 1 to {MAX_LAYERS} layers, not {self.layers}.")
        identity = json.dumps(self._identity(), sort_keys=True).encode()
        object.__setattr__(self, "id", hashlib.sha256(identity).hexdigest()[:32])
        shared = json.dumps([self.namespace, self.model, self.weights, self.page_tokens]).encode()
        object.__setattr__(self, "unit", hashlib.sha256(shared).digest()[:8])

    def _identity(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @property
    def id_bytes(self) -> bytes:
        """The id as 16 raw bytes, as it stands in headers and index keys."""
        return bytes.fromhex(self.id)

    @property
    def block_bytes(self) -> int:
        """Payload of a Full Block."""
        return self.layers * self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes a block takes in a segment: one header page and the padded payload."""
        return PAGE_BYTES + align_up(self.block_bytes)

    def to_json(self) -> str:
        """All fields, enough to read the store without an index."""
        return json.dumps({"format": 1, **self._identity()}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Geometry:
        """Inverse of :meth:`to_json`.

        Raises:
            StoreError: the text is no geometry of a format that this version reads.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != 1:
                raise StoreError("The geometry file has a format that this version cannot read.")
            known = {f.name for f in fields(cls) if f.init}
            return cls(**{k: v for k, v in values.items() if k in known})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"The geometry file is damaged: {error}.") from error
