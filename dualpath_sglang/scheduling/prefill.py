"""Which PE takes a request: the paper's Algorithm 1 (arXiv 2602.21548)."""

from __future__ import annotations

from bisect import bisect_left, insort

from dualpath_sglang.scheduling.engines import Request
from dualpath_sglang.scheduling.loads import PrefillLoads, ReadQueues


class Algorithm1:
    """Least tokens among the PEs that may take something and whose node's read queue is short.

    With tok_e a PE's tokens and read_q the read queue of its node, every PE is in one of

    - C1, tok_e > beta: gets nothing;
    - C2, tok_e <= beta and read_q <= alpha: the least tok_e of these is taken;
    - C3, tok_e <= beta and read_q > alpha: the least tok_e of these, if C2 is empty.

    The bound is looked at before a request is added, so that a prompt longer than beta finds a PE
    too, and a PE may end up over beta by one request.

    The paper does not say

    - who wins a tie: here fewer requests, then the place in the order given;
    - whether read queues grow within a round: ``Rules.grow_read_queue``;
    - how often there is a round: whenever the caller likes. Nothing here depends on it.
    """

    def __init__(self, loads: PrefillLoads, queues: ReadQueues, alpha: float, beta: float) -> None:
        self._loads = loads
        self._queues = queues
        self._alpha = alpha
        self._beta = beta
        self._nodes = [engine.node for engine in loads.engines]
        # By tokens. Read queues only grow within a round: who is over alpha stays so.
        self._short = sorted(self._key(i) for i in range(len(loads.engines)))
        self._long: list[tuple[int, int, int]] = []
        self._is_long: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether all are in C1, so that no request whatever can be given to any of them."""
        return not any(order and order[0][0] <= self._beta for order in (self._short, self._long))

    def choose(self, request: Request) -> int | None:
        """Index of the PE for the request; None: all are in C1, or excluded."""
        excluded, names = request.excluded, self._loads.names
        place = 0
        while place < len(self._short) and self._short[place][0] <= self._beta:
            i = self._short[place][2]
            if self._queues.length(self._nodes[i]) > self._alpha:
                insort(self._long, self._short.pop(place))
                self._is_long.add(i)
            elif excluded and names[i] in excluded:
                place += 1
            else:
                return i
        for tokens, _, i in self._long:
            if tokens > self._beta:
                break
            if not (excluded and names[i] in excluded):
                return i
        return None

    def may_return(self, i: int, request: Request, over_beta: float) -> bool:
        """Whether the request may go there because its prefix is warm there."""
        return (
            self._loads.tokens[i] <= self._beta * over_beta
            and self._loads.names[i] not in request.excluded
        )

    def assign(self, i: int, request: Request) -> None:
        """Count the request to the PE with this index."""
        order = self._long if i in self._is_long else self._short
        del order[bisect_left(order, self._key(i))]
        self._loads.assign(i, request)
        insort(order, self._key(i))

    def _key(self, i: int) -> tuple[int, int, int]:
        return (self._loads.tokens[i], self._loads.requests[i], i)
