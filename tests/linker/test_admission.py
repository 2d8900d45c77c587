"""Which hits are worth their time."""

from __future__ import annotations

import pytest

from dualpath_sglang.admission import Decision, PageCost, admit

TEN = range(1, 11)


@pytest.mark.parametrize(
    ("affordable", "kept", "decision"),
    [
        (None, list(TEN), Decision.FULL),
        (1000, list(TEN), Decision.FULL),
        (999, list(range(1, 10)), Decision.SHORTENED),
        (100, [1], Decision.SHORTENED),
        (99, [], Decision.RECOMPUTE),
        (0, [], Decision.RECOMPUTE),
        (-5, [], Decision.RECOMPUTE),
    ],
)
def test_a_hit_is_cut_to_what_can_be_read_in_time(
    affordable: int | None, kept: list[int], decision: Decision
) -> None:
    lengths, decided = admit(TEN, PageCost(100), affordable)
    assert (list(lengths), decided) == (kept, decision)


def test_only_restorable_lengths_are_kept() -> None:
    assert admit([3, 6, 9], PageCost(100), 700) == ([3, 6], Decision.SHORTENED)


def test_what_is_needed_once_is_paid_for_once() -> None:
    cost = PageCost(100, end_bytes=250)
    assert cost.of(3) == 550
    assert list(admit(TEN, cost, 600)[0]) == [1, 2, 3]


def test_nothing_to_load_is_no_decision() -> None:
    assert admit([], PageCost(100), None) == ([], Decision.RECOMPUTE)
