"""One round of placement: which PE, which DE, and who reads, for each request that waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualpath_sglang.scheduling.affinity import Visit, pays, rates
from dualpath_sglang.scheduling.decode import TwoLevel
from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.loads import DecodeLoads, PrefillLoads, ReadQueues
from dualpath_sglang.scheduling.paths import Side
from dualpath_sglang.scheduling.prefill import Algorithm1
from dualpath_sglang.scheduling.reading import (
    Shares,
    read_seconds,
    read_shares,
    tokens_of,
    usable_rate,
)
from dualpath_sglang.scheduling.round_robin import DecodeTurns, PrefillTurns
from dualpath_sglang.scheduling.rules import Rules

__all__ = ["Placement", "Round", "Rules", "place"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Args:
        request: its id.
        prefill: name of the PE.
        decode: name of the DE.
        shares: who reads its hits from storage: (node, weight > 0), weights sum to 1. Never empty,
            also when no hit is expected.
        read_tokens: how many tokens are expected to be read from storage.
        warm_prefill: whether the PE is the one in which its prefix is warm.
        warm_decode: whether the DE is.
    """

    request: str
    prefill: str
    decode: str
    shares: tuple[tuple[str, float], ...]
    read_tokens: int = 0
    warm_prefill: bool = False
    warm_decode: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What came of a round. Every request of the queue is in one of the three.

    Args:
        placements: in the order of the queue.
        waiting: those that are to be given to the next round, in the order of the queue.
        stranded: those that no engine of this cluster will ever take, however empty: excluded
            everywhere, or larger than each DE. They hold up nobody. The caller fails them, lifts
            their exclusion, or offers them again when an engine has joined.
        cluster_after: the cluster with the placements counted: requests, tokens, memory reserved,
            read queues, turns.
    """

    placements: tuple[Placement, ...]
    waiting: tuple[Request, ...]
    stranded: tuple[Request, ...]
    cluster_after: Cluster


def place(queue: Sequence[Request], cluster: Cluster, rules: Rules) -> Round:
    """Place what can be placed, in the order of the queue.

    A request needs a PE and a DE at once; while either is not to be had it waits, and
    ``Rules.when_blocked`` says who waits behind it. It is never given to an engine that it
    excludes. Where there is no PE at all, or no DE, all wait.

    Pure and deterministic: the same queue, cluster and rules give the same round.

    Raises:
        ValueError: two PEs or two DEs have one name.
    """
    work = _Work(queue, cluster, rules)
    if not (cluster.prefill and cluster.decode):
        return Round((), tuple(queue), (), cluster)
    work.run()
    return work.result()


class _PrefillRule(Protocol):
    """Chooses PEs, by index."""

    @property
    def full(self) -> bool: ...
    def choose(self, request: Request) -> int | None: ...
    def may_return(self, i: int, request: Request, over_beta: float, /) -> bool: ...
    def assign(self, i: int, request: Request) -> None: ...


class _DecodeRule(Protocol):
    """Chooses DEs, by index."""

    @property
    def stopped(self) -> bool: ...
    def choose(self, request: Request) -> int | None: ...
    def may_return(self, i: int, request: Request, /) -> bool: ...
    def assign(self, i: int, request: Request) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a PE and a DE would read from storage: tokens, their nodes, and who reads how much."""

    tokens: int
    sides: tuple[Side, Side]
    shares: Shares


