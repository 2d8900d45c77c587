"""Engines in turn, whatever their load: what the paper compares its scheduling with.

The rules have the form of those they stand in for. Turns go on from round to round (``Cluster``).
An engine that cannot take a request, because it is excluded or a DE has no memory, is passed over
and not made up for later.
"""

from __future__ import annotations

from dualpath_sglang.scheduling.engines import Request
from dualpath_sglang.scheduling.loads import DecodeLoads, PrefillLoads


class PrefillTurns:
    """PEs in turn; neither tokens nor read queues count, so nothing ever waits for one."""

    def __init__(self, loads: PrefillLoads, turn: int) -> None:
        self._loads = loads
        self.turn = turn
        self.full = not loads.names

    def choose(self, request: Request) -> int | None:
        """Index of the PE for the request; None: all are excluded."""
        count = len(self._loads.names)
        for k in range(count):
            i = (self.turn + k) % count
            if self._loads.names[i] not in request.excluded:
                return i
        return None

    def may_return(self, _i: int, _request: Request, _over_beta: float) -> bool:
        """Never: it is not its turn."""
        return False

    def assign(self, i: int, request: Request) -> None:
        """Count the request to the PE with this index; the next one has its turn."""
        self._loads.assign(i, request)
        self.turn = (i + 1) % len(self._loads.names)


class DecodeTurns:
    """DEs in turn, of all groups together, as long as they have memory.

    Args:
        loads: the DEs.
        turn: index of the first.
        stop: whether all behind a request for which none has memory wait too.
    """

    def __init__(self, loads: DecodeLoads, turn: int, stop: bool) -> None:
        self._loads = loads
        self._stop = stop
        self.turn = turn
        self.stopped = False

    def choose(self, request: Request) -> int | None:
        """Index of the DE for the request; None: it waits, as in the two-level rule."""
        count = len(self._loads.names)
        for k in range(count):
            i = (self.turn + k) % count
            if self._loads.has_room(i, request):
                return i
        self.stopped = self._stop
        return None

    def may_return(self, _i: int, _request: Request) -> bool:
        """Never: it is not its turn."""
        return False

    def assign(self, i: int, request: Request) -> None:
        """Count the request to the DE with this index; the next one has its turn."""
        self._loads.assign(i, request)
        self.turn = (i + 1) % len(self._loads.names)
