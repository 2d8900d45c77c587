"""The leaves of the embedded index in order of use, over any of its models."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import lmdb

from dualpath_sglang.index.rows import LRU_NAME_BYTES, TICK, table_rows

_UNIT_BYTES = 8
_TICK_END = _UNIT_BYTES + TICK.size


def models_in(txn: lmdb.Transaction, lru: lmdb._Database) -> Iterator[bytes]:
    """Every model that has leaves."""
    cursor = txn.cursor(lru)
    there = cursor.first()
    while there:
        unit = bytes(cursor.key()[:_UNIT_BYTES])
        yield unit
        after = int.from_bytes(unit, "big") + 1
        there = after < 1 << 64 and cursor.set_range(after.to_bytes(_UNIT_BYTES, "big"))


def newest_use(txn: lmdb.Transaction, lru: lmdb._Database) -> int:
    """When the leaf that was used last was used (us); 0 without any."""
    newest = 0
    cursor = txn.cursor(lru)
    for unit in list(models_in(txn, lru)):
        after = int.from_bytes(unit, "big") + 1
        past = after < 1 << 64 and cursor.set_range(after.to_bytes(_UNIT_BYTES, "big"))
        if cursor.prev() if past else cursor.last():
            newest = max(newest, TICK.unpack(cursor.key()[_UNIT_BYTES:_TICK_END])[0])
    return newest


@dataclass(slots=True)
class _Order:
    """Where the order of one model stands.

    Args:
        start: where to look for its next leaf.
        head: the name of that row; empty when there is none.
    """

    unit: bytes
    start: bytes
    head: bytes = b""

    @property
    def rank(self) -> bytes:
        return self.head[_UNIT_BYTES:_TICK_END] + self.unit


class Leaves:
    """The leaves that may go, one by one, while the caller takes some of them out.

    Args:
        models: whose; all by default.
    """

    def __init__(
        self, txn: lmdb.Transaction, lru: lmdb._Database, models: Collection[bytes] | None
    ) -> None:
        self._txn = txn
        self._lru = lru
        units = [u for u in models_in(txn, lru) if models is None or u in models]
        self._orders = [_Order(unit, unit) for unit in units]
        for order in self._orders:
            self._look(order)

    def first(self) -> bytes:
        """The unit (and key) that was used least recently; empty when none is left.

        Raises:
            ValueError: a row is malformed.
        """
        if not (ready := [order for order in self._orders if order.head]):
            return b""
        head = min(ready, key=lambda order: order.rank).head
        if len(head) != LRU_NAME_BYTES:
            raise ValueError("malformed row")
        return head[:_UNIT_BYTES] + head[_TICK_END:]

    def passed(self, unit_key: bytes) -> None:
        """The first was left where it is."""
        order = self._order(unit_key)
        order.start = order.head + b"\0"
        self._look(order)

    def taken(self, unit_key: bytes) -> None:
        """The first was taken out: its parent may be a leaf now, as recent as it was."""
        tick = self._order(unit_key).head[_UNIT_BYTES:_TICK_END]
        for order in self._orders:
            start = order.unit + tick
            if order.unit == unit_key[:_UNIT_BYTES] or order.start > start:
                order.start = start
                self._look(order)

    def _order(self, unit_key: bytes) -> _Order:
        return next(o for o in self._orders if o.unit == unit_key[:_UNIT_BYTES])

    def _look(self, order: _Order) -> None:
        row = next(table_rows(self._txn, self._lru, order.unit, order.start), None)
        order.head = b"" if row is None else row[0]
