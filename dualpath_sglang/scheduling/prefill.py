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
        self._order = sorted(self._key(i) for i in range(len(loads.engines)))

    @property
    def full(self) -> bool:
        """Whether all are in C1, so that no request whatever can be given to any of them."""
        return not self._order or self._order[0][0] > self._beta

    def choose(self, request: Request) -> int | None:
        """Index of the PE for the request; None: all are in C1, or excluded."""
        second_choice: int | None = None
        for tokens, _, i in self._order:
            if tokens > self._beta:
                break
            if request.excluded and self._loads.names[i] in request.excluded:
                continue
            if self._queues.length(self._nodes[i]) <= self._alpha:
                return i
            if second_choice is None:
                second_choice = i
        return second_choice

    def may_return(self, i: int, request: Request, over_beta: float) -> bool:
        """Whether the request may go there because its prefix is warm there."""
        return (
            self._loads.tokens[i] <= self._beta * over_beta
            and self._loads.names[i] not in request.excluded
        )

    def assign(self, i: int, request: Request) -> None:
        """Count the request to the PE with this index."""
        del self._order[bisect_left(self._order, self._key(i))]
        self._loads.assign(i, request)
        insort(self._order, self._key(i))

    def _key(self, i: int) -> tuple[int, int, int]:
        return (self._loads.tokens[i], self._loads.requests[i], i)
