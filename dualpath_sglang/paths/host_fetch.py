"""Blocks that another node was asked for, received in place: into the host memory of a caller."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence

from dualpath_sglang.streaming.estimate import too_slow
from dualpath_sglang.streaming.other_paths import Going
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span
from dualpath_sglang.transport.verify import bad_layer_blocks
from dualpath_storage import Geometry, Pieces

_LOOK_EVERY_S = 0.05


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
        self.began = self.heard = time.monotonic()
        """When it began, and when something last came."""
        self.damaged = False
        """Whether something came that does not have its checksum."""
        self.going: Going | None = None
        self._geometry = geometry
        self._pieces = pieces
        self._per_layer = len(pieces[0]) // geometry.layers
        self._left = array("H", [geometry.layers]) * len(numbers)
        self._came = 0
        self._views: list[memoryview] = []
        """Of the piece that has come last."""
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
        self._views = [view for block in blocks for view in self._layers(block, span)]
        return self._views

    def _layers(self, block: int, span: Span) -> Sequence[memoryview]:
        first, end = span.first_layer * self._per_layer, span.end_layer * self._per_layer
        return self._pieces[block][first:end]

    # -- Fetching ---------------------------------------------------------------------------

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        """See :class:`~dualpath_sglang.transport.base.Fetching`."""
        bad = bad_layer_blocks(self._views, self.layer_bytes, checksums)
        hurt = {span.first + i // span.layers for i in bad}
        self.damaged |= bool(hurt)
        for block in range(span.first, span.first + span.count):
            if block not in hurt:
                self._left[block] -= span.layers
        self._came += span.layer_blocks
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
        """Until it is over, or is not to be waited for any more; which of the two.

        Args:
            patience_s: nothing has come for so long, or so little in that time that the rest would
                come too late.
            deadline: monotonic seconds.
        """
        total = len(self.numbers) * self._geometry.layers
        while not self._over.is_set():
            now = time.monotonic()
            left_s = min(self.heard + patience_s, deadline) - now
            slow = too_slow(self.began, now, deadline, done=self._came, total=total)
            if left_s <= 0 or (slow and now - self.began >= patience_s):
                return False
            self._over.wait(min(left_s, _LOOK_EVERY_S))
        return True

    def stop(self) -> None:
        """Nobody wants it any more; nothing writes to the memory afterwards."""
        if self.going is not None and not self._over.is_set():
            self.going.cancel()

    @property
    def whole(self) -> list[int]:
        """Which of the caller's blocks are there, every layer checked. Only when it is over."""
        return [number for number, left in zip(self.numbers, self._left, strict=True) if not left]
