"""The state of a batch under way; no I/O, no clock.

Touched by the streamer's thread alone, but for a part that a worker arranges while its blocks are
being looked up.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dualpath_sglang.streaming.hedging import Progress
from dualpath_sglang.streaming.landing import Fence, Landed, Target
from dualpath_sglang.streaming.load import Load, LoadRequest, Outcome, PoolLoad
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.plan import Chunk, Job, chunks, layer_ranges
from dualpath_storage import Placement, ReadStatus
from dualpath_storage.ranges import RangeShape

if TYPE_CHECKING:
    from dualpath_sglang.streaming.reads import Read


class Part:
    """One pool of one request. Its blocks are numbered in the order in which they lie on disk.

    Args:
        load: as it was asked for.
    """

    def __init__(self, request: Request, load: PoolLoad) -> None:
        geometry = load.pool.geometry
        assert len(load.keys) == len(load.pages) and len(load.gates) == geometry.layers
        self.request = request
        self.load = load
        self.layer_bytes = geometry.layer_bytes
        self.order: list[int] = []
        self.places: list[Placement] = []
        self.checksums: list[array[int] | None] = []
        self.target: Target | None = None
        self.progress = Progress(len(load.keys), geometry.layers)
        self.local_blocks = len(load.keys)
        """How many this node is to read, the first ones."""
        self.suspects: list[tuple[bytes, Placement | None, ReadStatus]] = []
        """Blocks that this node cannot read and that another was asked for."""

    def arrange(self, places: Sequence[Placement]) -> None:
        """Number the blocks: neighbours in a segment come one after the other."""
        order = sorted(range(len(places)), key=lambda i: (places[i].segment, places[i].slot))
        self.order = order
        self.places = [places[i] for i in order]
        self.checksums = [None] * len(order)

    def aim(self) -> None:
        """Find the pages, once the blocks are numbered.

        Raises:
            ValueError: they are not there.
        """
        pages = [self.load.pages[i] for i in self.order]
        self.target = self.load.landing.target(pages, self.request.load.after)

    def job(self, options: StreamOptions, io_bytes: int, most_bytes: int) -> Job:
        """How it is cut into reads.

        Args:
            io_bytes: bytes of an I/O that give full bandwidth.
            most_bytes: of one piece.
        """
        geometry = self.load.pool.geometry
        blocks = self.local_blocks
        ranges = layer_ranges(
            geometry.layers, geometry.layer_bytes, options.first_io_bytes, io_bytes, most_bytes
        )
        fair = -(-blocks // options.queue_depth)  # every worker gets a share of a range
        strides = [RangeShape(geometry, first, end, first == 0).stride for first, end in ranges]
        steps = [max(1, min(most_bytes // stride, fair)) for stride in strides]
        return Job(blocks, ranges, self.load.gates, steps)

    def key(self, block: int) -> bytes:
        """The key of a block."""
        return self.load.keys[self.order[block]]

    def outcomes(self) -> list[tuple[bytes, Placement | None, ReadStatus]]:
        """Every block as a good read, in the order of the chain."""
        places = dict(zip(self.order, self.places, strict=True))
        return [(key, places[i], ReadStatus.OK) for i, key in enumerate(self.load.keys)]


class Request:
    """One request of a batch.

    Args:
        layers: of the model.
    """

    def __init__(self, load: LoadRequest, layers: int) -> None:
        self.load = load
        self.parts = [Part(self, part) for part in load.pools]
        self.due = [0] * layers
        """By layer of the model: Layer Blocks that have not landed."""
        self.queued_bytes = 0
        """What this node has still to read for it."""
        self.queued_tokens = 0
        self.read_bytes = 0
        self.outcome: Outcome | None = None
        self.replaced = False
        """Whether somebody else had to read what the hint gave to a node."""
        for part in self.parts:
            for gate in part.load.gates:
                self.due[gate] += len(part.load.keys)
            self.queued_bytes += len(part.load.keys) * part.load.pool.geometry.block_bytes
        self.left = sum(self.due)
        self.queued_tokens = self.tokens

    @property
    def live(self) -> bool:
        """Whether it is still to be loaded."""
        return self.outcome is None

    @property
    def tokens(self) -> int:
        """Tokens of its longest chain of pages."""
        return self._longest(len(part.load.keys) for part in self.parts)

    @property
    def local_tokens(self) -> int:
        """Those of them that this node reads."""
        return self._longest(part.local_blocks for part in self.parts)

    def _longest(self, blocks: Iterable[int]) -> int:
        pairs = zip(blocks, self.parts, strict=True)
        return max((count * p.load.pool.geometry.page_tokens for count, p in pairs), default=0)

    @property
    def blocks(self) -> int:
        """Blocks that were asked for."""
        return sum(len(part.load.keys) for part in self.parts)


@dataclass(slots=True)
class Batch:
    """The requests of one forward.

    Args:
        unlocated: requests whose blocks are still being looked up.
        fences: by layer of the model, and by landing: what a device must still do for it.
        last: the same for everything.
    """

    load: Load
    requests: list[Request]
    due: list[int]
    unlocated: int
    parts: list[Part] = field(default_factory=list)
    plan: Iterator[Chunk] | None = None
    rest: list[tuple[int, int, Read]] = field(default_factory=list)
    """A heap of reads that were not planned: the first layer that waits for each, its number."""
    fences: list[dict[int, Fence]] = field(default_factory=list)
    last: dict[int, Fence] = field(default_factory=dict)
    numbered: int = 0

    @classmethod
    def of(cls, load: Load) -> Batch:
        """The state of a new batch."""
        requests = [Request(request, load.layers) for request in load.requests]
        due = [sum(column) for column in zip(*(r.due for r in requests), strict=True)]
        due = due or [0] * load.layers
        return cls(load, requests, due, 0, fences=[{} for _ in due])

    def make_plan(self, jobs: Iterable[tuple[Part, Job]]) -> None:
        """Fix the order of reading."""
        pairs = list(jobs)
        self.parts = [part for part, _ in pairs]
        self.plan = chunks([job for _, job in pairs])

    def put(self, read: Read) -> None:
        """Have something read that was not planned, when its layer's turn comes."""
        gate = min(read.part.load.gates[read.first_layer : read.end_layer])
        self.numbered += 1
        heapq.heappush(self.rest, (gate, self.numbered, read))

    def next_of_rest(self) -> Read | None:
        """The earliest of what was not planned and is still wanted."""
        while self.rest:
            read = heapq.heappop(self.rest)[2]
            if read.part.request.live:
                return read
        return None

    def landed(self, part: Part, blocks: range, first_layer: int, end_layer: int) -> int:
        """Note that layers ``[first_layer, end_layer)`` of some blocks are there.

        Returns:
            Bytes of those that were not before.
        """
        request = part.request
        new = part.progress.landed(blocks.start, blocks.stop, first_layer, end_layer)
        for layer, count in enumerate(new, first_layer):
            gate = part.load.gates[layer]
            request.due[gate] -= count
            self.due[gate] -= count
        request.left -= sum(new)
        size = sum(new) * part.layer_bytes
        request.read_bytes += size
        return size

    def note_fences(self, part: Part, first_layer: int, landed: Landed) -> None:
        """Note what a device must still do; of one landing, the last thing stands for all."""
        name = id(part.load.landing)
        for layer, fence in enumerate(landed.layers, first_layer):
            self.fences[part.load.gates[layer]][name] = fence
            self.last[name] = fence
        if landed.copied is not None and not landed.layers:
            self.last[name] = landed.copied

    def take_out(self, request: Request, outcome: Outcome) -> None:
        """A request ends; what it still misses holds nobody up any more."""
        request.outcome = outcome
        for layer, missing in enumerate(request.due):
            self.due[layer] -= missing
        request.due = [0] * len(request.due)
        request.queued_bytes = request.queued_tokens = 0

    def ready_layers(self, announced: int) -> int:
        """How many layers more than the ``announced`` ones have landed, without a gap."""
        end = announced
        while end < len(self.due) and self.due[end] == 0:
            end += 1
        return end - announced

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return not any(request.live for request in self.requests)
