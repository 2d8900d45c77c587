"""Blocks that another node was asked for, received in place: into the host memory of a caller."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence

from dualpath_sglang.streaming.other_paths import Going
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span
from dualpath_storage import Geometry, Pieces
from dualpath_storage.header import layer_checksums


class HostFetch:
    """A destination, and who is told what lands in it.

    Args:
        side: who is asked.
        numbers: which of the caller's blocks they are.
        pieces: the memory of each, see :data:`dualpath_storage.Pieces`.
    """

    def __init__(
        self, side: str, geometry: Geometry, numbers: Sequence[int], pieces: Sequence[Pieces]
    ) -> None:
        self.side = side
        self.numbers = numbers
        self.heard = time.monotonic()
        """When something last came."""
        self.damaged = False
        """Whether something came that does not have its checksum."""
        self.going: Going | None = None
        self._geometry = geometry
        self._pieces = pieces
        self._per_layer = len(pieces[0]) // geometry.layers
        self._left = array("H", [geometry.layers]) * len(numbers)
        self._over = threading.Event()

    # -- Destination ------------------------------------------------------------------------

    @property
    def layer_bytes(self) -> int:
        """Of one Layer Block."""
        return self._geometry.layer_bytes

    def check(self, request: FetchRequest) -> None:
        """See :class:`~dualpath_sglang.transport.base.Destination`."""
        assert len(request.keys) == len(self._pieces)

    def views(self, span: Span, deadline: float) -> Sequence[memoryview]:
        """See :class:`~dualpath_sglang.transport.base.Destination`."""
        del deadline
        blocks = range(span.first, span.first + span.count)
        return [view for block in blocks for view in self._layers(block, span)]

    def _layers(self, block: int, span: Span) -> Sequence[memoryview]:
        first, end = span.first_layer * self._per_layer, span.end_layer * self._per_layer
        return self._pieces[block][first:end]

    # -- Fetching ---------------------------------------------------------------------------

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        for i in range(span.count):
            block, begin = span.first + i, i * span.layers
            sums = layer_checksums(self._layers(block, span), span.layers)
            if sums == list(checksums[begin : begin + span.layers]):
                self._left[block] -= span.layers
            else:
                self.damaged = True
        self.heard = time.monotonic()

    def missing(self, blocks: Sequence[int]) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        del blocks  # they stay incomplete
        self.heard = time.monotonic()

    def ended(self, end: End, load: Load | None) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        del end, load
        self._over.set()

    # -- for the caller ---------------------------------------------------------------------

    def wait(self, patience_s: float, deadline: float) -> bool:
        """Until it is over; False once nothing has come for ``patience_s``, or at the deadline."""
        while not self._over.is_set():
            end = min(self.heard + patience_s, deadline)
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            self._over.wait(left_s)
        return True

    @property
    def whole(self) -> list[int]:
        """Which of the caller's blocks are there, every layer checked. Only when it is over."""
        return [number for number, left in zip(self.numbers, self._left, strict=True) if not left]
