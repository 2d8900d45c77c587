"""The range of P/D."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.scheduling.bounds import Machine, bounds, failing, loads

GB = 10**9
# The paper's: 8 GPUs with 400 Gbit/s each, one 400 Gbit/s storage NIC, 500 GB/s of DRAM.
PAPER = Machine(8, 50 * GB, 50 * GB, 500 * GB)
RESOURCES = [
    "PE CNIC read",
    "PE CNIC write",
    "DE CNIC read",
    "DE CNIC write",
    "PE DRAM",
    "DE DRAM",
]

machines = st.builds(
    Machine,
    st.integers(1, 16),
    st.floats(1 * GB, 400 * GB),
    st.floats(1 * GB, 100 * GB),
    st.floats(10 * GB, 1000 * GB),
)


def test_the_papers_example() -> None:
    found = bounds(PAPER)
    assert found.least == pytest.approx(1 / 7)
    assert found.most == pytest.approx(7 / 2)
    assert found.binds_below == ("PE CNIC write",)
    assert found.binds_above == ("DE CNIC write", "DE DRAM"), "(8 - 1) / 2 and (10 - 3) / 2"
    assert found.possible


def test_all_six_constraints_of_the_papers_example() -> None:
    found = {c.resource: (c.least, c.most) for c in bounds(PAPER).constraints}
    assert list(found) == RESOURCES
    assert found == {
        "PE CNIC read": (0, math.inf),
        "PE CNIC write": (pytest.approx(1 / 7), math.inf),
        "DE CNIC read": (0, 6),
        "DE CNIC write": (0, 3.5),
        "PE DRAM": (0, math.inf),
        "DE DRAM": (0, 3.5),
    }


def test_loads_by_hand() -> None:
    # 2P4D: a PE's CNICs write (Tp + Tc) D g = 50 / 8 x (1 + 4/2) = 18.75 of 50 GB/s.
    used = {load.resource: load.used for load in loads(PAPER, 2, 4)}
    assert used == pytest.approx(
        {
            "PE CNIC read": 2 / 8,
            "PE CNIC write": 3 / 8,
            "DE CNIC read": 2.5 / 8,
            "DE CNIC write": 2 / 8,
            "PE DRAM": 100 / 500,
            "DE DRAM": 200 / 500,
        }
    )
    assert [load.slack for load in loads(PAPER, 2, 4)] == pytest.approx(
        [1 - value for value in used.values()]
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "broken"),
    [
        (1, 1, []),
        (1, 7, []),
        (7, 2, []),
        (1, 8, ["PE CNIC write"]),
        (4, 1, ["DE CNIC write", "DE DRAM"]),
        (7, 1, ["DE CNIC read", "DE CNIC write", "DE DRAM"]),
    ],
)
def test_which_constraints_fail(prefill: int, decode: int, broken: list[str]) -> None:
    assert failing(PAPER, prefill, decode) == broken


def test_slow_dram_binds_first() -> None:
    found = bounds(replace(PAPER, dram_bandwidth=250 * GB))
    assert (found.most, found.binds_above) == (1.0, ("DE DRAM",))
    assert not bounds(replace(PAPER, dram_bandwidth=90 * GB)).possible, "2 x 50 GB/s at the PE"
    assert bounds(replace(PAPER, dram_bandwidth=90 * GB)).binds_below == ("PE DRAM",)


def test_more_storage_than_the_compute_nics_carry() -> None:
    found = bounds(replace(PAPER, storage_bandwidth=400 * GB, dram_bandwidth=9000 * GB))
    assert not found.possible
    assert found.binds_below == ("PE CNIC read", "PE CNIC write")
    assert set(failing(replace(PAPER, storage_bandwidth=400 * GB), 1, 1)) == set(RESOURCES)


@given(machines, st.integers(1, 64), st.integers(1, 64))
def test_the_range_is_where_nothing_fails(machine: Machine, prefill: int, decode: int) -> None:
    found, ratio = bounds(machine), prefill / decode
    broken = failing(machine, prefill, decode)
    if found.least * (1 + 1e-6) < ratio < found.most * (1 - 1e-6):
        assert not broken
    if ratio < found.least * (1 - 1e-6) or ratio > found.most * (1 + 1e-6):
        assert broken
    for constraint in found.constraints:
        inside = constraint.least * (1 + 1e-6) < ratio < constraint.most * (1 - 1e-6)
        outside = ratio < constraint.least * (1 - 1e-6) or ratio > constraint.most * (1 + 1e-6)
        if inside or outside:
            assert (constraint.resource in broken) == outside


@given(machines)
def test_what_binds_is_what_a_little_more_breaks(machine: Machine) -> None:
    found = bounds(machine)
    ends = {c.resource: (c.least, c.most) for c in found.constraints}
    for name in found.binds_below:
        assert ends[name][0] == pytest.approx(found.least)
    for name in found.binds_above:
        assert ends[name][1] == pytest.approx(found.most)
    assert found.binds_above, "decode nodes always bound it"


@pytest.mark.parametrize("name", ["storage_bandwidth", "cnic_bandwidth", "dram_bandwidth", "gpus"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_nonsense_is_refused_with_a_sentence(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} of a node must be positive and finite"):
        replace(PAPER, **{name: value})


def test_half_a_gpu_and_no_nodes() -> None:
    with pytest.raises(ValueError, match=re.escape("a whole number of GPUs, not 1.5")):
        replace(PAPER, gpus=1.5)
    for prefill, decode in [(0, 1), (1, 0), (-1, 1)]:
        with pytest.raises(ValueError, match="at least one prefill and one decode node"):
            loads(PAPER, prefill, decode)
        with pytest.raises(ValueError, match="at least one prefill and one decode node"):
            failing(PAPER, prefill, decode)
