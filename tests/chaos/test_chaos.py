"""Hits are loaded without end, over both paths, while something breaks: no wrong byte, no failed
load, none late, and all as it was soon after.
"""

from __future__ import annotations

import time

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.loads import Window, between, under_way
from tests.chaos.spec import Mode, Spec

pytestmark = [pytest.mark.slow, pytest.mark.root]

DEADLINE_S = Spec("streaming", "", {}).deadline_s
LATE_S = 0.5
"""A load ends at its deadline, in a process that a busy machine lets run a little later."""
BEFORE_S = 2.5
SOON_S = 5.0
FACTOR = 2.0
CASES = [(mode, fault) for mode in ("streaming", "host") for fault in FAULTS if mode in fault.modes]


@pytest.mark.parametrize(
    ("mode", "fault"), CASES, ids=[f"{mode}-{fault.do.__name__}" for mode, fault in CASES]
)
def test_a_fault_costs_time_and_nothing_else(
    cluster: Cluster, mode: Mode, fault: Fault, rows: list[list[str]]
) -> None:
    cluster.use(mode)
    cluster.decode[0].use_proxy(fault.proxied)
    before = cluster.normal(BEFORE_S)
    began = time.monotonic()
    fault.do(cluster)
    repaired = time.monotonic()
    found = cluster.recovers(repaired, SOON_S, FACTOR * before.median_s)
    after_s = SOON_S if found is None else found
    during = under_way(cluster.loads, began, repaired + after_s)
    others = sum(during.outcomes.values()) - during.outcomes["ok"]
    rows.append(
        [
            fault.name,
            mode,
            str(len(during.loads)),
            str(others),
            f"{before.median_s:.2f}",
            f"{during.median_s:.2f}",
            f"{during.percentile_s(0.99):.2f}",
            f"{during.longest_s:.2f}",
            f"{before.remote_share:.0%}",
            f"{during.remote_share:.0%}",
            f"{after_s:.1f}" if found is not None else "never",
        ]
    )
    counts = Window([*before.loads, *during.loads]).counts
    assert not fault.shows or any(counts[name] for name in fault.shows), counts
    assert not fault.may or others, "nobody noticed"
    assert during.wrong == 0
    assert not any(load.stray for load in cluster.loads), "something was written after the end"
    assert set(during.outcomes) <= {"ok"} | fault.may, during.outcomes
    assert during.longest_s <= DEADLINE_S + LATE_S
    later = between(cluster.loads, repaired, time.monotonic())
    assert found is not None, (
        f"not normal within {SOON_S} s: median {later.median_s:.2f} s after {before.median_s:.2f} "
        f"s, brought {later.brought} for {before.brought}"
    )
    assert cluster.errors == []


@pytest.mark.parametrize("mode", ["streaming", "host"])
def test_the_check_sees_wrong_bytes(cluster: Cluster, mode: Mode) -> None:
    """Control: without the checks of the product, flipped bits are seen by those of the test."""
    cluster.use(mode, checked=False)
    proxy = cluster.decode[0].use_proxy(True)
    assert proxy is not None
    cluster.normal(BEFORE_S)
    proxy.tell(flip_every=2 << 20)
    end = time.monotonic() + 60.0
    while not any(load.wrong for load in list(cluster.loads)):
        assert time.monotonic() < end, "nothing wrong is seen"
        time.sleep(0.1)
    proxy.tell()
