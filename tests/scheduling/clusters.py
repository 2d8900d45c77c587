"""Clusters and queues for tests of placement, and the paper's rules written down once more."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Placement, Round, Rules

NODES = ["n0", "n1", "n2", "n3"]
ENGINES = [f"{kind}{i}" for kind in "pd" for i in range(5)]


def pes(
    *tokens: int, requests: Sequence[int] = (), nodes: Sequence[str] = ()
) -> tuple[PrefillEngine, ...]:
    """PEs with these loads, p0 on n0 and so on."""
    return tuple(
        PrefillEngine(
            f"p{i}",
            nodes[i] if nodes else f"n{i}",
            requests[i] if requests else 0,
            n,
        )
        for i, n in enumerate(tokens)
    )


def de(
    name: str, tokens: int = 0, free: int = 10**9, requests: int = 0, group: str = "g"
) -> DecodeEngine:
    """A DE on a node of its own."""
    return DecodeEngine(name, f"node of {name}", group, requests, tokens, free)


def requests(*tokens: int, **more: int) -> list[Request]:
    """r0, r1, ... of these lengths."""
    return [Request(f"r{i}", n, **more) for i, n in enumerate(tokens)]


def placed(result: Round) -> list[tuple[str, str, str]]:
    """What went where."""
    return [(p.request, p.prefill, p.decode) for p in result.placements]


class Dice:
    """Figures of a small case, often alike, often on a bound."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.one_of = self._random.choice

    def tokens(self) -> int:
        """Of an engine, a queue, or a prompt."""
        return self.one_of([0, 50, 100, 200, self._random.randrange(400)])

    def names(self, chance: float) -> frozenset[str]:
        """Of some engines."""
        return frozenset(name for name in ENGINES if self._random.random() < chance)

    def cluster(self, prefill: int, decode: int) -> Cluster:
        """With so many engines."""
        groups = {node: self.one_of("abc") for node in NODES}
        decode_nodes = [self.one_of(NODES) for _ in range(decode)]
        loads = [(self.tokens(), self.tokens()) for _ in range(decode)]
        return Cluster(
            tuple(
                PrefillEngine(f"p{i}", self.one_of(NODES), self.one_of([0, 1, 2]), self.tokens())
                for i in range(prefill)
            ),
            tuple(
                # What an engine has in use it has reserved, too.
                DecodeEngine(
                    f"d{i}", node, groups[node], self.one_of([0, 1, 2]), used, free, used + free
                )
                for i, (node, (used, free)) in enumerate(zip(decode_nodes, loads, strict=True))
            ),
            {node: self.tokens() for node in NODES if self.one_of([True, False])},
            {node: self.one_of([0.0, 10.0, 70.0]) for node in NODES if self.one_of([True, False])},
        )

    def queue(self, length: int, warm: bool) -> list[Request]:
        """Requests, some of which return somewhere or were refused somewhere."""
        queue = []
        for i in range(length):
            tokens = self.tokens() // 2
            queue.append(
                Request(
                    f"r{i}",
                    tokens,
                    min(tokens, self.tokens()),
                    self.one_of([0, 0, 10, 60]),
                    self.one_of([None, *ENGINES]) if warm else None,
                    self.one_of([None, *ENGINES]) if warm else None,
                    min(tokens, self.tokens()) if warm else 0,
                    self.names(self.one_of([0.0, 0.0, 0.3])),
                )
            )
        return queue

    def rules(self, **fixed: object) -> Rules:
        """Any, but for what is fixed."""
        chosen: dict[str, object] = {
            "policy": self.one_of(["dualpath", "dualpath", "round_robin"]),
            "path": self.one_of(["shorter_queue", "split", "pe", "de", "alternate"]),
            "alpha": self.one_of([0.0, 60.0, 200.0, math.inf]),
            "beta": self.one_of([0.0, 60.0, 200.0, math.inf]),
            "grow_read_queue": self.one_of([True, False]),
            "when_blocked": self.one_of(["spill", "group", "pass"]),
            "affinity": self.one_of([True, False]),
            "over_beta": self.one_of([1.0, 2.0]),
            "compute_rate": self.one_of([None, 10.0, 100.0]),
            "read_rate": self.one_of([None, 10.0, 100.0]),
            "decode_restores": self.one_of([True, False]),
        }
        return Rules(**(chosen | fixed))


