"""Layers that are read and sent together: all, once, small ones first."""

from __future__ import annotations

import pytest

from dualpath_sglang.node.layer_ranges import read_ranges, send_ranges


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 16, 32, 61, 80, 495])
@pytest.mark.parametrize("size", [1, 4096, 16 << 10, 64 << 10, 1 << 20])
def test_they_cover_every_layer_once(layers: int, size: int) -> None:
    ranges = read_ranges(layers, size, 64 << 10)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layers
    assert all(a < b for a, b in ranges)
    assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
    for first in range(0, layers, max(1, layers // 3)):
        for end in range(first + 1, layers + 1, max(1, layers // 3)):
            sent = send_ranges(ranges, first, end)
            assert sent[0] == (first, first + 1)
            assert sent[-1][1] == end
            assert [a for a, _ in sent[1:]] == [b for _, b in sent[:-1]]


def test_small_layers_are_read_several_at_once_and_large_ones_one_by_one_first() -> None:
    assert read_ranges(32, 16 << 10, 64 << 10) == [(0, 4), (4, 12), (12, 32)]
    large = [(0, 1), (1, 3), (3, 7), (7, 15), (15, 23), (23, 32)]
    assert read_ranges(32, 64 << 10, 64 << 10) == large
    assert len(read_ranges(32, 1 << 10, 64 << 10)) == 1
