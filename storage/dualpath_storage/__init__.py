"""Full Block store: geometry, segment files, checksums, backends.

Knows no inference engine, no tensors and no index. A block is named by a geometry and a 32-byte
key and lies in a slot of a segment file; see :mod:`dualpath_storage.header` for the format.
"""

from __future__ import annotations

from dualpath_storage.blocks import (
    KEY_BYTES,
    NO_PARENT,
    Pieces,
    Placement,
    ReadItem,
    ReadStatus,
    WriteItem,
    WriteStatus,
    key_bytes,
    pieces_of,
)
from dualpath_storage.errors import StoreError
from dualpath_storage.geometry import Geometry
from dualpath_storage.header import Header
from dualpath_storage.options import StoreOptions
from dualpath_storage.slots import Slot
from dualpath_storage.space import Space
from dualpath_storage.store import BlockStore

__all__ = [
    "KEY_BYTES",
    "NO_PARENT",
    "BlockStore",
    "Geometry",
    "Header",
    "Pieces",
    "Placement",
    "ReadItem",
    "ReadStatus",
    "Slot",
    "Space",
    "StoreError",
    "StoreOptions",
    "WriteItem",
    "WriteStatus",
    "key_bytes",
    "pieces_of",
]
