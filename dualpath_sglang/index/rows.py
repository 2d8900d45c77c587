"""The rows of the embedded index.

| table | key | value |
|---|---|---|
| ``blocks`` | unit (8), key (32), geometry id (16) | segment u32, slot u32, generation u64 |
| ``units`` | unit, key | last use in us u64, parent (32) |
| ``lru`` | unit, last use u64 big-endian, key | - |
| ``children`` | unit, parent (32), child (32) | - |
| ``freed`` | geometry id, segment u32 BE, slot u32 BE | generation u64 |
| ``meta`` | name | format version, boot id, whether it was closed cleanly |
| ``meta`` | ``wanted``, geometry id, segment u32 BE, 0 u32 | - |

``lru`` holds the leaves alone, those units of which no child is present, each model's in order of
use: what goes first is the first row of one of them. A unit enters it when its last child goes, as
recently used as that child was. ``children`` repeats the parents of ``units``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import cast

import lmdb

from dualpath_sglang.index.base import Freed
from dualpath_storage import Slot

FORMAT = b"2"
TABLES = ("blocks", "units", "lru", "children", "freed", "meta")

BLOCK = struct.Struct("<IIQ")
UNIT = struct.Struct("<Q32s")
TICK = struct.Struct(">Q")
FREED = struct.Struct(">16sII")
GENERATION = struct.Struct("<Q")
WANTED = b"wanted"

BLOCK_NAME_BYTES = 56
UNIT_NAME_BYTES = 40
LRU_NAME_BYTES = 48
CHILD_NAME_BYTES = 72


def table_rows(
    txn: lmdb.Transaction, table: lmdb._Database, prefix: bytes = b"", start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Rows in order of their keys, those that begin with ``prefix``, from ``start`` on."""
    cursor = txn.cursor(table)
    if cursor.set_range(max(prefix, start)):
        for name, value in cast("Iterator[tuple[bytes, bytes]]", iter(cursor)):
            if not name.startswith(prefix):
                return
            yield name, value


def lru_name(unit_key: bytes, when: int) -> bytes:
    """The name of a leaf's row in ``lru``."""
    return unit_key[:8] + TICK.pack(when) + unit_key[8:]


def freed_row(name: bytes, value: bytes) -> Freed:
    """A row of ``freed``.

    Raises:
        struct.error: it is none.
    """
    geometry_id, segment, slot = FREED.unpack(name)
    return Freed(geometry_id, Slot(segment, slot), GENERATION.unpack(value)[0])


def first_fault(txn: lmdb.Transaction, tables: Mapping[str, lmdb._Database]) -> str | None:
    """What is wrong with the first row that is malformed or contradicts another; None if none is.

    Raises:
        struct.error: a row is malformed in its inside.
    """
    blocks, units, lru, children = (tables[n] for n in ("blocks", "units", "lru", "children"))
    for name, value in table_rows(txn, blocks):
        if len(name) != BLOCK_NAME_BYTES or len(value) != BLOCK.size:
            return "malformed block row"
        if txn.get(name[:UNIT_NAME_BYTES], db=units) is None:
            return "block without its unit"
    leaves = 0
    for name, value in table_rows(txn, units):
        if len(name) != UNIT_NAME_BYTES:
            return "malformed unit row"
        listed = txn.get(lru_name(name, UNIT.unpack(value)[0]), db=lru) is not None
        if listed != (next(table_rows(txn, children, name), None) is None):
            return "wrong order of use"
        leaves += listed
    if leaves != sum(1 for _ in table_rows(txn, lru)):
        return "stray row in the order of use"
    for name, _ in table_rows(txn, children):
        if len(name) != CHILD_NAME_BYTES:
            return "malformed child row"
        child = txn.get(name[:8] + name[UNIT_NAME_BYTES:], db=units)
        if child is None or UNIT.unpack(child)[1] != name[8:UNIT_NAME_BYTES]:
            return "stray child row"
    for name, value in table_rows(txn, tables["freed"]):
        freed_row(name, value)
    return None