class _Work:
    """A round under way."""

    def __init__(self, queue: Sequence[Request], cluster: Cluster, rules: Rules) -> None:
        self._cluster = cluster
        self._rules = rules
        self._able, self._stranded = _sorted_out(queue, cluster)
        self._waiting: list[Request] = []
        self._placements: list[Placement] = []
        self._prefill = PrefillLoads(cluster.prefill)
        self._decode = DecodeLoads(cluster.decode)
        self._queues = ReadQueues(cluster.read_queues, rules.grow_read_queue)
        self._rates = rates(rules, cluster.read_rates)
        self._node_rates: dict[str, float | None] = {}
        self._side_turn = cluster.next_side
        self._pe_turn, self._de_turn = cluster.next_prefill, cluster.next_decode

    def run(self) -> None:
        """Go through the queue."""
        pe_rule, de_rule = self._rules_for_engines()
        for position, request in enumerate(self._able):
            if pe_rule.full or de_rule.stopped:
                self._waiting.extend(self._able[position:])
                break
            de = de_rule.choose(request)
            if de is None:
                self._waiting.append(request)
                continue
            de = self._warm_decode(de_rule, request, de)
            pe = pe_rule.choose(request)
            if pe is None:
                self._waiting.append(request)
                if self._rules.when_blocked == "pass":
                    continue
                self._waiting.extend(self._able[position + 1 :])
                break
            reading = self._reading(request, pe, de)
            pe, reading = self._warm_prefill(pe_rule, request, de, pe, reading)
            pe_rule.assign(pe, request)
            de_rule.assign(de, request)
            self._placed(request, pe, de, reading)
        if isinstance(pe_rule, PrefillTurns) and isinstance(de_rule, DecodeTurns):
            self._pe_turn, self._de_turn = pe_rule.turn, de_rule.turn

    def result(self) -> Round:
        """What came of it."""
        after = Cluster(
            self._prefill.engines_after(),
            self._decode.engines_after(),
            self._queues.lengths_after(),
            self._cluster.read_rates,
            self._pe_turn,
            self._de_turn,
            self._side_turn,
        )
        return Round(tuple(self._placements), tuple(self._waiting), tuple(self._stranded), after)

    def _rules_for_engines(self) -> tuple[_PrefillRule, _DecodeRule]:
        rules = self._rules
        if rules.policy == "round_robin":
            return (
                PrefillTurns(self._prefill, self._pe_turn),
                DecodeTurns(self._decode, self._de_turn, rules.when_blocked != "pass"),
            )
        return (
            Algorithm1(self._prefill, self._queues, rules.alpha, rules.beta),
            TwoLevel(self._decode, self._able, rules.z, rules.when_blocked),
        )

    def _placed(self, request: Request, pe: int, de: int, reading: _Reading) -> None:
        for node, part in tokens_of(reading.shares, reading.tokens):
            self._queues.add(node, part)
        self._side_turn = 1 - self._side_turn % 2
        pe_name, de_name = self._prefill.names[pe], self._decode.names[de]
        self._placements.append(
            Placement(
                request.id,
                pe_name,
                de_name,
                reading.shares,
                reading.tokens,
                pe_name == request.warm_prefill,
                de_name == request.warm_decode,
            )
        )

    def _warm_prefill(
        self, rule: _PrefillRule, request: Request, de: int, pe: int, reading: _Reading
    ) -> tuple[int, _Reading]:
        """The warm PE and what is read for it if that pays, else those given."""
        warm = self._warm(request.warm_prefill, self._prefill.index, request)
        if warm is None or warm == pe:
            return pe, reading
        if not rule.may_return(warm, request, self._rules.over_beta):
            return pe, reading
        there = self._reading(request, warm, de)
        if pays(
            self._prefill_visit(request, warm, there),
            self._prefill_visit(request, pe, reading),
            self._rates.compute,
        ):
            return warm, there
        return pe, reading

    def _warm_decode(self, rule: _DecodeRule, request: Request, de: int) -> int:
        """The warm DE if that pays, else the given one."""
        warm = self._warm(request.warm_decode, self._decode.index, request)
        if warm is None or warm == de or not rule.may_return(warm, request):
            return de
        there, here = self._decode_visit(request, warm), self._decode_visit(request, de)
        return warm if pays(there, here, self._rates.decode) else de

    def _warm(self, name: str | None, index: dict[str, int], request: Request) -> int | None:
        if name is None or not (self._rules.affinity and request.warm_tokens):
            return None
        return index.get(name)

    def _prefill_visit(self, request: Request, pe: int, reading: _Reading) -> Visit:
        warm = self._warm_tokens(self._prefill.names[pe] == request.warm_prefill, request)
        return Visit(
            self._prefill.tokens[pe],
            read_seconds(reading.sides, reading.shares, reading.tokens, self._rates.read),
            request.tokens - min(request.tokens, max(warm, request.hit_tokens)),
        )

    def _decode_visit(self, request: Request, de: int) -> Visit:
        """A DE gets what it has not in memory from elsewhere; at most as fast as it is read."""
        warm = self._warm_tokens(self._decode.names[de] == request.warm_decode, request)
        tokens = max(0, request.hit_tokens - warm)
        side = self._side(self._decode.engines[de].node)
        queue = side.queue_bytes if self._rules.decode_restores and tokens else 0
        return Visit(self._decode.tokens[de], (queue + tokens) / (side.rate or self._rates.read))

    def _warm_tokens(self, is_warm: bool, request: Request) -> int:
        return min(request.warm_tokens, request.tokens) if is_warm else 0

    def _reading(self, request: Request, pe: int, de: int) -> _Reading:
        """What the pair reads from storage, and who reads it."""
        warm = self._warm_tokens(self._prefill.names[pe] == request.warm_prefill, request)
        if self._rules.decode_restores and self._decode.names[de] != request.warm_decode:
            warm = 0
        tokens = max(0, request.hit_tokens - warm)
        sides = (
            self._side(self._prefill.engines[pe].node),
            self._side(self._decode.engines[de].node),
        )
        shares = read_shares(*sides, tokens, self._rules.path, self._side_turn)
        return _Reading(tokens, sides, shares)

    def _side(self, node: str) -> Side:
        if node not in self._node_rates:
            known = self._cluster.read_rates
            # A rate that says nothing makes a side that cannot be used.
            self._node_rates[node] = usable_rate(known, node) or (0.0 if node in known else None)
        return Side(node, self._queues.length(node), self._node_rates[node])


def _sorted_out(
    queue: Sequence[Request], cluster: Cluster
) -> tuple[Sequence[Request], list[Request]]:
    """Those that some PE and some DE could take were they empty, and the others."""
    sizes = [engine.capacity_tokens for engine in cluster.decode]
    largest = max((math.inf if size is None else size for size in sizes), default=math.inf)
    if not any(request.excluded or request.reserved_tokens > largest for request in queue):
        return queue, []
    able: list[Request] = []
    stranded: list[Request] = []
    for request in queue:
        plain = not request.excluded and request.reserved_tokens <= largest
        engines: tuple[Sequence[PrefillEngine], Sequence[DecodeEngine]]
        engines = (cluster.prefill, cluster.decode)
        could = plain or all(any(e.could_take(request) for e in side) for side in engines)
        (able if could else stranded).append(request)
    return able, stranded
