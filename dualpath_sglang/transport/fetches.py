"""Fetches that are under way on a connection, and what is still to be known of those given up."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpath_sglang.transport.base import (
    Destination,
    Fetching,
    FetchRequest,
    Load,
    PeerLostError,
    Span,
)


@dataclass(slots=True, eq=False)
class Fetch:
    """One request on its way. Made by :meth:`Connection.fetch`."""

    request: FetchRequest
    destination: Destination
    told: Fetching
    number: int
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)
    _next: array[int] = field(init=False)
    """By block: the layer that comes next; one past the last when nothing more does."""
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.request.keys)
        self._next = array("H", [self.request.first_layer]) * count
        self._left = count * (self.request.end_layer - self.request.first_layer)

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; whether it has."""
        return self.done.wait(timeout_s)

    @property
    def blocks(self) -> int:
        """How many are asked for."""
        return len(self.request.keys)

    @property
    def layer_bytes(self) -> int:
        """Of one Layer Block."""
        return self.destination.layer_bytes

    @property
    def complete(self) -> bool:
        """Whether every Layer Block has come, or was said to be missing."""
        return self._left == 0

    def expect(self, span: Span) -> None:
        """A piece comes now.

        Raises:
            PeerLostError: nobody asked for it, it has come before, or it is not its turn.
        """
        request, end = self.request, span.first + span.count
        if not request.first_layer <= span.first_layer < span.end_layer <= request.end_layer:
            raise PeerLostError("a layer came that nobody asked for")
        if end > len(request.keys):
            raise PeerLostError("blocks came that nobody asked for")
        if self._next[span.first : end] != array("H", [span.first_layer]) * span.count:
            raise PeerLostError("Layer Blocks came twice, or not in their order")
        self._next[span.first : end] = array("H", [span.end_layer]) * span.count
        self._left -= span.layer_blocks

    def lack(self, blocks: Sequence[int]) -> None:
        """Nothing more of these blocks comes.

        Raises:
            PeerLostError: that was known.
        """
        for block in blocks:
            more = self.request.end_layer - self._next[block]
            if more <= 0:
                raise PeerLostError("a block is said to be missing that is not")
            self._left -= more
            self._next[block] = self.request.end_layer


@dataclass(frozen=True, slots=True)
class Gone:
    """What is still to be known of a fetch that was given up: nothing that holds its memory."""

    blocks: int
    layer_bytes: int


@dataclass(slots=True, eq=False)
class Ask:
    """A question for the peer's load, shared by all who ask while it is under way.

    Args:
        number: of its PING.
        asked_at: monotonic seconds.
        dead_s: for how long the peer has to send nothing at all to be taken for dead.
    """

    number: int
    asked_at: float
    dead_s: float
    done: threading.Event = field(default_factory=threading.Event)
    load: Load | None = None

    @property
    def dead_at(self) -> float:
        """Monotonic seconds before which the peer may take its time."""
        return self.asked_at + self.dead_s
