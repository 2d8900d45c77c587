"""Who must go when the capacity is full: pages by last use, segments between geometries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dualpath_sglang.index import Freed, Index
from dualpath_sglang.stats import Counters
from dualpath_storage import Geometry, Space
from dualpath_storage.backends import Backend
from dualpath_storage.space import segment_path

logger = logging.getLogger(__name__)

_RECLAIM_EVERY_S = 1.0
_SIZES_EVERY_S = 10.0


class Evictable(Protocol):
    """What the evictor needs of an attached pool."""

    @property
    def geometry(self) -> Geometry: ...

    def take_back(self, freed: Sequence[Freed]) -> None: ...

    def give_up_empty(self, keep: int) -> int: ...


class Evictor:
    """Frees slots for the pools of one root.

    Args:
        space: the root's capacity.
        backend: to take over segments whose owner is gone.
        pools: the pools attached in this process.
        geometries: every geometry under the root.
        counters: where evictions are counted.
        promised: pages (unit and key) that must stay for now.
    """

    def __init__(
        self,
        space: Space,
        backend: Backend,
        pools: Callable[[], Sequence[Evictable]],
        geometries: Callable[[], Sequence[Geometry]],
        counters: Counters,
        promised: Callable[[], frozenset[bytes]] = frozenset,
    ) -> None:
        self._space = space
        self._backend = backend
        self._pools = pools
        self._geometries = geometries
        self._counters = counters
        self._promised = promised
        self._known: dict[bytes, Geometry] = {}
        self._known_at = float("-inf")
        self._reclaimed_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def evict(self, index: Index, need_bytes: int, deadline: float) -> list[Freed]:
        """Take out least recently used pages, leaves first, until ``need_bytes`` are free.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        sizes = {gid: g.slot_bytes for gid, g in self._by_id().items()}
        left = max(0.1, deadline - time.monotonic())
        return self._note(index.evict(sizes, need_bytes, left, keep=self._promised()))

    def reclaim(self, index: Index, geometry: Geometry, deadline: float) -> bool:
        """Free the least recently used segment of another geometry; whether its file is gone.

        Pages alone cannot do this: a freed slot serves only blocks of its own geometry.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        with self._lock:
            last = self._reclaimed_at.get(geometry.id, float("-inf"))
            if time.monotonic() - last < _RECLAIM_EVERY_S:
                return False
            self._reclaimed_at[geometry.id] = time.monotonic()
        uses = index.segment_uses()
        others = [name for name in uses if name[0] != geometry.id_bytes]
        if not others:
            return self._give_up(geometry)
        victim = min(others, key=lambda name: uses[name])
        left = max(0.1, deadline - time.monotonic())
        self._note(index.evict_segment(victim[0], victim[1], left, keep=self._promised()))
        return self._give_up(geometry) or self._remove_orphan(victim)

    def relieve(self) -> None:
        """Give up spare empty segments when others cannot get one."""
        for pool in self._pools():
            if not self._space.fits(self._space.segment_bytes(pool.geometry)):
                pool.give_up_empty(keep=1)

    def _give_up(self, geometry: Geometry) -> bool:
        others = (pool for pool in self._pools() if pool.geometry.id != geometry.id)
        return sum(pool.give_up_empty(keep=0) for pool in others) > 0

    def _remove_orphan(self, name: tuple[bytes, int]) -> bool:
        path = segment_path(self._space.root / name[0].hex(), name[1])
        try:
            file = self._backend.lock(path)
        except OSError as error:
            logger.warning("Cannot remove segment %s: %s", path, error)
            return False
        if file is None:
            return False
        path.unlink(missing_ok=True)
        file.close()
        return True

    def _note(self, freed: list[Freed]) -> list[Freed]:
        for pool in self._pools():
            pool.take_back(freed)
        self._counters.add("evicted_blocks", len(freed))
        return freed

    def _by_id(self) -> dict[bytes, Geometry]:
        with self._lock:
            now = time.monotonic()
            if now - self._known_at > _SIZES_EVERY_S:
                self._known.update({g.id_bytes: g for g in self._geometries()})
                self._known_at = now
            self._known.update({p.geometry.id_bytes: p.geometry for p in self._pools()})
            return dict(self._known)
