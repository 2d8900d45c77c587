"""Which DE takes a request: the paper's two levels (arXiv 2602.21548)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from dualpath_sglang.scheduling.engines import Request
from dualpath_sglang.scheduling.loads import DecodeLoads
from dualpath_sglang.scheduling.rules import WhenBlocked


class TwoLevel:
    """A group by its tokens, and in it a DE by its requests.

    Level 1: a request goes to the group with the smallest sum of tok_e.

    Level 2: R are the requests at the head of the group's queue that fit its free memory in
    total, and Z = z x (tokens of R + sum of tok_e) / engines. Of the DEs with memory for the
    request those are looked at that stay within Z, and the fewest requests win; if none stays
    within Z, the fewest tokens win. Memory for prompt and answer is reserved at once.

    The paper does not say

    - who wins a tie: among groups the first in the order of their engines; at level 2 fewer
      tokens among equal numbers of requests and the other way round, then the order given;
    - what a group's sum counts in a round: here what it was given in this round too, and what
      waits in it in this round;
    - what happens when the group has no memory and another has: ``Rules.when_blocked``;
    - whether a request stays in its group while it waits: here it does not. Each round begins
      with all of them, so none is stuck in a group that died or filled up.

    R and Z are of the moment the round begins, as all groups fetch then.

    Args:
        loads: the DEs.
        queue: all requests that wait, in their order.
        z: the factor of Z.
        when_blocked: see ``Rules``.
    """

    def __init__(
        self, loads: DecodeLoads, queue: Sequence[Request], z: float, when_blocked: WhenBlocked
    ) -> None:
        self._loads = loads
        self._when_blocked = when_blocked
        names = list(dict.fromkeys(engine.group for engine in loads.engines))
        number = {name: g for g, name in enumerate(names)}
        self.group_of = [number[engine.group] for engine in loads.engines]
        self._members: list[list[int]] = [[] for _ in names]
        for i, g in enumerate(self.group_of):
            self._members[g].append(i)
        self._sums = [sum(loads.tokens[i] for i in members) for members in self._members]
        self._capacity = [self._largest(members) for members in self._members]
        self._most_free = [max(loads.free[i] for i in members) for members in self._members]
        self._by_requests = [sorted(map(self._requests_key, members)) for members in self._members]
        self._by_tokens = [sorted(map(self._tokens_key, members)) for members in self._members]
        self.bounds = self._bounds(queue, z)
        self.blocked: set[int] = set()
        self.stopped = False

    def choose(self, request: Request) -> int | None:
        """Index of the DE for the request; None: it waits.

        When it waits, ``stopped`` says whether all behind it wait too.
        """
        group = self._group(request, self._sums)
        if group is None:
            return None
        if group not in self.blocked:
            chosen = self._in_group(group, request)
            if chosen is not None:
                return chosen
        if self._when_blocked == "group":
            self.blocked.add(group)
            self._sums[group] += request.tokens
            self.stopped = len(self.blocked) == len(self._members)
            return None
        for other in sorted(range(len(self._sums)), key=self._sums.__getitem__):
            chosen = None if other == group else self._in_group(other, request)
            if chosen is not None:
                return chosen
        self.stopped = self._when_blocked == "spill"
        return None

    def may_return(self, i: int, request: Request) -> bool:
        """Whether the request may go there because its prefix is warm there.

        It may be another group's DE, unless requests wait in that group.
        """
        return self._loads.has_room(i, request) and self.group_of[i] not in self.blocked

    def assign(self, i: int, request: Request) -> None:
        """Count the request to the DE with this index, and reserve memory for it."""
        group = self.group_of[i]
        by_requests, by_tokens = self._by_requests[group], self._by_tokens[group]
        del by_requests[bisect_left(by_requests, self._requests_key(i))]
        del by_tokens[bisect_left(by_tokens, self._tokens_key(i))]
        self._loads.assign(i, request)
        self._sums[group] += request.tokens
        insort(by_requests, self._requests_key(i))
        insort(by_tokens, self._tokens_key(i))

    def _group(self, request: Request, sums: Sequence[int]) -> int | None:
        """Level 1, among the groups in which some DE could take it were it empty."""
        group = sums.index(min(sums))
        if not request.excluded and request.reserved_tokens <= self._capacity[group]:
            return group
        able = [g for g in range(len(sums)) if self._could_take(g, request)]
        return min(able, key=sums.__getitem__, default=None)

    def _in_group(self, group: int, request: Request) -> int | None:
        """Level 2."""
        need, excluded = request.reserved_tokens, request.excluded
        if need > self._most_free[group]:
            return None
        free, names = self._loads.free, self._loads.names
        most = self.bounds[group] - request.tokens
        if self._by_tokens[group][0][0] <= most:
            for _, tokens, i in self._by_requests[group]:
                if tokens <= most and free[i] >= need and not (excluded and names[i] in excluded):
                    return i
        for _, _, i in self._by_tokens[group]:
            if free[i] >= need and not (excluded and names[i] in excluded):
                return i
        if not excluded:
            # Memory only shrinks within a round: nothing as large is looked for again.
            self._most_free[group] = need - 1
        return None

    def _bounds(self, queue: Sequence[Request], z: float) -> list[float]:
        """Z of each group, with R from a rehearsal of level 1 over the queue."""
        sums, tokens_of_r = list(self._sums), [0] * len(self._sums)
        room = [sum(max(0, self._loads.free[i]) for i in members) for members in self._members]
        still_open = set(range(len(sums)))
        for request in queue:
            if not still_open:
                break
            group = self._group(request, sums)
            if group is None:
                continue
            sums[group] += request.tokens
            if group in still_open:
                if request.reserved_tokens <= room[group]:
                    room[group] -= request.reserved_tokens
                    tokens_of_r[group] += request.tokens
                else:
                    still_open.remove(group)
        return [
            z * (taken + now) / len(members)
            for taken, now, members in zip(tokens_of_r, self._sums, self._members, strict=True)
        ]

    def _could_take(self, group: int, request: Request) -> bool:
        engines = self._loads.engines
        return any(engines[i].could_take(request) for i in self._members[group])

    def _largest(self, members: Sequence[int]) -> float:
        sizes = [self._loads.engines[i].capacity_tokens for i in members]
        return max(math.inf if size is None else size for size in sizes)

    def _requests_key(self, i: int) -> tuple[int, int, int]:
        return (self._loads.requests[i], self._loads.tokens[i], i)

    def _tokens_key(self, i: int) -> tuple[int, int, int]:
        return (self._loads.tokens[i], self._loads.requests[i], i)
