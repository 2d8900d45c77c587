"""The bounded memory that reads go into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.streaming.staging import Piece, Staging
from dualpath_storage.memory import aligned

UNIT = 64 << 10


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * UNIT)), max_size=60))
def test_pieces_never_overlap_and_never_exceed_the_whole(steps: list[tuple[bool, int]]) -> None:
    staging = Staging(aligned(8 * UNIT))
    held: list[Piece] = []
    for give, size in steps:
        if give and held:
            staging.give(held.pop(size % len(held)))
        elif (piece := staging.take(size)) is not None:
            assert len(piece.memory) >= size
            held.append(piece)
        units = [u for p in held for u in range(p.first, p.first + p.units)]
        assert len(units) == len(set(units)) and (not units or max(units) < 8)
        assert staging.used_bytes == len(units) * UNIT <= staging.peak_bytes <= 8 * UNIT


def test_a_full_staging_gives_nothing_until_something_comes_back() -> None:
    staging = Staging(aligned(4 * UNIT))
    first, second = staging.take(3 * UNIT), staging.take(UNIT)
    assert first is not None and second is not None and staging.take(1) is None
    staging.give(first)
    assert staging.take(3 * UNIT) is not None


def test_pieces_are_aligned_for_direct_io() -> None:
    staging = Staging(aligned(4 * UNIT))
    pieces = [staging.take(UNIT + 1), staging.take(UNIT)]
    assert all(piece is not None and len(piece.memory) % 4096 == 0 for piece in pieces)
