"""Walks over all rows, a few hundred at a time, so that Redis serves others in between."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

from dualpath_sglang.index.base import Entry
from dualpath_sglang.index.redis.access import Access
from dualpath_sglang.index.redis.client import Script
from dualpath_storage import Geometry, Placement

_WALK = Script.of("begin", "names", "walk")
_SURVEY = Script.of("begin", "names", "survey")
_CHAIN = Script.of("begin", "names", "chain")
_ENTRY = struct.Struct(">32s32sQ16sIIQ")
_SURVEYED = struct.Struct(">16sIIQ")
_SEGMENT = struct.Struct(">16sI")
_STEP = 512
_CHAIN_STEP = 1024


def entries(access: Access, geometry: Geometry | None, timeout_s: float) -> Iterator[Entry]:
    """All rows, each once.

    Args:
        timeout_s: for each step.

    Raises:
        IndexUnavailableError: also in the middle.
    """
    units = access.units(time.monotonic() + timeout_s) if geometry is None else [geometry.unit]
    only = b"" if geometry is None else geometry.id_bytes
    for unit in units:
        yield from _unit_entries(access, unit, only, timeout_s)


def _unit_entries(
    access: Access, unit: bytes, geometry_id: bytes, timeout_s: float
) -> Iterator[Entry]:
    cursor = b"0"
    seen: set[bytes] = set()  # while a hash grows, a walk may meet a row twice
    while True:
        end = time.monotonic() + timeout_s
        replies = access.run(unit, _WALK, [(cursor, _STEP, geometry_id)], end)
        if replies is None:
            return
        cursor, packed = replies[0]
        met: set[bytes] = set()
        for key, parent, used, name, segment, slot, generation in _ENTRY.iter_unpack(packed):
            if key in seen:
                continue
            met.add(key)
            yield Entry(unit, key, name, Placement(segment, slot, generation), used, parent)
        if cursor == b"0":
            return
        seen |= met


def survey(access: Access, timeout_s: float) -> Iterator[tuple[bytes, int, int, int]]:
    """(Geometry id, segment, blocks, newest use in us), segments more than once.

    Args:
        timeout_s: for each step.
    """
    for unit in access.units(time.monotonic() + timeout_s):
        cursor = b"0"
        while True:
            end = time.monotonic() + timeout_s
            replies = access.run(unit, _SURVEY, [(cursor, _STEP)], end)
            if replies is None:
                break
            cursor, packed = replies[0]
            yield from _SURVEYED.iter_unpack(packed)
            if cursor == b"0":
                break


def chain_segments(
    access: Access, unit: bytes, key: bytes, timeout_s: float
) -> set[tuple[bytes, int]]:
    """See :meth:`Index.chain_segments`."""
    found: set[tuple[bytes, int]] = set()
    seen: set[bytes] = set()
    while key and key not in seen:
        seen.add(key)
        end = time.monotonic() + timeout_s
        replies = access.run(unit, _CHAIN, [(key, _CHAIN_STEP)], end)
        if replies is None:
            break
        key, packed = replies[0]
        found.update(_SEGMENT.iter_unpack(packed))
    return found


def descent(
    access: Access, unit: bytes, geometry_id: bytes, segment: int, end: float
) -> list[bytes]:
    """Pages with a block in a segment and all that descend from them, children first."""
    children: dict[bytes, set[bytes]] = {}
    doomed: list[bytes] = []
    for entry in _unit_entries(access, unit, b"", max(0.001, end - time.monotonic())):
        children.setdefault(entry.parent, set()).add(entry.key)
        if entry.geometry_id == geometry_id and entry.placement.segment == segment:
            doomed.append(entry.key)
    known: set[bytes] = set()
    ordered: list[bytes] = []
    # Each page is written down after all that descend from it.
    stack = [(key, False) for key in doomed]
    while stack:
        key, done = stack.pop()
        if done:
            ordered.append(key)
        elif key not in known:
            known.add(key)
            stack.append((key, True))
            stack += [(child, False) for child in children.get(key, ())]
    return ordered
