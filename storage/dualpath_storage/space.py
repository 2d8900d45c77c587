"""How much of the file system the store may take. Segments are reserved whole, before writing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dualpath_storage.errors import StoreError
from dualpath_storage.geometry import Geometry, align_up
from dualpath_storage.locks import file_lock
from dualpath_storage.options import MIB, StoreOptions
from dualpath_storage.paths import GEOMETRY_FILE, every_segment
from dualpath_storage.quotas import Quotas

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * MIB
_MAX_SEGMENTS = 1024
"""All segments stay open: a large store gets larger segments, not more of them."""
_INDEX_BYTES = 2 * MIB
_INDEX_SHARE = 64
"""What a segment leaves of the file system: an index that cannot grow finds none of its blocks."""


class Space:
    """Capacity of one root, shared by all processes that use it."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self.root = options.root
        self._quotas = Quotas(options.root)
        self._namespaces: dict[Path, str | None] = {}
        self._noted: set[str] = set()

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that segment files may take together."""
        if self._options.capacity_bytes is not None:
            return self._options.capacity_bytes
        stat = os.statvfs(self.root)
        return int(stat.f_blocks * stat.f_frsize * self._options.capacity_fraction)

    def used_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(size for _, size in self.segments())

    def segments(self) -> Iterator[tuple[Path, int]]:
        """Every segment file under the root, with its size in bytes."""
        # Also those whose geometry nobody can read: they take room all the same.
        for path in every_segment(self.root):
            with contextlib.suppress(OSError):
                yield path, path.stat().st_size

    def usage(self) -> dict[str, int]:
        """Bytes of the segment files of each namespace, of those whose geometry can be read."""
        used: dict[str, int] = {}
        for path, size in self.segments():
            namespace = self._namespace(path.parent)
            if namespace is not None:
                used[namespace] = used.get(namespace, 0) + size
        return used

    def _namespace(self, directory: Path) -> str | None:
        if self._namespaces.get(directory) is None:
            try:
                text = (directory / GEOMETRY_FILE).read_text(errors="replace")
                self._namespaces[directory] = Geometry.from_json(text).namespace
            except (OSError, StoreError):
                return None
        return self._namespaces[directory]

    def quotas(self) -> Mapping[str, int]:
        """Most bytes that the segment files of a namespace may take, where that is limited."""
        return self._quotas.all()

    def at_quota(self, geometry: Geometry) -> bool:
        """Whether one more segment would be more than the geometry's namespace may have."""
        return self._exceeds_quota(geometry.namespace, self.segment_bytes(geometry))

    def _exceeds_quota(self, namespace: str, size: int) -> bool:
        quota = self.quotas().get(namespace)
        return quota is not None and self.usage().get(namespace, 0) + size > quota

    def segment_bytes(self, geometry: Geometry) -> int:
        """Size of a new segment: a small part of the capacity or quota, and at least one slot."""
        slot = geometry.slot_bytes
        if self._options.segment_bytes is not None:
            return max(self._options.segment_bytes, slot)
        capacity = self.capacity_bytes
        capacity = min(capacity, self.quotas().get(geometry.namespace, capacity))
        size = min(_SEGMENT_BYTES, max(capacity // 64, 16 * slot), max(capacity // 4, slot))
        exact = max(size, capacity // _MAX_SEGMENTS, slot) // slot * slot
        rounded = align_up(exact, MIB)
        return rounded if exact >= MIB and rounded <= capacity // 4 else exact

    def fits(self, size: int, namespace: str | None = None) -> bool:
        """Whether one more segment of ``size`` bytes keeps all limits. Call it reserved.

        Args:
            namespace: whose quota counts too.
        """
        if namespace is not None and self._exceeds_quota(namespace, size):
            self._note(f"the quota of the namespace {namespace}")
            return False
        if self.used_bytes() + size > self.capacity_bytes:
            self._note("its capacity")
            return False
        stat = os.statvfs(self.root)
        floor = stat.f_blocks * stat.f_frsize * self._options.min_free_fraction
        floor = max(floor, _INDEX_BYTES + size // _INDEX_SHARE)
        if stat.f_bavail * stat.f_frsize - size < floor:
            self._note("the file system's share that stays free")
            return False
        return True

    def excess_bytes(self) -> int:
        """Bytes that the store should give back: its capacity may be smaller by now, or others may
        have taken what was to stay free.

        Raises:
            OSError: the root is gone.
        """
        stat = os.statvfs(self.root)
        floor = stat.f_blocks * stat.f_frsize * self._options.min_free_fraction
        short = int(floor) - stat.f_bavail * stat.f_frsize
        used = self.used_bytes()
        return max(0, used - self.capacity_bytes, min(short, used))

    def excess_by_namespace(self) -> dict[str, int]:
        """Bytes that namespaces take beyond their quotas."""
        quotas = self.quotas()
        if not quotas:
            return {}
        over = {name: used - quotas.get(name, used) for name, used in self.usage().items()}
        return {name: excess for name, excess in over.items() if excess > 0}

    def _note(self, limit: str) -> None:
        if limit not in self._noted:
            self._noted.add(limit)
            logger.info("%s has reached %s: from now on pages are evicted", self.root, limit)

    @contextlib.contextmanager
    def reserved(self, timeout_s: float) -> Iterator[bool]:
        """Hold the root's allocation lock, so that processes check and create in turn.

        Yields:
            False when another process held it for all of ``timeout_s``.
        """
        with file_lock(self.root / ".allocate", timeout_s) as held:
            yield held
