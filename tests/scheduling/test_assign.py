"""Who reads a block, by its key alone."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_sglang.scheduling.assign import assign

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(4000)]
PARTS = st.just(0.0) | st.floats(1e-6, 1)
WEIGHTS = st.lists(PARTS, min_size=1, max_size=8).filter(lambda parts: sum(parts) > 0)


@settings(deadline=None, max_examples=50)
@given(WEIGHTS)
def test_every_node_gets_its_part(weights: list[float]) -> None:
    got = assign(KEYS, weights)
    for i, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert got.count(i) / len(KEYS) == pytest.approx(expected, abs=0.04)
        assert weight or i not in got


@settings(deadline=None, max_examples=50)
@given(WEIGHTS, st.permutations(range(50)))
def test_the_key_alone_decides(weights: list[float], order: list[int]) -> None:
    whole = assign(KEYS, weights)
    assert assign([KEYS[i] for i in order], weights) == [whole[i] for i in order]


@settings(deadline=None, max_examples=50)
@given(WEIGHTS, st.floats(1e-3, 1e3))
def test_only_the_relation_of_weights_matters(weights: list[float], times: float) -> None:
    scaled = assign(KEYS, [weight * times for weight in weights])
    assert sum(a != b for a, b in zip(assign(KEYS, weights), scaled, strict=True)) <= 2


def test_a_small_change_moves_few_blocks() -> None:
    before, after = assign(KEYS, [0.5, 0.5]), assign(KEYS, [0.52, 0.48])
    assert 0 < sum(a != b for a, b in zip(before, after, strict=True)) < 0.04 * len(KEYS)


def test_the_answer_is_fixed_for_ever() -> None:
    """Servers of two versions must agree."""
    assert assign(KEYS[:12], [0.25, 0.5, 0.25]) == [2, 1, 0, 2, 1, 1, 1, 1, 1, 1, 2, 1]
    assert assign([b"\xff" * 32, b"\0" * 32], [0.1] * 8) == [7, 0]


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -0.1], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_cannot_be(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="parts"):
        assign(KEYS, weights)
