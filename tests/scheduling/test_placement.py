"""Placement: the paper's cases by hand, and what it leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualpath_sglang.scheduling.engines import Cluster, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Rules, place
from dualpath_sglang.scheduling.rules import alpha_tokens, beta_tokens
from tests.scheduling.clusters import de, pes, placed, requests

ONE_DE = (de("d0"),)


def prefills(queue: list[Request], cluster: Cluster, **rules: object) -> list[str]:
    """The PEs, in the order of the queue; the DEs bound nothing."""
    result = place(queue, cluster, Rules(**rules))
    return [placement.prefill for placement in result.placements]


def decodes(queue: list[Request], *engines: object, **rules: object) -> list[str]:
    """The DEs, in the order of the queue; the PE bounds nothing."""
    cluster = Cluster(pes(0), engines)
    result = place(queue, cluster, Rules(**rules))
    return [placement.decode for placement in result.placements]


# Algorithm 1.


def test_alpha_and_beta_are_three_and_five_seconds_of_work() -> None:
    assert (alpha_tokens(1000), beta_tokens(1000)) == (3000, 5000)
    assert (alpha_tokens(1000, 1), beta_tokens(1000, 2)) == (1000, 2000)


def test_the_pe_with_the_fewest_tokens_takes_the_head() -> None:
    assert prefills(requests(10), Cluster(pes(30, 20, 40), ONE_DE)) == ["p1"]


def test_a_pe_grows_by_what_it_was_given() -> None:
    assert prefills(requests(15, 10, 1), Cluster(pes(30, 20, 40), ONE_DE)) == ["p1", "p0", "p1"]


def test_a_short_read_queue_comes_before_few_tokens() -> None:
    cluster = Cluster(pes(10, 20, 30), ONE_DE, {"n0": 101, "n1": 100})
    assert prefills(requests(1), cluster, alpha=100) == ["p1"], "n0 is over alpha, n1 at it"
    assert prefills(requests(1), cluster, alpha=101) == ["p0"]


def test_where_all_read_queues_are_long_the_fewest_tokens_win() -> None:
    cluster = Cluster(pes(30, 10, 20), ONE_DE, {"n0": 500, "n1": 900, "n2": 101})
    assert prefills(requests(1), cluster, alpha=100) == ["p1"], "not the shortest read queue"


def test_a_pe_over_beta_gets_nothing_even_where_the_others_read_much() -> None:
    cluster = Cluster(pes(51, 50), ONE_DE, {"n1": 900})
    assert prefills(requests(1, 1), cluster, alpha=100, beta=50) == ["p1"], "then it is over too"


def test_beta_holds_for_the_second_choice_too() -> None:
    cluster = Cluster(pes(0, 50), ONE_DE, {"n1": 900})
    elsewhere = [Request(f"r{i}", 1, excluded=frozenset({"p0"})) for i in range(2)]
    assert prefills(elsewhere, cluster, alpha=100, beta=50) == ["p1"]
    assert prefills(elsewhere, cluster, alpha=100, beta=51) == ["p1", "p1"]


def test_a_prompt_longer_than_beta_is_placed() -> None:
    result = place(requests(1000, 1), Cluster(pes(0), ONE_DE), Rules(beta=10))
    assert placed(result) == [("r0", "p0", "d0")]
    assert [r.id for r in result.waiting] == ["r1"]


def test_ties_go_to_fewer_requests_and_then_to_the_first() -> None:
    assert prefills(requests(1), Cluster(pes(5, 5, 5, requests=[2, 1, 1]), ONE_DE)) == ["p1"]


def test_whether_a_burst_sees_its_own_reads() -> None:
    cluster = Cluster(pes(0, 50), ONE_DE)
    burst = [Request(f"r{i}", 10, hit_tokens=10) for i in range(4)]
    rules = {"alpha": 15, "path": "pe"}
    assert prefills(burst, cluster, **rules) == ["p0", "p0", "p1", "p1"], "15 are passed after two"
    frozen = place(burst, cluster, Rules(alpha=15, path="pe", grow_read_queue=False))
    assert [p.prefill for p in frozen.placements] == ["p0"] * 4
    assert frozen.cluster_after.read_queues == {"n0": 40}, "they grow for the next round anyway"


# DEs, two levels.


def test_the_group_with_the_fewest_tokens_takes_it() -> None:
    engines = [
        de("a0", 10, group="a"),
        de("a1", 50, group="a"),
        de("b0", 29, group="b"),
        de("b1", 30, group="b"),
    ]
    # a and b have 60 and 59, then 60 and 61, 61 and 61 (a is the first), 66 and 61.
    assert decodes(requests(2, 1, 5, 1), *engines) == ["b0", "a0", "a0", "b1"]


def test_below_z_the_fewest_requests_win() -> None:
    # Z = 1.05 x (10 + 100 + 80) / 2 = 99.75: d0 would have 110.
    assert decodes(requests(10), de("d0", 100, requests=1), de("d1", 80, requests=9)) == ["d1"]
    # Z = 1.05 x (10 + 90 + 80) / 2 = 94.5; with z = 1.2 it is 108 and d0 has room below it.
    engines = de("d0", 90, requests=1), de("d1", 80, requests=9)
    assert decodes(requests(10), *engines) == ["d1"]
    assert decodes(requests(10), *engines, z=1.2) == ["d0"]


def test_over_z_the_fewest_tokens_win() -> None:
    # Z = 1.05 x 100 / 2 = 52.5, less than the request alone.
    assert decodes(requests(100), de("d0", 1, requests=0), de("d1", 0, requests=9)) == ["d1"]


def test_z_counts_what_fits_the_groups_memory_and_no_more() -> None:
    # R is r0 alone, r1 does not fit: Z = 1.05 x (10 + 60 + 50) / 2 = 63.
    engines = de("d0", 60, free=20, requests=0), de("d1", 50, free=20, requests=9)
    queue = requests(10, 1000)
    assert decodes(queue, *engines) == ["d1"]
    # It ends there: with the 30 that would fit in what is left, Z would be 78.75 and d0 below it.
    assert decodes(requests(10, 1000, 30), *engines) == ["d1"]
    # Had r1 counted, Z would be 588 and d0, with fewer requests, below it.
    roomy = [replace(engine, free_tokens=2000) for engine in engines]
    assert decodes(queue, *roomy) == ["d0", "d1"]


def test_memory_for_prompt_and_answer_is_reserved_at_once() -> None:
    queue = [Request("r0", 10, output_tokens=5), Request("r1", 10, output_tokens=5)]
    result = place(queue, Cluster(pes(0), (de("d0", free=29),)), Rules())
    assert placed(result) == [("r0", "p0", "d0")]
    (after,) = result.cluster_after.decode
    assert (after.requests, after.tokens, after.free_tokens) == (1, 10, 14)
    assert len(place(queue, Cluster(pes(0), (de("d0", free=30),)), Rules()).placements) == 2


def test_ties_among_des() -> None:
    same = [de("d0", 5, requests=1), de("d1", 4, requests=1), de("d2", 4, requests=1)]
    assert decodes(requests(1), *same, z=9.0) == ["d1"], "of equal requests fewer tokens"
    heavy = [de("d0", 4, requests=2), de("d1", 4, requests=1), de("d2", 4, requests=1)]
    assert decodes(requests(100), *heavy) == ["d1"], "of equal tokens fewer requests"


def test_what_waits_behind_a_request_for_which_its_group_has_no_memory() -> None:
    engines = (de("a0", 0, free=50, group="a"), de("b0", 40, free=500, group="b"))
    cluster = Cluster(pes(0), engines)
    # Level 1: r0 (100) to a, then r1 and r2 to b (a has 100), which then has 60.
    queue = requests(100, 10, 10)
    spilled = place(queue, cluster, Rules(when_blocked="spill"))
    assert placed(spilled)[0] == ("r0", "p0", "b0"), "b has memory for it"
    paper = place(queue, cluster, Rules(when_blocked="group"))
    assert placed(paper) == [("r1", "p0", "b0"), ("r2", "p0", "b0")]
    assert [r.id for r in paper.waiting] == ["r0"]


def test_a_request_spills_to_the_group_with_the_fewest_tokens() -> None:
    full = de("a0", 0, free=0, group="a")
    assert decodes(requests(9), full, de("b0", 50, group="b"), de("c0", 10, group="c")) == ["c0"]


def test_in_the_paper_the_head_of_a_group_holds_up_that_group_alone() -> None:
    engines = (de("a0", 0, free=50, group="a"), de("b0", 200, free=500, group="b"))
    # a has 0, 100, 110, 205: the last one goes to b.
    queue = requests(100, 10, 95, 200)
    result = place(queue, Cluster(pes(0), engines), Rules(when_blocked="group"))
    assert placed(result) == [("r3", "p0", "b0")], "r1 would fit a0, but r0 is its head"


@pytest.mark.parametrize(("when_blocked", "passed"), [("spill", []), ("pass", ["r1", "r2"])])
def test_whether_others_pass_one_that_fits_nowhere(when_blocked: str, passed: list[str]) -> None:
    engines = (de("a0", free=50, group="a"), de("b0", free=50, group="b"))
    rules = Rules(when_blocked=when_blocked)
    result = place(requests(100, 10, 10), Cluster(pes(0), engines), rules)
    assert [p.request for p in result.placements] == passed
    assert [r.id for r in result.waiting] == [f"r{i}" for i in range(3) if f"r{i}" not in passed]


@pytest.mark.parametrize(("when_blocked", "passed"), [("spill", 0), ("group", 0), ("pass", 1)])
def test_who_waits_behind_one_that_may_not_have_the_only_free_pe(
    when_blocked: str, passed: int
) -> None:
    queue = [Request("r0", 1, excluded=frozenset({"p0"})), Request("r1", 1)]
    rules = Rules(beta=50, when_blocked=when_blocked)
    result = place(queue, Cluster(pes(0, 100), ONE_DE), rules)
    assert placed(result) == [("r1", "p0", "d0")] * passed
    assert [r.id for r in result.waiting] == ["r0", "r1"][: 2 - passed]


# Requests that no engine, or not every engine, may have.


def test_a_request_is_not_placed_where_it_failed() -> None:
    cluster = Cluster(pes(0, 90), (de("d0"), de("d1", 90)))
    again = [Request("r0", 1, excluded=frozenset({"p0", "d0"}))]
    for policy in ("dualpath", "round_robin"):
        assert placed(place(again, cluster, Rules(policy=policy))) == [("r0", "p1", "d1")]


def test_who_can_go_nowhere_is_named_and_holds_up_nobody() -> None:
    cluster = Cluster(pes(0, 0), (replace(de("d0", free=5), capacity_tokens=100),))
    queue = [
        Request("everywhere", 1, excluded=frozenset({"p0", "p1"})),
        Request("large", 99, output_tokens=2),
        Request("fits", 5),
        Request("later", 99, output_tokens=1),
    ]
    result = place(queue, cluster, Rules())
    assert [r.id for r in result.stranded] == ["everywhere", "large"]
    assert [p.request for p in result.placements] == ["fits"]
    assert [r.id for r in result.waiting] == ["later"]


def test_without_engines_all_wait() -> None:
    queue = requests(1, 2)
    for cluster in (Cluster(), Cluster(prefill=pes(0)), Cluster(decode=ONE_DE)):
        for policy in ("dualpath", "round_robin"):
            result = place(queue, cluster, Rules(policy=policy))
            assert (result.waiting, result.placements, result.stranded) == (tuple(queue), (), ())
            assert result.cluster_after == cluster


def test_an_empty_queue_changes_nothing() -> None:
    cluster = Cluster(pes(3), ONE_DE, {"n0": 7}, {"n0": 1.0}, 5, 6, 1)
    assert place([], cluster, Rules()).cluster_after == cluster


# Who reads.


def test_reads_go_to_the_shorter_queue_and_make_it_longer() -> None:
    cluster = Cluster(pes(0), ONE_DE, {"n0": 10})
    queue = [Request(f"r{i}", 30, hit_tokens=20) for i in range(3)]
    result = place(queue, cluster, Rules())
    readers = [placement.shares for placement in result.placements]
    assert readers == [(("node of d0", 1.0),), (("n0", 1.0),), (("node of d0", 1.0),)]
    assert result.cluster_after.read_queues == {"n0": 30, "node of d0": 40}


def test_reads_in_turn() -> None:
    cluster = Cluster(pes(0), ONE_DE, next_side=1)
    result = place(requests(1, 1, 1), cluster, Rules(path="alternate"))
    assert [p.shares[0][0] for p in result.placements] == ["node of d0", "n0", "node of d0"]
    assert result.cluster_after.next_side == 0


def test_what_is_warm_in_the_pe_is_not_read() -> None:
    warm = Request("r0", 100, 80, warm_prefill="p0", warm_tokens=60)
    cluster = Cluster(pes(0), ONE_DE)
    assert place([warm], cluster, Rules()).placements[0].read_tokens == 20
    both = replace(warm, warm_decode="d0")
    restoring = Rules(decode_restores=True)
    assert place([warm], cluster, restoring).placements[0].read_tokens == 80, "the DE needs it"
    assert place([both], cluster, restoring).placements[0].read_tokens == 20


# Round robin.


def test_round_robin_takes_engines_in_turn_whatever_their_load() -> None:
    cluster = Cluster(pes(900, 0, 0), (de("d0", 900), de("d1")))
    rules = Rules(policy="round_robin", beta=1)
    first = place(requests(1, 1), cluster, rules)
    assert placed(first) == [("r0", "p0", "d0"), ("r1", "p1", "d1")]
    second = place(requests(1, 1), first.cluster_after, rules)
    assert placed(second) == [("r0", "p2", "d0"), ("r1", "p0", "d1")]


def test_round_robin_passes_over_a_de_without_memory() -> None:
    engines = (de("d0", free=5), de("d1", free=50), de("d2", free=50))
    result = place(requests(10, 10, 10), Cluster(pes(0), engines), Rules(policy="round_robin"))
    assert [p.decode for p in result.placements] == ["d1", "d2", "d1"]
    full = place(requests(10, 60, 1), Cluster(pes(0), engines), Rules(policy="round_robin"))
    assert [r.id for r in full.waiting] == ["r1", "r2"]
    passing = Rules(policy="round_robin", when_blocked="pass")
    loose = place(requests(10, 60, 1), Cluster(pes(0), engines), passing)
    assert [p.request for p in loose.placements] == ["r0", "r2"]


def test_round_robin_goes_on_after_engines_left() -> None:
    cluster = Cluster(pes(0, 0), (de("d0"),), next_prefill=7, next_decode=5)
    result = place(requests(1), cluster, Rules(policy="round_robin"))
    assert placed(result) == [("r0", "p1", "d0")]


# Nonsense.


def test_engines_of_one_name_are_refused() -> None:
    twice = (PrefillEngine("p", "n"), PrefillEngine("p", "n"))
    with pytest.raises(ValueError, match="two PEs have one name: p"):
        place([], Cluster(twice, ONE_DE), Rules())
    with pytest.raises(ValueError, match="two DEs have one name: d0"):
        place([], Cluster(pes(0), ONE_DE * 2), Rules())


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="request r has a negative number of tokens"):
        Request("r", -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -1),
        ("beta", float("nan")),
        ("z", 0),
        ("over_beta", 0.5),
        ("compute_rate", 0),
        ("read_rate", float("inf")),
        ("decode_rate", -1),
    ],
)
def test_rules_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Rules(**{field: value})
