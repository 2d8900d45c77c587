"""Whether a session returns to where its prefix is warm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.scheduling.affinity import Rates, Visit, pays, rates
from dualpath_sglang.scheduling.engines import Cluster, Request
from dualpath_sglang.scheduling.placement import Placement, Rules, place
from tests.scheduling.clusters import de, pes

# Storage brings 100 tokens/s, a PE works off 1000.
RULES = Rules(read_rate=100.0, compute_rate=1000.0, path="pe")


def one(request: Request, cluster: Cluster, rules: Rules = RULES) -> Placement:
    (placement,) = place([request], cluster, rules).placements
    return placement


def returning(tokens: int = 500, hit: int = 400, warm: int = 300) -> Request:
    return Request("r", tokens, hit, warm_prefill="p0", warm_decode="d0", warm_tokens=warm)


def test_it_returns_as_long_as_the_queue_there_costs_no_more_than_is_saved() -> None:
    # 300 tokens less to read save 3 s, in which a PE works off 3000 tokens.
    des = (de("d0"),)
    assert one(returning(), Cluster(pes(3000, 0), des)).prefill == "p0", "a tie"
    assert one(returning(), Cluster(pes(3001, 0), des)).prefill == "p1"
    assert one(returning(), Cluster(pes(3001, 1), des)).prefill == "p0"


def test_a_read_queue_that_need_not_be_waited_for_is_saved_too() -> None:
    # All 400 are warm: nothing is read, 4 s and the 2 s of p1's read queue are saved.
    cluster = Cluster(pes(6000, 0), (de("d0"),), {"n0": 10**6, "n1": 200})
    assert one(returning(warm=400), cluster).prefill == "p0"
    more = replace(cluster, prefill=pes(6001, 0))
    assert one(returning(warm=400), more).prefill == "p1"
    # One token is left to be read, behind a queue of 10000 s.
    assert one(returning(warm=399), cluster).prefill == "p1"


def test_what_storage_does_not_have_need_not_be_computed_again() -> None:
    # Nothing is stored; 300 tokens are warm, which p1 would compute.
    cluster = Cluster(pes(300, 0), (de("d0"),))
    assert one(returning(hit=0), cluster).prefill == "p0"
    assert one(returning(hit=0), replace(cluster, prefill=pes(301, 0))).prefill == "p1"


def test_the_nodes_own_rates_count() -> None:
    cluster = Cluster(pes(3000, 0), (de("d0"),), read_rates={"n0": 100.0, "n1": 200.0})
    assert one(returning(), cluster).prefill == "p1", "p1's node reads 400 in 2 s, p0's 100 in 1 s"
    assert one(returning(), replace(cluster, prefill=pes(1000, 0))).prefill == "p0"


def test_a_des_prefix_counts_likewise() -> None:
    cluster = Cluster(pes(0), (de("d0", 3000), de("d1", 0)))
    assert one(returning(), cluster).decode == "d0"
    heavier = replace(cluster, decode=(de("d0", 3001), de("d1", 0)))
    assert one(returning(), heavier).decode == "d1"
    assert one(returning(), heavier, replace(RULES, decode_rate=2000.0)).decode == "d0"


def test_a_des_read_queue_counts_where_des_read() -> None:
    cluster = Cluster(pes(0), (de("d0", 1), de("d1", 0)), {"node of d0": 10**6})
    assert one(returning(), cluster).decode == "d0"
    assert one(returning(), cluster, replace(RULES, decode_restores=True)).decode == "d1"


def test_it_may_return_to_another_group_but_not_without_memory() -> None:
    groups = Cluster(pes(0), (de("d0", 100, group="a"), de("d1", 0, group="b")))
    assert one(returning(), groups).decode == "d0"
    full = Cluster(pes(0), (de("d0", free=499, group="a"), de("d1", 0, group="b")))
    assert one(returning(), full).decode == "d1"


def test_it_does_not_pass_those_that_wait_in_the_group() -> None:
    engines = (de("d0", 0, free=600, group="a"), de("d1", 1000, group="b"))
    queue = [Request("large", 700), Request("fill", 400), returning()]
    rules = replace(RULES, when_blocked="group")
    result = place(queue, Cluster(pes(0), engines), rules)
    assert [(p.request, p.decode) for p in result.placements] == [("r", "d1")]


def test_beta_holds_unless_more_is_allowed_and_pays() -> None:
    cluster = Cluster(pes(101, 100), (de("d0"),))
    strict = replace(RULES, beta=100)
    assert one(returning(), cluster, strict).prefill == "p1", "though it would save 3 s"
    assert one(returning(), cluster, replace(strict, over_beta=1.01)).prefill == "p0"
    assert one(returning(warm=0), cluster, replace(strict, over_beta=1.01)).prefill == "p1"
    nobody = Cluster(pes(101, 101), (de("d0"),))
    assert not place([returning()], nobody, replace(strict, over_beta=2.0)).placements


def test_it_does_not_return_where_it_failed_or_where_nobody_is() -> None:
    cluster = Cluster(pes(0, 0), (de("d0"), de("d1")))
    failed = replace(returning(), excluded=frozenset({"p0", "d0"}))
    placement = one(failed, cluster)
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    assert not (placement.warm_prefill or placement.warm_decode)
    gone = replace(returning(), warm_prefill="px", warm_decode="dx")
    assert one(gone, cluster).prefill == "p0"


def test_it_can_be_switched_off_and_round_robin_has_none() -> None:
    cluster = Cluster(pes(1, 0), (de("d0", 1), de("d1")))
    assert one(returning(), cluster).warm_prefill
    assert one(returning(), cluster).warm_decode
    for rules in (
        replace(RULES, affinity=False),
        replace(RULES, policy="round_robin"),
    ):
        placement = one(returning(), replace(cluster, next_prefill=1, next_decode=1), rules)
        assert (placement.prefill, placement.decode) == ("p1", "d1")


def test_rates_that_are_not_known() -> None:
    nothing = Rules()
    assert rates(nothing, {}) == Rates(1.0, 1.0, 1.0), "one warm token for one token of queue"
    assert rates(Rules(alpha=300, beta=5000), {}) == Rates(100.0, 1000.0, 1000.0)
    assert rates(Rules(beta=5000), {}) == Rates(1000.0, 1000.0, 1000.0)
    assert rates(nothing, {"a": 10.0, "b": 30.0, "dead": 0.0}) == Rates(20.0, 20.0, 20.0)
    given_ = Rules(alpha=300, beta=5000, read_rate=1.0, compute_rate=2.0, decode_rate=3.0)
    assert rates(given_, {"a": 10.0}) == Rates(1.0, 2.0, 3.0)


# Whatever the figures.

amounts = st.integers(0, 5000)


@given(
    st.tuples(amounts, amounts),
    st.tuples(amounts, amounts),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.sampled_from(["pe", "de", "shorter_queue", "split"]),
    st.booleans(),
)
def test_what_speaks_for_returning_never_ends_it(
    loads: tuple[int, int],
    queues: tuple[int, int],
    hit: int,
    warm: int,
    more: int,
    less: int,
    path: str,
    restores: bool,
) -> None:
    rules = replace(RULES, path=path, decode_restores=restores)
    request = returning(2000, hit, warm)
    cluster = Cluster(
        pes(*loads),
        (de("d0", loads[0]), de("d1", loads[1])),
        {"n0": queues[0], "n1": queues[1]},
    )
    before = one(request, cluster, rules)
    warmer = one(replace(request, warm_tokens=warm + more), cluster, rules)
    # With PE and DE as they were the choice of the PE is comparable.
    if before.decode == warmer.decode:
        assert warmer.warm_prefill >= before.warm_prefill
    assert warmer.warm_decode >= before.warm_decode
    lighter_loads = (max(0, loads[0] - less), loads[1])
    lighter = one(request, replace(cluster, prefill=pes(*lighter_loads)), rules)
    assert lighter.warm_prefill >= before.warm_prefill
    worse = one(request, replace(cluster, prefill=pes(loads[0], loads[1] + more)), rules)
    assert worse.warm_prefill >= before.warm_prefill


@given(st.tuples(amounts, amounts), st.tuples(amounts, amounts), st.integers(0, 500))
def test_the_load_put_up_with_is_bounded_by_what_is_saved(
    pe_loads: tuple[int, int], de_loads: tuple[int, int], warm: int
) -> None:
    cluster = Cluster(pes(*pe_loads), (de("d0", de_loads[0]), de("d1", de_loads[1])))
    placement = one(returning(500, 500, warm), cluster)
    if placement.prefill == "p0":
        assert pe_loads[0] - pe_loads[1] <= warm / 100 * 1000
    if placement.decode == "d0" and de_loads[0] > de_loads[1] and warm:
        z = 1.05 * (500 + sum(de_loads)) / 2
        fewest_requests = de_loads[0] + 500 <= z
        assert fewest_requests or de_loads[0] - de_loads[1] <= warm / 100 * 1000


@given(st.integers(0, 1000), st.floats(0, 100), st.integers(0, 1000), st.floats(0.1, 1e6))
def test_paying_is_a_matter_of_seconds(
    queue: int, seconds: float, computed: int, rate: float
) -> None:
    warm = Visit(queue, seconds, computed)
    assert pays(warm, warm, rate)
    assert pays(warm, Visit(queue + 1, seconds, computed), rate)
    assert pays(warm, Visit(queue, seconds, computed + 1), rate)
    assert pays(warm, Visit(queue, seconds + 1, computed), rate)
    assert not pays(Visit(queue, seconds + 1, computed), warm, rate)
    assert warm.seconds(rate) == pytest.approx(seconds + (queue + computed) / rate)
