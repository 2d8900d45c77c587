"""How a store is used: validated numbers, no parsing (that is the configuration's job)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualpath_storage.errors import StoreError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of one store root.

    Args:
        root: directory of the store.
        capacity_bytes: most bytes that segment files may take, over all geometries; None takes
            ``capacity_fraction`` of the file system.
        min_free_fraction: share of the file system that stays free whatever the capacity says.
        segment_bytes: size of a new segment file; None chooses by capacity.
        io_threads: reads in flight, and as many writes.
        direct_io: ``auto`` probes the mount; ``on`` refuses a mount without it.
        durability: ``fdatasync`` makes each batch durable before it can be found; ``none``
            leaves that to the kernel (a torn block is still detected and never served).
        read_timeout_s, write_timeout_s, lookup_timeout_s: deadlines when the call names none.
        max_io_bytes: neighbouring blocks merge into one I/O up to this size.
        read_only: never write, not even the index.
    """

    root: Path
    capacity_bytes: int | None = None
    capacity_fraction: float = 0.8
    min_free_fraction: float = 0.05
    segment_bytes: int | None = None
    io_threads: int = 8
    direct_io: Literal["auto", "on", "off"] = "auto"
    durability: Literal["none", "fdatasync"] = "none"
    read_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    max_io_bytes: int = 2 * MIB
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise StoreError("The capacity must be at least one byte.")
        if not 0 < self.capacity_fraction <= 1:
            raise StoreError("The capacity must be above 0 % and at most 100 % of the file system.")
        if not 0 <= self.min_free_fraction < 1:
            raise StoreError("The share to keep free must be at least 0 % and below 100 %.")
        if not 1 <= self.io_threads <= 256:
            raise StoreError("io_threads must be between 1 and 256.")
        if min(self.read_timeout_s, self.write_timeout_s, self.lookup_timeout_s) <= 0:
            raise StoreError("Timeouts must be above zero seconds.")
        if self.segment_bytes is not None and self.segment_bytes < 8192:
            raise StoreError("A segment must have at least 8 KiB.")
        if self.max_io_bytes < 4096:
            raise StoreError("max_io_bytes must be at least 4096.")
