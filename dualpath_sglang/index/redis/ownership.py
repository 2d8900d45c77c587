"""Who owns each segment. It outlives the index: an emptied one does not make files anybody's.

| key of a store | type | what |
|---|---|---|
| ``:owners`` | hash | by geometry id and segment: machine (16) and name; empty when given up |
| ``:alive`` | hash | by machine and name of an owner: when it was heard of (ms) |

A segment changes hands in one script. Who takes one also has the lock of its file: on one machine
that lock tells who lives. Another machine's must have been silent for a lease; and an owner that
is not noted, as after Redis lost everything, has :data:`SETTLE_S` to say that it is there.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import Any

from dualpath_sglang.index.owners import Owner, SegmentOwner
from dualpath_sglang.index.redis.access import Access, batches
from dualpath_sglang.index.redis.client import Call, Run, Script

SETTLE_S = 30.0
_GAP_S = 5.0
"""Without contact for so long, others may have been without it as well."""
_MACHINE_BYTES = 16
_NAME = struct.Struct(">16sI")
_OWN = Script.of("clock", "own")
_DISOWN = Script.of("disown")
_OWNERS = Script.of("clock", "owners")


class RedisOwnership:
    """See :class:`dualpath_sglang.index.owners.Ownership`. Thread-safe.

    Args:
        access: the keys of the store.
        owner: this process.
    """

    def __init__(self, access: Access, owner: Owner) -> None:
        self._access = access
        self._owner = owner
        self._me = owner.machine + owner.name.encode()
        self._keys = [access.key("owners"), access.key("alive")]
        self._contact = (-math.inf, -math.inf)

    def heard(self) -> None:
        """Redis answered just now."""
        since, last = self._contact
        now = time.monotonic()
        self._contact = (since if now - last < _GAP_S else now, now)

    @property
    def _settled(self) -> bool:
        since, last = self._contact
        now = time.monotonic()
        return now - last < _GAP_S and now - since >= SETTLE_S

    def keep(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("keep", geometry_id, segments, timeout_s)

    def take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("take", geometry_id, segments, timeout_s)

    def may_take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("ask", geometry_id, segments, timeout_s)

    def _own(
        self, mode: str, geometry_id: bytes, segments: Sequence[int], timeout_s: float
    ) -> list[bool]:
        began = time.monotonic()
        lease_ms, settled = round(1000 * self._owner.lease_s), int(self._settled)
        names = [_names(geometry_id, segments[part]) for part in batches(len(segments))]
        runs = [Run(_OWN, self._keys, [mode, self._me, lease_ms, n, settled]) for n in names]
        if not runs:
            return []
        replies = self._call(runs, timeout_s)
        if mode != "ask":
            self._owner.renewed(began)
        return [flag == 0x31 for reply in replies for flag in reply]

    def give_up(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        runs = [
            Run(_DISOWN, self._keys, [self._me, _names(geometry_id, segments[part])])
            for part in batches(len(segments))
        ]
        if runs:
            self._call(runs, timeout_s)

    def forget(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        fields = [_NAME.pack(geometry_id, segment) for segment in segments]
        if fields:
            self._call([("HDEL", self._keys[0], *fields)], timeout_s)

    def owners(self, timeout_s: float) -> dict[tuple[bytes, int], SegmentOwner]:
        ((rows, heard),) = self._call([Run(_OWNERS, self._keys, [])], timeout_s)
        silent = dict(zip(heard[::2], heard[1::2], strict=True))
        return {
            _unpacked(name): SegmentOwner(
                owner[_MACHINE_BYTES:].decode(errors="replace"),
                int(silent[owner]) / 1000 if owner in silent else math.inf,
            )
            for name, owner in zip(rows[::2], rows[1::2], strict=True)
        }

    def vacate(self, name: str, timeout_s: float) -> int:
        (rows,) = self._call([("HGETALL", self._keys[0])], timeout_s)
        known = {row for row in rows[1::2] if row[_MACHINE_BYTES:] == name.encode()}
        runs = [Run(_DISOWN, self._keys, [owner, b""]) for owner in sorted(known)]
        return sum(self._call(runs, timeout_s)) if runs else 0

    def _call(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        return self._access.call_store(calls, time.monotonic() + timeout_s)


def _names(geometry_id: bytes, segments: Sequence[int]) -> bytes:
    return b"".join(_NAME.pack(geometry_id, segment) for segment in segments)


def _unpacked(name: bytes) -> tuple[bytes, int]:
    geometry_id, segment = _NAME.unpack(name)
    return geometry_id, segment
