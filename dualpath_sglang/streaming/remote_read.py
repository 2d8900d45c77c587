"""Blocks of one part that another node was asked for, on their way into staging memory.

What comes is received into pieces of the staging memory and checked in the connection's thread;
each piece then becomes a message for the streamer's thread, which alone touches pages and state.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from dualpath_sglang.streaming.batch import Batch, Part
from dualpath_sglang.streaming.other_paths import Going
from dualpath_sglang.streaming.staging import Piece, Staging
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span
from dualpath_sglang.transport.verify import bad_layer_blocks

_LONGEST_S = 3600.0
"""A fetch is asked for no longer, however far the deadline of the load."""


class Listener(Protocol):
    """What the streamer's thread is told."""

    def remote_piece(self, read: RemoteRead, span: Span, piece: Piece, bad: Sequence[int]) -> None:
        """A piece has come; ``bad`` are those of its blocks that do not have their checksums."""
        ...

    def remote_missing(self, read: RemoteRead, blocks: Sequence[int]) -> None:
        """The node does not have these, by their numbers in the part."""
        ...

    def remote_ended(self, read: RemoteRead, end: End) -> None:
        """Nothing more comes."""
        ...


class RemoteRead:
    """A destination, and who is told what lands in it. See the module.

    Args:
        blocks: numbers in the part, ascending.
        first_layer: the first that is wanted of any of them.
        side: who is asked.
        staging: where memory comes from.
        cached_only: only what it has in memory is wanted.
        rescue: whether these are blocks that this node cannot read.
        post: leaves a message for the streamer's thread.
        listener: what those messages call.
    """

    def __init__(
        self,
        batch: Batch,
        part: Part,
        blocks: Sequence[int],
        first_layer: int,
        side: str,
        staging: Staging,
        post: Callable[[Callable[[], None]], None],
        listener: Listener,
        *,
        cached_only: bool = False,
        rescue: bool = False,
    ) -> None:
        self.batch = batch
        self.part = part
        self.blocks = blocks
        self.wanted = set(blocks)
        """Those that nobody else was asked for instead, for the streamer's thread."""
        self.first_layer = first_layer
        self.side = side
        self.cached_only = cached_only
        self.rescue = rescue
        self.began = self.heard = time.monotonic()
        """When it began, and when something last came of it."""
        self.landed_bytes = 0
        self._staging = staging
        self._post = post
        self._listener = listener
        self._geometry = part.load.pool.geometry
        self._piece: Piece | None = None
        self._lock = threading.Lock()
        self._going: Going | None = None
        self._unwanted = False
        self._over = False
        self.refused = True
        """Whether it could not even begin."""

    @property
    def request(self) -> FetchRequest:
        """What is asked for."""
        deadline = self.batch.load.deadline
        return FetchRequest(
            self._geometry.id_bytes,
            [self.part.key(block) for block in self.blocks],
            self.first_layer,
            self._geometry.layers,
            min(max(0.001, deadline - time.monotonic()), _LONGEST_S),
            self.cached_only,
        )

    @property
    def total_bytes(self) -> int:
        """Asked for."""
        layers = self._geometry.layers - self.first_layer
        return len(self.blocks) * layers * self._geometry.layer_bytes

    @property
    def complete(self) -> bool:
        """Whether all that was asked for has landed."""
        return self.landed_bytes >= self.total_bytes

    # -- from any thread --------------------------------------------------------------------

    def forget(self, blocks: Sequence[int]) -> None:
        """Others bring these. For the streamer's thread."""
        self.wanted.difference_update(blocks)

    def going(self, going: Going) -> None:
        """It is under way."""
        with self._lock:
            self._going, self.refused = going, False
            unwanted = self._unwanted
        if unwanted:
            going.cancel()

    def turn_away(self) -> None:
        """Nobody wants it any more: it waits for no memory from now on. Does not wait itself."""
        self._unwanted = True

    def give_up(self) -> None:
        """The same, and have it end. May wait a little."""
        with self._lock:
            self._unwanted = True
            going = self._going
        if going is not None:
            going.cancel()

    # -- Destination, in the connection's thread --------------------------------------------

    @property
    def layer_bytes(self) -> int:
        """Of one Layer Block."""
        return self._geometry.layer_bytes

    def check(self, request: FetchRequest) -> None:
        """See :class:`~dualpath_sglang.transport.base.Destination`."""
        assert len(request.keys) == len(self.blocks)
        if self.layer_bytes > self._staging.total_bytes:
            raise ValueError("a Layer Block does not fit into the staging memory")

    def views(self, span: Span, deadline: float) -> Sequence[memoryview] | None:
        """See :class:`~dualpath_sglang.transport.base.Destination`."""
        size = span.layer_blocks * self.layer_bytes
        piece = self._staging.take_by(size, deadline, lambda: self._unwanted or self._over)
        if piece is None:
            return None
        with self._lock:
            if not self._over:
                self._piece = piece
                return [piece.memory[:size]]
        self._staging.give(piece)  # it was ended by another thread meanwhile
        return None

    # -- Fetching, in the connection's thread -----------------------------------------------

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        with self._lock:
            piece, self._piece = self._piece, None
        assert piece is not None
        bad = self._bad_blocks(piece.memory, span, checksums)
        self._post(partial(self._listener.remote_piece, self, span, piece, bad))

    def _bad_blocks(self, memory: memoryview, span: Span, checksums: Sequence[int]) -> list[int]:
        bytes_of = memory[: span.layer_blocks * self.layer_bytes]
        bad = bad_layer_blocks([bytes_of], self.layer_bytes, checksums)
        return sorted({i // span.layers for i in bad})

    def missing(self, blocks: Sequence[int]) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        numbers = [self.blocks[block] for block in blocks]
        self._post(partial(self._listener.remote_missing, self, numbers))

    def ended(self, end: End, load: Load | None) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        del load
        with self._lock:
            self._over = True
            piece, self._piece = self._piece, None  # of a piece that broke off
        if piece is not None:
            self._staging.give(piece)
        self._post(partial(self._listener.remote_ended, self, end))

    # -- in the streamer's thread -----------------------------------------------------------

    def runs(self, span: Span, bad: Sequence[int]) -> Iterator[tuple[range, int]]:
        """Good blocks of a piece that are neighbours in the part, and the first's place in it."""
        gone = set(bad)
        good = [i for i in range(span.count) if i not in gone]
        numbers = [(self.blocks[span.first + i], i) for i in good]
        for _, group in itertools.groupby(
            enumerate(numbers), lambda row: (row[1][0] - row[0], row[1][1] - row[0])
        ):
            run = [row for _, row in group]
            yield range(run[0][0], run[-1][0] + 1), run[0][1]
