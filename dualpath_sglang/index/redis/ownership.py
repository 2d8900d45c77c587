"""Who owns each segment. It outlives the index: an emptied one does not make files anybody's.

| key of a store | type | what |
|---|---|---|
| ``:owners`` | hash | by geometry id and segment: machine (16) and name; empty when given up |
| ``:alive`` | hash | by machine and name of an owner: when it was heard of (ms) |

A segment changes hands in one script. Who takes one also has the lock of its file: on one machine
that lock tells who lives. On others an owner must have been silent for its lease. A segment that
is nobody's may belong to somebody who has not said so yet, or whose word Redis has lost: whoever
wants it must have seen for a lease that nobody claims it.
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
from dualpath_storage import Geometry

SETTLE_S = 30.0
"""So long one must have been in touch to judge others: when Redis is back, all need a moment."""
_GAP_S = 5.0
"""Without contact for so long, others may have been without it as well."""
_MOST_UNCLAIMED = 1 << 16
_MACHINE_BYTES = 16
_NAME = struct.Struct(">16sI")
_OWN = Script.of("clock", "own")
_DISOWN = Script.of("disown")
_OWNERS = Script.of("clock", "owners")
_INHERIT = Script.of("clock", "inherit")
_OTHERS, _OURS, _NOBODYS = b"01?"


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
        self._keys = [access.key(name) for name in ("owners", "alive")]
        self._contact = (-math.inf, -math.inf)
        self._unclaimed: dict[bytes, float] = {}

    def heard(self) -> None:
        """Redis answered just now."""
        since, last = self._contact
        now = time.monotonic()
        self._contact = (since if now - last < _GAP_S else now, now)

    def _in_touch_since(self) -> float:
        since, last = self._contact
        return since if time.monotonic() - last < _GAP_S else math.inf

    def keep(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("keep", geometry_id, segments, timeout_s)

    def take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("take", geometry_id, segments, timeout_s)

    def may_take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own("ask", geometry_id, segments, timeout_s)

    def _own(
        self, mode: str, geometry_id: bytes, segments: Sequence[int], timeout_s: float
    ) -> list[bool]:
        now, since = time.monotonic(), self._in_touch_since()
        lease_s = self._owner.lease_s
        names = [_NAME.pack(geometry_id, segment) for segment in segments]
        runs = []
        for part in batches(len(names)):
            seen = [
                now - max(since, self._unclaimed.get(name, math.inf)) >= lease_s
                for name in names[part]
            ]
            arguments = (
                *(mode, self._me, round(1000 * lease_s)),
                b"".join(names[part]),
                int(now - since >= SETTLE_S),
                "".join("1" if long else "0" for long in seen),
            )
            runs.append(Run(_OWN, self._keys, arguments))
        replies = self._call(runs, timeout_s)
        flags = [flag for reply in replies for flag in reply]
        for name, flag in zip(names, flags, strict=True):
            if flag == _NOBODYS and len(self._unclaimed) < _MOST_UNCLAIMED:
                self._unclaimed.setdefault(name, now)
            elif flag == _OTHERS or mode == "take":
                self._unclaimed.pop(name, None)
        return [flag == _OURS for flag in flags]

    def give_up(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        names = [_NAME.pack(geometry_id, segment) for segment in segments]
        runs = [
            Run(_DISOWN, self._keys[:1], [self._me, b"".join(names[part])])
            for part in batches(len(names))
        ]
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

    def inherit(
        self, name: str, silent_s: float, timeout_s: float
    ) -> list[tuple[bytes, int]] | None:
        run = Run(_INHERIT, self._keys, [self._me, name, round(1000 * silent_s)])
        (packed,) = self._call([run], timeout_s)
        if packed == 0:
            return None
        return [(geometry_id, segment) for geometry_id, segment in _NAME.iter_unpack(packed)]

    def forget_lost(self, geometry: Geometry, there: set[int], timeout_s: float) -> None:
        lost = [
            number
            for (geometry_id, number), owner in self.owners(timeout_s).items()
            if geometry_id == geometry.id_bytes
            and number not in there
            and owner.silent_s >= self._owner.lease_s
        ]
        self.forget(geometry.id_bytes, lost, timeout_s)

    def _call(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        if not calls:
            return []
        return self._access.call_store(calls, time.monotonic() + timeout_s)


def _unpacked(name: bytes) -> tuple[bytes, int]:
    geometry_id, segment = _NAME.unpack(name)
    return geometry_id, segment
