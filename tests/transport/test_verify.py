"""Which Layer Blocks do not match, however their bytes lie."""

from __future__ import annotations

import itertools
import os

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath_sglang.transport.verify import bad_layer_blocks


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([1, 7, 512, 4096, (64 << 10) + 8, 200 << 10]),
    st.integers(1, 6),
    st.sets(st.integers(0, 5)),
    st.data(),
)
def test_exactly_the_bad_ones_are_found(
    size: int, count: int, bad: set[int], data: st.DataObject
) -> None:
    memory = memoryview(bytearray(os.urandom(size * count)))
    sums = [xxhash.xxh3_64_intdigest(memory[i * size :][:size]) for i in range(count)]
    bad = {i for i in bad if i < count}
    for i in bad:
        at = data.draw(st.integers(0, size - 1))
        memory[i * size + at] ^= 1 << data.draw(st.integers(0, 7))
    cuts = data.draw(
        st.one_of(
            st.just(set(range(0, size * count, size))),
            st.sets(st.integers(1, size * count), max_size=8),
        )
    )
    ends = sorted(cuts | {0, size * count})
    views = [memory[a:b] for a, b in itertools.pairwise(ends)]
    assert bad_layer_blocks(views, size, sums) == sorted(bad)


@pytest.mark.parametrize("size", [15, 17, 0])
def test_what_was_not_all_looked_at_is_not_called_good(size: int) -> None:
    with pytest.raises(ValueError, match="not the bytes of 4"):
        bad_layer_blocks([memoryview(bytes(size))], 4, [0] * 4)


def test_nothing_is_good() -> None:
    assert bad_layer_blocks([], 16, []) == []
