"""Who was asked for which block, and who is asked next: against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.streaming.hedging import Asked, By, Progress

BLOCKS, LAYERS = 5, 4


def test_a_block_goes_from_one_side_to_the_other_and_then_it_is_lost() -> None:
    progress = Progress(BLOCKS, LAYERS)
    progress.ask(By.LOCAL, range(3))
    progress.ask(By.REMOTE, [3, 4])
    assert progress.failed(By.LOCAL, [1]) == ([1], [])
    progress.ask(By.REMOTE, [1])
    assert progress.failed(By.LOCAL, [1]) == ([], [])  # the other one is at it
    assert progress.failed(By.REMOTE, [1]) == ([], [1])
    assert progress.asked(By.REMOTE, 1) is Asked.FAILED


def test_what_is_whole_cannot_fail() -> None:
    progress = Progress(BLOCKS, LAYERS)
    progress.ask(By.LOCAL, range(BLOCKS))
    assert progress.landed(0, 2, 0, LAYERS) == [2] * LAYERS
    assert progress.failed(By.LOCAL, range(BLOCKS)) == ([2, 3, 4], [])
    assert progress.waiting(By.LOCAL) == []


def test_what_lands_twice_counts_once() -> None:
    progress = Progress(BLOCKS, LAYERS)
    assert progress.landed(1, 4, 0, 2) == [3, 3]
    assert progress.landed(0, 3, 1, 3) == [1, 3]


def test_runs_are_neighbours_that_need_the_same() -> None:
    progress = Progress(BLOCKS, LAYERS)
    progress.landed(0, 2, 0, 1)
    progress.landed(2, 3, 0, 3)
    assert list(progress.runs([0, 1, 2, 4])) == [(0, 2, 1), (2, 3, 3), (4, 5, 0)]
    assert progress.first_layer([0, 2]) == 1


@pytest.mark.parametrize("by", By)
def test_only_what_the_other_side_is_not_at_is_waited_for(by: By) -> None:
    progress = Progress(BLOCKS, LAYERS)
    progress.ask(by, range(4))
    progress.ask(by.other, [0])
    progress.landed(1, 2, 0, LAYERS)
    progress.landed(2, 3, 0, 1)
    assert progress.waiting(by) == [2, 3]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "fail", "land"]),
            st.sampled_from(list(By)),
            st.integers(0, BLOCKS - 1),
            st.integers(0, LAYERS - 1),
        ),
        max_size=60,
    )
)
def test_a_block_is_lost_only_when_both_have_failed(
    steps: list[tuple[str, By, int, int]],
) -> None:
    progress = Progress(BLOCKS, LAYERS)
    left = {(block, layer) for block in range(BLOCKS) for layer in range(LAYERS)}
    state = {(by, block): Asked.NOT for by in By for block in range(BLOCKS)}
    counted = 0
    for what, by, block, layer in steps:
        whole = not any(b == block for b, _ in left)
        if what == "land":
            counted += sum(progress.landed(block, block + 1, layer, LAYERS))
            left -= {(block, n) for n in range(layer, LAYERS)}
        elif what == "ask":
            progress.ask(by, [block])
            state[by, block] = Asked.ASKED
        elif whole:
            assert progress.failed(by, [block]) == ([], [])
        else:
            state[by, block] = Asked.FAILED
            other = state[by.other, block]
            more, lost = progress.failed(by, [block])
            assert (bool(more), bool(lost)) == (other is Asked.NOT, other is Asked.FAILED)
        assert counted == BLOCKS * LAYERS - len(left)
        unfinished = sorted({b for b, _ in left})
        assert progress.unfinished(range(BLOCKS)) == unfinished
        for each in By:
            mine = [b for b in unfinished if state[each, b] is Asked.ASKED]
            assert progress.waiting(each) == [
                b for b in mine if state[each.other, b] is not Asked.ASKED
            ]
