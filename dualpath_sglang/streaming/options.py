"""How prefix hits are streamed: validated numbers, no parsing."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath_storage import StoreError

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of one :class:`~dualpath_sglang.streaming.streamer.LayerStreamer`.

    Args:
        staging_bytes: all memory that reads may hold at a time, allocated at start.
        queue_depth: reads in flight, each in a thread.
        io_bytes: bytes an I/O that give the device's full bandwidth; None measures it.
        first_io_bytes: smallest I/O, for the first layers, that is still worth its latency.
        piece_bytes: most bytes of one task, that is of one bulk copy to a device.
        retries: further reads of a block that failed, each after a fresh look into the index.
        probe_s: longest measurement of the device, made once and in the background.
        hedge_after: share of a load's time after which a side that brings nothing is replaced.
    """

    staging_bytes: int = 256 * MIB
    queue_depth: int = 8
    io_bytes: int | None = None
    first_io_bytes: int = 64 * KIB
    piece_bytes: int = 4 * MIB
    retries: int = 1
    probe_s: float = 0.3
    hedge_after: float = 0.25

    def __post_init__(self) -> None:
        if self.staging_bytes < 64 * KIB:
            raise StoreError("The staging memory needs at least 64 KiB.")
        if not 1 <= self.queue_depth <= 256:
            raise StoreError("queue_depth must be between 1 and 256.")
        if min(self.first_io_bytes, self.piece_bytes, self.io_bytes or 1) < 1:
            raise StoreError("The sizes of I/Os and pieces must be at least one byte.")
        if self.retries < 0 or self.probe_s < 0:
            raise StoreError("retries and probe_s must not be negative.")
        if not 0 < self.hedge_after <= 1:
            raise StoreError("hedge_after must be above 0 and at most 1.")
