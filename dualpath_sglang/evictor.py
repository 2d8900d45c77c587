"""Who must go when the capacity is full: pages by last use, segments between geometries."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from dualpath_sglang.index import Freed, Index
from dualpath_sglang.stats import Counters
from dualpath_storage import Geometry, Space
from dualpath_storage.backends import Backend
from dualpath_storage.paths import segment_number, segment_path

logger = logging.getLogger(__name__)

_RECLAIM_EVERY_S = 1.0
_SIZES_EVERY_S = 10.0
_WORD_S = 1.0


class Evictable(Protocol):
    """What the evictor needs of an attached pool."""

    @property
    def geometry(self) -> Geometry: ...

    def take_back(self, freed: Sequence[Freed]) -> None: ...

    def retire(self, segment: int) -> None: ...

    def give_up_empty(
        self, index: Index, timeout_s: float, *, retired: bool = False, keep: int = 0
    ) -> int: ...


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
        self._reclaim_after: dict[str, float] = {}
        self._shrink_after = float("-inf")
        self._lock = threading.Lock()

    def evict(
        self,
        index: Index,
        need_bytes: int,
        deadline: float,
        *,
        keep: tuple[bytes, bytes] | None = None,
        prefer: Collection[tuple[bytes, int]] | None = None,
        namespace: str | None = None,
    ) -> list[Freed]:
        """Take out least recently used pages, leaves first, until ``need_bytes`` are free.

        Args:
            keep, prefer: see :meth:`Index.evict`.
            namespace: only pages of this one; of all by default.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        known = self._by_id()
        sizes = {gid: g.slot_bytes for gid, g in known.items()}
        models = None
        if namespace is not None:
            models = {g.unit for g in known.values() if g.namespace == namespace}
        return self._note(
            index.evict(
                sizes,
                need_bytes,
                _left(deadline),
                keep=keep,
                prefer=prefer,
                promised=self._promised(),
                models=models,
            )
        )

    def tight(self, geometry: Geometry) -> str | None:
        """The namespace in which room must be made for a geometry; None for the whole store."""
        return geometry.namespace if self._space.at_quota(geometry) else None

    def reclaim(
        self,
        index: Index,
        geometry: Geometry,
        own: Sequence[int],
        deadline: float,
        *,
        keep: tuple[bytes, bytes] | None = None,
        namespace: str | None = None,
    ) -> bool:
        """Free the least recently used segment that the caller does not own.

        Pages alone cannot do this: a freed slot serves only its segment's owner. A living owner
        in another process gives the file up at its next upkeep.

        Args:
            own: the caller's segments, of ``geometry``.
            keep, namespace: as in :meth:`evict`.

        Returns:
            Whether a file is gone already.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        began = time.monotonic()
        with self._lock:
            if began < self._reclaim_after.get(geometry.id, began):
                return False
            self._reclaim_after[geometry.id] = float("inf")
        try:
            return self._reclaim(index, geometry, own, deadline, keep, namespace)
        finally:
            # To look at every block of a large index costs seconds of CPU.
            pause_s = max(_RECLAIM_EVERY_S, 10 * (time.monotonic() - began))
            with self._lock:
                self._reclaim_after[geometry.id] = time.monotonic() + pause_s

    def _reclaim(
        self,
        index: Index,
        geometry: Geometry,
        own: Sequence[int],
        deadline: float,
        keep: tuple[bytes, bytes] | None,
        namespace: str | None,
    ) -> bool:
        mine = {(geometry.id_bytes, number) for number in own}
        uses = index.segment_uses()
        others = [name for name in self._segments(namespace) if name not in mine]
        for name in others:
            if name not in uses and self._remove(index, name, deadline):
                return True
        kept = set() if keep is None else index.chain_segments(*keep)
        used = [name for name in others if name in uses and name not in kept]
        if not used:
            return False
        return self._empty(index, min(used, key=lambda name: uses[name]), deadline)

    def _empty(self, index: Index, name: tuple[bytes, int], deadline: float) -> bool:
        """Take out what is in a segment; whether its file is gone already."""
        for pool in self._pools():
            if pool.geometry.id_bytes == name[0]:
                pool.retire(name[1])
        promised = self._promised()
        self._note(index.evict_segment(name[0], name[1], _left(deadline), promised=promised))
        return self._remove(index, name, deadline)

    def shrink(self, index: Index, timeout_s: float) -> None:
        """Free least recently used segments as long as store or tenants take more than they may.

        Raises:
            IndexUnavailableError: the index cannot answer now.
            OSError: the root is gone.
        """
        began = time.monotonic()
        if began < self._shrink_after:
            return
        over: list[tuple[str | None, int]] = [*self._space.excess_by_namespace().items()]
        for namespace, excess in (*over, (None, self._space.excess_bytes())):
            if excess > 0:
                self._shrink(index, excess, namespace, began + timeout_s)
        # Others give their files up some time; meanwhile each look costs as much as this one.
        self._shrink_after = began + 10 * (time.monotonic() - began)

    def _shrink(self, index: Index, excess: int, namespace: str | None, deadline: float) -> None:
        sizes = self._segments(namespace)
        uses = index.segment_uses()
        for name in sorted(sizes, key=lambda name: uses.get(name, 0)):
            if excess <= 0 or time.monotonic() >= deadline:
                break
            # One without blocks that is not ours goes at its owner's next upkeep.
            if name in uses:
                self._empty(index, name, deadline)
            else:
                self._remove(index, name, deadline)
            excess -= sizes[name]

    def relieve(self, index: Index, timeout_s: float) -> None:
        """Give up spare empty segments when others cannot get one.

        Raises:
            IndexUnavailableError: the index cannot answer now.
            OSError: the root is gone.
        """
        for pool in self._pools():
            size = self._space.segment_bytes(pool.geometry)
            if not self._space.fits(size, pool.geometry.namespace):
                pool.give_up_empty(index, timeout_s, keep=1)

    def remove_orphans(self, index: Index, geometry: Geometry, deadline: float) -> None:
        """Remove the segments of a geometry that hold no block and have no owner.

        Raises:
            IndexUnavailableError: the index cannot answer now.
        """
        uses = index.segment_uses()
        for name in self._segments():
            if name[0] == geometry.id_bytes and name not in uses:
                self._remove(index, name, deadline)

    def _segments(self, namespace: str | None = None) -> dict[tuple[bytes, int], int]:
        """Bytes of every segment on disk, or of a namespace's, by geometry id and number."""
        known = {} if namespace is None else self._by_id()
        sizes = {}
        for path, size in self._space.segments():
            number = segment_number(path)
            with contextlib.suppress(ValueError):
                gid = bytes.fromhex(path.parent.name)
                ours = namespace is None or (gid in known and known[gid].namespace == namespace)
                if number is not None and len(gid) == 16 and ours:
                    sizes[gid, number] = size
        return sizes

    def _remove(self, index: Index, name: tuple[bytes, int], deadline: float) -> bool:
        """Remove a segment without blocks; False when a living process owns it or it has some."""
        for pool in self._pools():
            if pool.geometry.id_bytes == name[0] and pool.give_up_empty(
                index, _left(deadline), retired=True
            ):
                return True
        path = segment_path(self._space.root / name[0].hex(), name[1])
        try:
            if not index.ownership.may_take(name[0], [name[1]], _WORD_S)[0]:
                return False
            file = self._backend.lock(path)
            if file is None:
                return False
            try:
                if not index.ownership.take(name[0], [name[1]], _WORD_S)[0]:
                    return False
                path.unlink()
            finally:
                file.close()
        except FileNotFoundError:  # its owner was faster
            index.ownership.forget(name[0], [name[1]], _left(deadline))
            return True
        except OSError as error:
            logger.warning("Cannot remove segment %s: %s", path, error)
            index.ownership.give_up(name[0], [name[1]], _WORD_S)
            return False
        index.forget_segments(name[0], [name[1]], _left(deadline))
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


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
