"""Clusters and queues for tests of placement, and the paper's rules written down once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Placement, Round, Rules

NODES = ["n0", "n1", "n2", "n3"]


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


@st.composite
def clusters(draw: st.DrawFn, most_engines: int = 5) -> Cluster:
    """Small ones, with figures often alike."""
    tokens = st.integers(0, 4).map(lambda n: n * 50) | st.integers(0, 400)
    counts = st.integers(0, 3)
    prefill = draw(
        st.lists(st.tuples(st.sampled_from(NODES), counts, tokens), max_size=most_engines)
    )
    decode = draw(
        st.lists(st.tuples(st.sampled_from(NODES), counts, tokens, tokens), max_size=most_engines)
    )
    groups = draw(st.lists(st.sampled_from("ab"), min_size=4, max_size=4))
    queues = draw(st.dictionaries(st.sampled_from(NODES), tokens))
    rates = draw(st.dictionaries(st.sampled_from(NODES), st.sampled_from([0.0, 10.0, 70.0])))
    return Cluster(
        tuple(PrefillEngine(f"p{i}", *values) for i, values in enumerate(prefill)),
        tuple(
            # What an engine has in use it has reserved, too.
            DecodeEngine(f"d{i}", node, groups[NODES.index(node)], n, t, free, t + free)
            for i, (node, n, t, free) in enumerate(decode)
        ),
        queues,
        rates,
    )


@st.composite
def queues(draw: st.DrawFn, warm: bool = True, most: int = 12) -> list[Request]:
    """Requests, some of which return somewhere or were refused somewhere."""
    lengths = st.integers(0, 4).map(lambda n: n * 25) | st.integers(0, 200)
    names = st.sampled_from([f"{kind}{i}" for kind in "pd" for i in range(5)])
    nobody = st.just(frozenset[str]())
    drawn = draw(
        st.lists(
            st.tuples(
                lengths,
                lengths,
                st.integers(0, 60),
                st.none() | names if warm else st.none(),
                st.none() | names if warm else st.none(),
                lengths,
                nobody | nobody | st.frozensets(names, max_size=3),
            ),
            max_size=most,
        )
    )
    return [
        Request(f"r{i}", tokens, min(hit, tokens), out, pe_name, de_name, min(long, tokens), no)
        for i, (tokens, hit, out, pe_name, de_name, long, no) in enumerate(drawn)
    ]


bounds = st.sampled_from([0.0, 60.0, 200.0, 1e9, float("inf")])


def rules(**fixed: object) -> st.SearchStrategy[Rules]:
    """Any rules, but for what is fixed."""
    choices: dict[str, st.SearchStrategy[object]] = {
        "policy": st.sampled_from(["dualpath", "dualpath", "round_robin"]),
        "path": st.sampled_from(["shorter_queue", "split", "pe", "de", "alternate"]),
        "alpha": bounds,
        "beta": bounds,
        "grow_read_queue": st.booleans(),
        "when_blocked": st.sampled_from(["spill", "group", "pass"]),
        "affinity": st.booleans(),
        "over_beta": st.sampled_from([1.0, 2.0]),
        "compute_rate": st.sampled_from([None, 10.0, 100.0]),
        "read_rate": st.sampled_from([None, 10.0, 100.0]),
        "decode_restores": st.booleans(),
    }
    choices.update({name: st.just(value) for name, value in fixed.items()})
    return st.fixed_dictionaries(choices).map(lambda chosen: Rules(**chosen))  # type: ignore[arg-type]


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
