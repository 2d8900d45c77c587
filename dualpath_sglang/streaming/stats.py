"""What the streamer counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class StreamStats:
    """Counters since the start, and from ``retired_bytes`` on what is the case now.

    ``failed_requests`` is by outcome. Bytes are payload, seconds are summed over threads.
    ``repaired_blocks`` failed at first and were good when they were read again. ``remote_bytes``
    came from agents, and are not among ``read_bytes``; ``own_agent_bytes`` are those of them that
    this machine's agent brought. ``hedges`` are sides that were late and replaced,
    ``hedged_bytes`` what this node read in place of another. ``hinted`` are loads with a hint that
    landed, by whether the nodes that it names read all of it.
    """

    loads: int = 0
    requests: int = 0
    failed_requests: dict[str, int] = field(default_factory=dict)
    blocks: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    reread_blocks: int = 0
    repaired_blocks: int = 0
    abandoned_reads: int = 0
    retired_bytes: int = 0
    staging_bytes: int = 0
    staging_used_bytes: int = 0
    staging_peak_bytes: int = 0
    queued_bytes: int = 0
    in_flight_reads: int = 0
    io_bytes: int = 0
    remote_fetches: int = 0
    remote_failed: int = 0
    remote_bytes: int = 0
    own_agent_bytes: int = 0
    remote_bad_blocks: int = 0
    hedges: int = 0
    hedged_bytes: int = 0
    hinted: dict[str, int] = field(default_factory=dict)

    def copy(self) -> StreamStats:
        """The same numbers, which do not change any more."""
        return replace(self, failed_requests=dict(self.failed_requests), hinted=dict(self.hinted))
