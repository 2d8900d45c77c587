"""Sizes: what is meant, or nothing."""

from __future__ import annotations

import pytest

from dualpath_sglang.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        (4096.0, 4096),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        (" 64 MiB ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("10GB", 10_000_000_000),
        ("100gib", 100 << 30),
    ],
)
def test_a_size_is_what_it_says(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("50%", "10,000GiB", "1.5.5GiB", "0.5", "100GiB/2", "100 GiB extra", "-5", "- 5GiB", ""),
        *("GiB", "1e3", "inf", "nan", "5 parsecs", "\uff11\uff10", "0x10"),
        *(True, None, 0.5, float("inf"), float("nan"), [1]),
    ],
)
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_size(text)
