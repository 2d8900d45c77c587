"""Looks at every row and every count of an index in Redis. For tests and tools: it must stand."""

from __future__ import annotations

import struct
import time
from collections import Counter

from dualpath_sglang.index.redis.access import Access
from dualpath_storage import NO_PARENT

_HEAD = struct.Struct("<Q32sI")
_BLOCK_BYTES = 18


def first_fault(access: Access, timeout_s: float) -> str | None:
    """What is wrong with the first row that is malformed or contradicts another; None if none is.

    Raises:
        IndexUnavailableError: Redis does not answer within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    for unit in access.units(end):
        flat, leaves, orphans = access.client.call(
            access.unit_tag(unit),
            [
                ("HGETALL", access.unit_key(unit, "rows")),
                ("ZRANGEBYSCORE", access.unit_key(unit, "lru"), 0, "+inf", "WITHSCORES"),
                ("HGETALL", access.unit_key(unit, "orphans")),
            ],
            end,
        )
        rows = dict(zip(flat[::2], flat[1::2], strict=True))
        listed = {k: int(float(s)) for k, s in zip(leaves[::2], leaves[1::2], strict=True)}
        left = {k: int(n) for k, n in zip(orphans[::2], orphans[1::2], strict=True)}
        fault = _fault(rows, listed, left)
        if fault is not None:
            return fault
    return None


def _fault(
    rows: dict[bytes, bytes], listed: dict[bytes, int], left: dict[bytes, int]
) -> str | None:
    children: Counter[bytes] = Counter()
    for key, row in rows.items():
        blocks = len(row) - _HEAD.size
        if len(key) != 32 or blocks < _BLOCK_BYTES or blocks % _BLOCK_BYTES:
            return "malformed row"
        children[_HEAD.unpack_from(row)[1]] += 1
    del children[NO_PARENT]
    leaves = {}
    for key, row in rows.items():
        used, _, count = _HEAD.unpack_from(row)
        if count != children[key]:
            return "wrong count of children"
        if count == 0:
            leaves[key] = used
    if leaves != listed:
        return "wrong order of use"
    if {key: n for key, n in children.items() if n and key not in rows} != left:
        return "wrong count of orphans"
    return None
