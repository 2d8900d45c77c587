"""The placement bench runs both policies on the same sessions; its figures are not judged here."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from bench import pd_placement


@pytest.mark.slow
def test_both_policies_get_the_same_sessions() -> None:
    arguments = argparse.Namespace(prefills=2, decodes=2, seconds=1.0, rounds=1, seed=3)
    rows = asyncio.run(pd_placement.measure(arguments))
    assert [row.policy for row in rows] == list(pd_placement.POLICIES)
    expected = sum(len(sizes) for _, sizes, _ in pd_placement.Workload(1.0).sessions(3))
    assert expected > 0
    assert [row.requests for row in rows] == [expected, expected]
    assert all(ratio > 0 for ratio in pd_placement.compare(rows).values())
