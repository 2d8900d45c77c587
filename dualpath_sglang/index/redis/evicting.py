"""Eviction over the models of a store: each has its own order of use, merged here.

Between models the order is kept to within :data:`_SLACK_US`, so that two of them that are used at
once do not cost a round trip a page.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

from dualpath_sglang.index.base import Freed, IndexUnavailableError
from dualpath_sglang.index.passes import most_passes
from dualpath_sglang.index.redis.access import Access
from dualpath_sglang.index.redis.client import Script
from dualpath_storage import Slot

_EVICT = Script.of("begin", "names", "units", "pages", "evict")
_HEAD = Script.of("begin", "head")
_FREED = struct.Struct(">16sIIQ")
_SIZE = struct.Struct(">16sQ")
_PREFERRED = struct.Struct(">16sI")
_MOST = 4096
_MOST_A_CALL = 128
_SLACK_US = 1_000_000


def freed_rows(packed: bytes) -> list[Freed]:
    """What a script says that it took out."""
    return [
        Freed(geometry_id, Slot(segment, slot), generation)
        for geometry_id, segment, slot, generation in _FREED.iter_unpack(packed)
    ]


@dataclass(slots=True)
class _Order:
    """Where the order of use of a model stands.

    Args:
        at: use (us) that the eviction has come to.
        skip: leaves from there on that were passed over.
        head: use of the next leaf to look at; None when there is none.
    """

    unit: bytes
    at: int = 0
    skip: int = 0
    head: int | None = None

    @property
    def rank(self) -> tuple[int, bytes]:
        assert self.head is not None
        return self.head, self.unit


class Eviction:
    """One call of :meth:`RedisIndex.evict`.

    Args:
        end: monotonic seconds.
    """

    def __init__(
        self,
        access: Access,
        size: dict[bytes, int],
        keep: tuple[bytes, bytes] | None,
        promised: Collection[bytes],
        models: Collection[bytes] | None,
        end: float,
    ) -> None:
        self._access = access
        self._sizes = b"".join(_SIZE.pack(*row) for row in size.items())
        self._keep = keep
        self._models = models
        self._stay: dict[bytes, list[bytes]] = {}
        for name in promised:
            self._stay.setdefault(name[:8], []).append(name[8:])
        self._end = end
        self.refused = False
        """Whether the key to be kept was not there."""

    def run(self, need_bytes: int, prefer: Collection[tuple[bytes, int]] | None) -> list[Freed]:
        """Take out what is to go; what was taken out before a failure counts as well."""
        freed: list[Freed] = []
        try:
            self._run(need_bytes, prefer, freed)
        except IndexUnavailableError:
            if not freed:
                raise
        return freed

    def _run(
        self, need: int, prefer: Collection[tuple[bytes, int]] | None, freed: list[Freed]
    ) -> None:
        units = self._access.units(self._end)
        orders = [_Order(unit) for unit in units if self._models is None or unit in self._models]
        if self._keep is not None:  # before anything of another model goes
            unit = self._keep[0]
            orders.sort(key=lambda order: order.unit != unit)
            if not orders or orders[0].unit != unit:
                self.refused = True
                return
        leaves = sum(self._look(order) for order in orders)
        left = most_passes(leaves)
        preferred = b"".join(_PREFERRED.pack(*name) for name in prefer or ())
        while need > 0 and len(freed) < _MOST and left >= 0 and not self.refused:
            ready = sorted((o for o in orders if o.head is not None), key=lambda o: o.rank)
            if not ready:
                return
            order, others = ready[0], ready[1:]
            last = "+inf"
            if others:
                bound = others[0].rank
                first = order.unit < bound[1] or _SLACK_US > 0
                last = f"{'' if first else '('}{bound[0] + _SLACK_US}"
            arguments = (
                order.at,
                order.skip,
                last,
                need,
                min(_MOST_A_CALL, _MOST - len(freed)),
                left,
                self._kept(order),
                b"".join(self._stay.get(order.unit, ())),
                self._sizes,
                int(prefer is not None),
                preferred,
            )
            replies = self._access.run(order.unit, _EVICT, [arguments], self._end)
            if replies is None:
                order.head = None
                continue
            if replies[0] == 1:
                self.refused = True
                return
            packed, got, passed, where, skip = replies[0]
            freed += freed_rows(packed)
            need -= int(got)
            left = int(passed)
            order.skip = int(skip)
            if need <= 0:
                return
            if packed:
                order.at = int(float(where))
                for other in others:
                    self._catch_up(other, order.at)
            self._look(order)

    def _catch_up(self, order: _Order, at: int) -> None:
        """A page of another model went that was used at ``at``."""
        if order.head is None:
            return
        order.at = min(at, order.head)
        if order.skip:
            order.skip = 0
            self._look(order)

    def _kept(self, order: _Order) -> bytes:
        kept = self._keep
        return kept[1] if kept is not None and kept[0] == order.unit else b""

    def _look(self, order: _Order) -> int:
        """Find the head of a model's order; how many leaves it has."""
        kept = self._kept(order)
        replies = self._access.run(order.unit, _HEAD, [(order.at, order.skip, kept)], self._end)
        if replies is None:
            order.head = None
            return 0
        if replies[0] == 1:
            self.refused = True
            return 0
        head, leaves = replies[0]
        order.head = int(float(head)) if head else None
        return int(leaves)
