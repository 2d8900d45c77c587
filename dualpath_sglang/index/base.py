"""The metadata index: which block lies where, when it was last used, and what may go first.

A *unit* is what a page is to eviction: all blocks with one key under one model, that is every
shard and every side pool. Units form chains by their parents; a unit goes only after its children.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dualpath_sglang.index.owners import Ownership
from dualpath_storage import Geometry, Placement, Slot

Report: TypeAlias = Mapping[str, "str | int | float | bool"]
"""What a node tells the others about itself."""


@dataclass(frozen=True, slots=True)
class Record:
    """A block to publish."""

    key: bytes
    parent: bytes
    placement: Placement


@dataclass(frozen=True, slots=True)
class Freed:
    """A block that was taken out of the index: its slot may be reused by the segment's owner."""

    geometry_id: bytes
    slot: Slot
    generation: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the index, as ``inspect`` and ``verify`` see it."""

    unit: bytes
    key: bytes
    geometry_id: bytes
    placement: Placement
    last_used_us: int
    parent: bytes


class IndexUnavailableError(Exception):
    """The index cannot answer now; the caller says miss, and tries again at its next call."""


class IndexDamagedError(IndexUnavailableError):
    """The index is gone, cut short or not an index: it must be rebuilt from the store."""


class IndexMisconfiguredError(IndexUnavailableError):
    """The index is set up so that it cannot be relied on; only its operator can help."""


class Index(Protocol):
    """One interface for all implementations. All may raise :class:`IndexUnavailableError`."""

    name: str
    shared: bool
    """Whether other machines use it, so that their nodes want to know of ours."""
    ownership: Ownership

    def present(self, unit: bytes, key: bytes) -> bool:
        """Whether any block of a unit is there."""
        ...

    def lookup(self, geometry: Geometry, keys: Sequence[bytes]) -> list[Placement | None]:
        """Placements of the keys, None for those that are absent. One round trip."""
        ...

    def prefix(self, geometry: Geometry, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys that are present. One round trip."""
        ...

    def claim(
        self, geometry: Geometry, keys: Sequence[bytes], owner: str, ttl_s: float
    ) -> list[bool]:
        """Say that blocks are about to be written; False where another process does so already.

        It only saves writing a block twice, and ends after ``ttl_s`` seconds by itself.
        """
        ...

    def release(self, geometry: Geometry, keys: Sequence[bytes], owner: str) -> None:
        """End the claims that ``owner`` has on these."""
        ...

    def publish(
        self, geometry: Geometry, records: Sequence[Record], timeout_s: float
    ) -> list[bool]:
        """Make written blocks findable, a chain in order; False where another block stands."""
        ...

    def remove(
        self, geometry: Geometry, blocks: Sequence[tuple[bytes, int]], timeout_s: float
    ) -> list[Freed]:
        """Take out (key, generation) pairs, each only if it is still the one that stands."""
        ...

    def touch(self, unit: bytes, chain: Sequence[bytes], timeout_s: float) -> None:
        """Note the use of a chain of keys, parents first."""
        ...

    def evict(
        self,
        size: dict[bytes, int],
        need_bytes: int,
        timeout_s: float,
        *,
        keep: tuple[bytes, bytes] | None = None,
        prefer: Collection[tuple[bytes, int]] | None = None,
        promised: Collection[bytes] = (),
        models: Collection[bytes] | None = None,
    ) -> list[Freed]:
        """Take out least recently used units, leaves first, until ``need_bytes`` are free.

        Args:
            size: slot bytes by geometry id (16 bytes); unknown ones count as nothing.
            models: only pages of these (:attr:`Geometry.unit`); all by default.
            prefer: (geometry id, segment) whose slots are of use to the caller. Units without a
                block there are passed over, but only if others are not much more recently used.
            keep: (unit, key) for whose children room is made: it and its ancestors stay, and
                nothing is taken out when it is not there itself.
            promised: names (unit and key) of units that stay, and so their ancestors.
        """
        ...

    def evict_segment(
        self,
        geometry_id: bytes,
        segment: int,
        timeout_s: float,
        *,
        promised: Collection[bytes] = (),
    ) -> list[Freed]:
        """Take out every unit with a block in a segment, and all that descends from it.

        Asks the segment's owner to give the file up, see :meth:`wanted`. Does nothing at all when
        one of the units is ``promised``.
        """
        ...

    def wanted(self, geometry: Geometry) -> list[int]:
        """Segments that their owner should give up, for others to have the room."""
        ...

    def forget_segments(
        self, geometry_id: bytes, segments: Iterable[int], timeout_s: float
    ) -> None:
        """These files are gone: nobody will ask for their freed slots again."""
        ...

    def chain_segments(self, unit: bytes, key: bytes) -> set[tuple[bytes, int]]:
        """(Geometry id, segment) of every block of a unit and its ancestors."""
        ...

    def segment_uses(self) -> dict[tuple[bytes, int], int]:
        """Newest use (us) of any unit in each segment, by (geometry id, segment)."""
        ...

    def freed(self, geometry: Geometry, segments: Iterable[int]) -> list[Freed]:
        """Freed slots of these segments that nobody has cleaned or reused yet."""
        ...

    def forget_freed(self, freed: Sequence[Freed], timeout_s: float) -> None:
        """These slots were cleaned or reused."""
        ...

    def drop_segments(
        self, geometry: Geometry, segments: Iterable[int], timeout_s: float
    ) -> list[Freed]:
        """Take out every block of segments that are gone."""
        ...

    def clear(self, geometry: Geometry, timeout_s: float) -> list[Freed]:
        """Take out every block of a geometry."""
        ...

    def entries(self, geometry: Geometry | None = None) -> Iterator[Entry]:
        """All rows. A snapshot, or else at least every row that stands all the while, once."""
        ...

    def counts(self) -> dict[bytes, int]:
        """Blocks by geometry id."""
        ...

    def report(self, node: str, fields: Report, ttl_s: float) -> None:
        """Tell all others about a node, for ``ttl_s`` seconds."""
        ...

    def nodes(self) -> dict[str, Report]:
        """What every node said last, by its name."""
        ...

    def secret(self, offered: bytes = b"") -> bytes:
        """What all nodes of this index know and nobody else does.

        Args:
            offered: stands there from now on when nothing does; empty to look only.

        Returns:
            Empty when nothing stands there, or the index has no network.
        """
        ...

    def check(self) -> None:
        """Walk every row, while nobody writes; for tools and tests.

        Raises:
            IndexDamagedError: one cannot be read or contradicts another.
        """
        ...

    def upkeep(self) -> None:
        """Whatever should be done every few seconds."""
        ...

    def close(self) -> None:
        """Release it."""
        ...
