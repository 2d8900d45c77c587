"""How far an eviction may look for what it prefers."""

from __future__ import annotations

_MIN_PASSES, _PASS_SHARE, _MAX_PASSES = 32, 8, 1024


def most_passes(leaves: int) -> int:
    """Leaves that may be passed over for those that are preferred: a share of all."""
    return min(_MAX_PASSES, max(_MIN_PASSES, leaves // _PASS_SHARE))
