"""Placement, whatever the cluster and the queue."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Round, Rules, place
from tests.scheduling.clusters import algorithm_1, cases, replay, two_levels

Case: TypeAlias = tuple[list[Request], Cluster, Rules]

some = settings(max_examples=200, deadline=None)


def takes(pe: PrefillEngine, request: Request, chosen: Rules) -> bool:
    under_beta = pe.tokens <= chosen.beta or chosen.policy == "round_robin"
    return under_beta and pe.name not in request.excluded


def has_memory(engine: DecodeEngine, request: Request) -> bool:
    need = request.tokens + request.output_tokens
    return engine.free_tokens >= need and engine.name not in request.excluded


def could_be_placed(request: Request, cluster: Cluster, chosen: Rules) -> bool:
    return any(takes(e, request, chosen) for e in cluster.prefill) and any(
        has_memory(e, request) for e in cluster.decode
    )


def ids(requests: Sequence[Request]) -> list[str]:
    return [request.id for request in requests]


@some
@given(cases())
def test_every_request_is_in_one_part_of_the_answer_and_in_order(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    result = place(queue, cluster, chosen)
    parts = [[p.request for p in result.placements], ids(result.waiting), ids(result.stranded)]
    for part in parts:
        assert part == [name for name in ids(queue) if name in part]
    assert sorted(name for part in parts for name in part) == sorted(ids(queue))
    if cluster.prefill and cluster.decode:
        for request in queue:
            possible = any(e.name not in request.excluded for e in cluster.prefill) and any(
                e.name not in request.excluded
                and (e.capacity_tokens or 0) >= request.tokens + request.output_tokens
                for e in cluster.decode
            )
            assert (request in result.stranded) == (not possible)


@some
@given(cases())
def test_nothing_is_committed_twice_and_no_bound_is_broken(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    result = place(queue, cluster, chosen)
    # The replay also checks that the cluster comes out as counted here.
    for step in replay(queue, cluster, result):
        assert has_memory(step.de, step.request), "memory, and not excluded"
        assert step.pe.name not in step.request.excluded
        if chosen.policy == "dualpath":
            over = chosen.over_beta if step.placement.warm_prefill else 1.0
            assert step.pe.tokens <= chosen.beta * over
            assert any(takes(e, step.request, chosen) for e in step.cluster.prefill)
        nodes = [node for node, _ in step.placement.shares]
        assert set(nodes) <= {step.pe.node, step.de.node}
        assert len(set(nodes)) == len(nodes) > 0
        assert sum(weight for _, weight in step.placement.shares) == pytest.approx(1.0)
        assert 0 <= step.placement.read_tokens <= step.request.hit_tokens
        assert step.placement.warm_prefill == (step.pe.name == step.request.warm_prefill)
        assert step.placement.warm_decode == (step.de.name == step.request.warm_decode)


@some
@given(cases(policy="dualpath", over_beta=1.0))
def test_each_pe_is_algorithm_1s_or_the_warm_one(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    for step in replay(queue, cluster, place(queue, cluster, chosen)):
        seen = step.cluster
        if not chosen.grow_read_queue:
            seen = replace(seen, read_queues=cluster.read_queues)
        rule = algorithm_1(seen, step.request, chosen.alpha, chosen.beta)
        returned = chosen.affinity and step.placement.warm_prefill and step.request.warm_tokens
        assert step.pe.name == rule or returned


@some
@given(cases(warm=False, policy="dualpath", when_blocked="group", beta=1e9))
def test_des_are_those_of_the_papers_two_levels(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    queue = [replace(r, excluded=r.excluded - {e.name for e in cluster.prefill}) for r in queue]
    result = place(queue, cluster, chosen)
    if not cluster.prefill or not cluster.decode:
        return
    able = [request for request in queue if request not in result.stranded]
    expected = two_levels(able, cluster, chosen.z)
    got = {p.request: p.decode for p in result.placements}
    assert got == {name: engine for name, engine in expected.items() if engine}


@some
@given(cases(warm=False, policy="dualpath", when_blocked="spill"))
def test_a_group_with_memory_is_used_before_another(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    for step in replay(queue, cluster, place(queue, cluster, chosen)):
        sums: Counter[str] = Counter()
        for engine in step.cluster.decode:
            sums[engine.group] += engine.tokens
        roomy = {e.group for e in step.cluster.decode if has_memory(e, step.request)}
        assert sums[step.de.group] == min(sums[group] for group in roomy)


@some
@given(cases(when_blocked="spill"))
def test_fifo_is_kept_and_nothing_waits_that_an_engine_could_take(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    result = place(queue, cluster, chosen)
    able = [name for name in ids(queue) if name not in ids(result.stranded)]
    assert [p.request for p in result.placements] + ids(result.waiting) == able
    if result.waiting:
        assert not could_be_placed(result.waiting[0], result.cluster_after, chosen)


@some
@given(cases(when_blocked="pass"))
def test_where_others_may_pass_nothing_at_all_waits_that_an_engine_could_take(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    result = place(queue, cluster, chosen)
    for request in result.waiting:
        assert not could_be_placed(request, result.cluster_after, chosen)


@some
@given(cases(when_blocked="group"))
def test_in_the_papers_order_a_head_waits_only_for_a_group_that_is_full(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    result = place(queue, cluster, chosen)
    if not result.waiting or not cluster.prefill or not cluster.decode:
        return
    head, after = result.waiting[0], result.cluster_after
    pe_free = any(takes(e, head, chosen) for e in after.prefill)
    full_groups = {e.group for e in after.decode} - {
        e.group for e in after.decode if has_memory(e, head)
    }
    assert not pe_free or full_groups


def drained(
    cluster: Cluster, under_way: dict[str, list[tuple[str, Request]]], name: str
) -> Cluster:
    """The cluster when all that an engine had is done."""
    gone = under_way.pop(name, [])
    tokens = sum(request.tokens for _, request in gone)
    reserved = sum(request.reserved_tokens for _, request in gone)
    return replace(
        cluster,
        prefill=tuple(
            replace(e, requests=e.requests - len(gone), tokens=e.tokens - tokens)
            if e.name == name
            else e
            for e in cluster.prefill
        ),
        decode=tuple(
            replace(
                e,
                requests=e.requests - len(gone),
                tokens=e.tokens - tokens,
                free_tokens=e.free_tokens + reserved,
            )
            if e.name == name
            else e
            for e in cluster.decode
        ),
    )


@some
@given(cases(most=25), st.sampled_from(["spill", "group"]), st.integers(0, 9))
def test_nobody_starves_when_engines_drain(case: Case, when_blocked: str, seed: int) -> None:
    queue, cluster, chosen = case
    chosen = replace(chosen, when_blocked=when_blocked)
    # They begin empty: what they have then is never done.
    cluster = replace(
        cluster,
        prefill=tuple(replace(e, requests=0, tokens=0) for e in cluster.prefill),
        decode=tuple(
            replace(e, requests=0, tokens=0, free_tokens=e.capacity_tokens or 0)
            for e in cluster.decode
        ),
    )
    if not cluster.prefill or not cluster.decode:
        return
    names = [e.name for e in (*cluster.prefill, *cluster.decode)]
    dice = random.Random(seed)
    under_way: dict[str, list[tuple[str, Request]]] = {}
    waiting: Sequence[Request] = queue
    newcomers = 0
    watched = set(ids(queue))
    for _ in range(2 * len(queue) + 2):
        # Each drains once, in any order, and small requests keep coming.
        for name in dice.sample(names, len(names)):
            cluster = drained(cluster, under_way, name)
            result = place(waiting, cluster, chosen)
            by_id = {request.id: request for request in waiting}
            for p in result.placements:
                for engine in (p.prefill, p.decode):
                    under_way.setdefault(engine, []).append((p.request, by_id[p.request]))
            watched -= {p.request for p in result.placements} | set(ids(result.stranded))
            cluster = replace(result.cluster_after, read_queues={})
            waiting = [*result.waiting, Request(f"new{newcomers}", 1)]
            newcomers += 1
        if not watched:
            return
    pytest.fail(f"still waiting: {watched}")


@some
@given(cases())
def test_the_same_is_decided_again_in_whatever_order_queues_are_named(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    before = repr((queue, cluster, chosen))
    result = place(queue, cluster, chosen)
    assert repr((queue, cluster, chosen)) == before, "it changes nothing that it was given"
    again = replace(
        cluster,
        read_queues=dict(reversed(cluster.read_queues.items())),
        read_rates=dict(reversed(cluster.read_rates.items())),
    )
    assert place(list(queue), again, chosen) == result


@some
@given(cases(warm=False, path="pe", when_blocked="spill", policy="dualpath"))
def test_pes_do_not_depend_on_when_rounds_are_held(
    case: Case,
) -> None:
    queue, cluster, chosen = case
    if not chosen.grow_read_queue or not cluster.prefill:
        return
    queue = [replace(request, excluded=frozenset()) for request in queue]
    vast = tuple(replace(e, free_tokens=10**9, capacity_tokens=None) for e in cluster.decode)
    cluster = replace(cluster, decode=vast)
    at_once = [p.prefill for p in place(queue, cluster, chosen).placements]
    one_by_one: list[str] = []
    for request in queue:
        result: Round = place([request], cluster, chosen)
        cluster = result.cluster_after
        one_by_one += [p.prefill for p in result.placements]
    assert one_by_one == at_once


@some
@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(0, 7), max_size=6))
def test_round_robin_gives_all_the_same_number(
    prefill: int, decode: int, rounds: list[int]
) -> None:
    cluster = Cluster(
        tuple(PrefillEngine(f"p{i}", "n") for i in range(prefill)),
        tuple(DecodeEngine(f"d{i}", "n", f"g{i % 2}", 0, 0, 10**6) for i in range(decode)),
    )
    for count in rounds:
        queue = [Request(f"r{i}", 100 * i) for i in range(count)]
        cluster = place(queue, cluster, Rules(policy="round_robin")).cluster_after
    for counts in (
        [e.requests for e in cluster.prefill],
        [e.requests for e in cluster.decode],
    ):
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == sum(rounds)


@some
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_algorithm_1_balances_tokens_better_than_the_longest_request(
    lengths: list[int], engines: int
) -> None:
    cluster = Cluster(
        tuple(PrefillEngine(f"p{i}", f"n{i}") for i in range(engines)),
        tuple(DecodeEngine(f"d{i}", f"m{i}", f"g{i}", 0, 0, 10**6) for i in range(engines)),
    )
    queue = [Request(f"r{i}", tokens) for i, tokens in enumerate(lengths)]
    after = place(queue, cluster, Rules()).cluster_after
    for loads in ([e.tokens for e in after.prefill], [e.tokens for e in after.decode]):
        assert max(loads) - min(loads) <= max(lengths)
