"""What the nodes of a store tell each other beside the index. What is told expires by itself.

| key of a store | type | what |
|---|---|---|
| ``:nodes`` | hash | by node: until when (ms), its report as JSON |
| ``:leases`` | hash | by name: until when (ms), the lease's number, its owner |
| ``:fences`` | hash | by name: the highest number of a lease so far |
| ``:secret`` | string | what nodes prove to each other that they know; made by the first, stays |

Times are those of Redis, so that the clocks of the nodes do not matter. Claims stand with the
model's keys, and the rest with the store's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from dualpath_sglang.index.base import Report
from dualpath_sglang.index.redis.access import Access, batches
from dualpath_sglang.index.redis.client import Call, Run, Script
from dualpath_storage import Geometry

_CLAIM = Script.of("claim")
_RELEASE = Script.of("release")
_REPORT = Script.of("clock", "report")
_NODES = Script.of("clock", "nodes")
_LEASE = Script.of("clock", "lease")
_END_LEASE = Script.of("end_lease")


class ClusterState:
    """Claims, node reports, the secret of the nodes, and leases. Thread-safe.

    Args:
        access: the keys of the store, which the index has open.
        timeout_s: how long a call may take.

    All methods raise :class:`IndexUnavailableError`.
    """

    def __init__(self, access: Access, timeout_s: float = 1.0) -> None:
        self._access = access
        self._timeout_s = timeout_s

    # -- claims -----------------------------------------------------------------------------

    def claim(
        self, geometry: Geometry, keys: Sequence[bytes], owner: str, ttl_s: float
    ) -> list[bool]:
        """Say that blocks are about to be written; False where another does so already.

        A claim keeps nobody from publishing: it only saves writing the same block twice.

        Args:
            owner: who claims; to claim again is to renew.
            ttl_s: the claim ends after these seconds, if it is not released before.
        """
        flags: list[bool] = []
        for part in batches(len(keys)):
            run = Run(_CLAIM, self._names(geometry, keys[part]), [owner, _ms(ttl_s)])
            flags += [flag == 0x31 for flag in self._call_unit(geometry, run)]
        return flags

    def release(self, geometry: Geometry, keys: Sequence[bytes], owner: str) -> None:
        """End the claims that ``owner`` has on these."""
        for part in batches(len(keys)):
            self._call_unit(geometry, Run(_RELEASE, self._names(geometry, keys[part]), [owner]))

    def _names(self, geometry: Geometry, keys: Sequence[bytes]) -> list[str]:
        prefix = self._access.unit_key(geometry.unit, f"claim:{geometry.id}:")
        return [prefix + key.hex() for key in keys]

    def _call_unit(self, geometry: Geometry, run: Run) -> bytes:
        tag = self._access.unit_tag(geometry.unit)
        reply: bytes
        (reply,) = self._access.client.call(tag, [run], self._end())
        return reply

    # -- nodes ------------------------------------------------------------------------------

    def report(self, node: str, fields: Report, ttl_s: float) -> None:
        """Tell all others about this node, for ``ttl_s`` seconds."""
        text = json.dumps(dict(fields), sort_keys=True)
        run = Run(_REPORT, [self._access.key("nodes")], [node, _ms(ttl_s), text])
        self._access.call_store([run], self._end())

    def nodes(self) -> dict[str, Report]:
        """What every node said last, without those whose time is over."""
        run = Run(_NODES, [self._access.key("nodes")], [])
        (flat,) = self._access.call_store([run], self._end())
        pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
        reports = {node.decode(errors="replace"): _report(text) for node, text in pairs}
        return {node: report for node, report in reports.items() if report is not None}

    def secret(self, offered: bytes = b"") -> bytes:
        """The secret of the nodes, which is ``offered`` when none stands there yet.

        Whoever may use the index may read it, and nobody else. Empty when there is none.
        """
        name = self._access.key("secret")
        calls: list[Call] = [("GET", name)]
        if offered:
            calls.insert(0, ("SET", name, offered, "NX"))
        return bytes(self._access.call_store(calls, self._end())[-1] or b"")

    # -- leases -----------------------------------------------------------------------------

    def lease(self, name: str, owner: str, ttl_s: float) -> int | None:
        """Have, or go on having, what only one may have at a time.

        Returns:
            None while another has it. Else a number that stays as long as the owner renews it in
            time, and is higher for every later owner: whatever is done under a lease can be
            refused when a higher number has been seen.
        """
        keys = [self._access.key("leases"), self._access.key("fences")]
        number: int | None
        run = Run(_LEASE, keys, [name, owner, _ms(ttl_s)])
        (number,) = self._access.call_store([run], self._end())
        return number

    def end_lease(self, name: str, owner: str) -> None:
        """Let others have it now, if ``owner`` has it."""
        run = Run(_END_LEASE, [self._access.key("leases")], [name, owner])
        self._access.call_store([run], self._end())

    def _end(self) -> float:
        return time.monotonic() + self._timeout_s


def _report(text: bytes) -> Report | None:
    """What a node said; None when it is no report, for anybody may have written it."""
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