@st.composite
def cases(
    draw: st.DrawFn, warm: bool = True, most: int = 12, **fixed: object
) -> tuple[list[Request], Cluster, Rules]:
    """A queue, a cluster and rules. Sizes are drawn, figures are rolled: that is much faster."""
    prefill, decode = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    length = draw(st.integers(0, most))
    dice = Dice(draw(st.integers(0, 1 << 32)))
    return dice.queue(length, warm), dice.cluster(prefill, decode), dice.rules(**fixed)


@dataclass(frozen=True, slots=True)
class Step:
    """A placement, and the cluster as it was right before it."""

    request: Request
    placement: Placement
    cluster: Cluster
    pe: PrefillEngine
    de: DecodeEngine


def replay(queue: Sequence[Request], cluster: Cluster, result: Round) -> Iterator[Step]:
    """Carry the placements out one by one, counting independently of the code under test."""
    by_id = {request.id: request for request in queue}
    for placement in result.placements:
        request = by_id[placement.request]
        pe = next(e for e in cluster.prefill if e.name == placement.prefill)
        d = next(e for e in cluster.decode if e.name == placement.decode)
        yield Step(request, placement, cluster, pe, d)
        read = dict(cluster.read_queues)
        left = placement.read_tokens
        for node, weight in placement.shares:
            last = node == placement.shares[-1][0]
            part = left if last else round(weight * placement.read_tokens)
            read[node] = read.get(node, 0) + part
            left -= part
        cluster = replace(
            cluster,
            prefill=tuple(given_pe(e, request) if e is pe else e for e in cluster.prefill),
            decode=tuple(given_de(e, request) if e is d else e for e in cluster.decode),
            read_queues=read,
        )
    after = result.cluster_after
    assert after.prefill == cluster.prefill
    assert after.decode == cluster.decode
    reads = set(after.read_queues) | set(cluster.read_queues)
    assert all(after.read_queues.get(n, 0) == cluster.read_queues.get(n, 0) for n in reads)


def given_pe(engine: PrefillEngine, request: Request) -> PrefillEngine:
    """It, with one request more."""
    return replace(engine, requests=engine.requests + 1, tokens=engine.tokens + request.tokens)


def given_de(engine: DecodeEngine, request: Request) -> DecodeEngine:
    """It, with one request more."""
    return replace(
        engine,
        requests=engine.requests + 1,
        tokens=engine.tokens + request.tokens,
        free_tokens=engine.free_tokens - request.tokens - request.output_tokens,
    )


def algorithm_1(cluster: Cluster, request: Request, alpha: float, beta: float) -> str | None:
    """The paper's rule, word for word; the ties are ours."""
    allowed = [e for e in cluster.prefill if e.name not in request.excluded]
    c1 = [e for e in allowed if e.tokens > beta]
    c2 = [e for e in allowed if e not in c1 and cluster.read_queues.get(e.node, 0) <= alpha]
    c3 = [e for e in allowed if e not in c1 and e not in c2]
    least = min(c2 or c3, key=lambda e: (e.tokens, e.requests), default=None)
    return least.name if least else None


def two_levels(queue: Sequence[Request], cluster: Cluster, z: float) -> dict[str, str | None]:
    """The paper's DE scheduling alone, word for word: a DE, or None to wait, by request."""
    groups: dict[str, list[DecodeEngine]] = {}
    for engine in cluster.decode:
        groups.setdefault(engine.group, []).append(engine)
    sums = {name: sum(e.tokens for e in members) for name, members in groups.items()}
    fetched: dict[str, list[Request]] = {name: [] for name in groups}
    for request in queue:
        able = [
            name for name, members in groups.items() if any(e.could_take(request) for e in members)
        ]
        if able:
            group = min(able, key=lambda name: sums[name])
            sums[group] += request.tokens
            fetched[group].append(request)
    answer: dict[str, str | None] = {}
    for name, members in groups.items():
        room = sum(max(0, e.free_tokens) for e in members)
        r = []
        for request in fetched[name]:
            room -= request.tokens + request.output_tokens
            if room < 0:
                break
            r.append(request)
        bound = z * (sum(x.tokens for x in r) + sum(e.tokens for e in members)) / len(members)
        stopped = False
        for request in fetched[name]:
            candidates = [
                e
                for e in members
                if e.free_tokens >= request.tokens + request.output_tokens
                and e.name not in request.excluded
            ]
            if stopped or not candidates:
                stopped = True
                answer[request.id] = None
                continue
            below = [e for e in candidates if e.tokens + request.tokens <= bound]
            chosen = (
                min(below, key=lambda e: (e.requests, e.tokens))
                if below
                else min(candidates, key=lambda e: (e.tokens, e.requests))
            )
            answer[request.id] = chosen.name
            members[members.index(chosen)] = given_de(chosen, request)
    return answer
