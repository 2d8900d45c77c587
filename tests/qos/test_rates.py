"""Rates, shares and code points: what is read, and what is refused with a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.qos.rates import Share, check_dscp, parse_rate, parse_share, rate_text


@pytest.mark.parametrize(
    ("text", "bit_s"),
    [
        ("400gbit", 400 * 10**9),
        (" 200Mbit ", 200 * 10**6),
        ("2.5gbit", 25 * 10**8),
        ("1000kbit", 10**6),
        ("1.000001mbit", 1_000_001),
        ("10tbit", 10**13),
        ("1000000bit", 10**6),
    ],
)
def test_a_rate_is_read(text: str, bit_s: int) -> None:
    assert parse_rate(text) == bit_s


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "A rate is a number and a unit"),
        ("400", "A rate is a number and a unit"),
        ("gbit", "A rate is a number and a unit"),
        ("-1gbit", "A rate is a number and a unit"),
        ("1e3gbit", "A rate is a number and a unit"),
        ("400 gbit", "A rate is a number and a unit"),
        ("400gb", "A rate is a number and a unit"),
        ("400gbit; reboot", "A rate is a number and a unit"),
        ("٤gbit", "A rate is a number and a unit"),
        ("0gbit", "A link has 1mbit to 10tbit"),
        ("999kbit", "A link has 1mbit to 10tbit"),
        ("11tbit", "A link has 1mbit to 10tbit"),
        ("1.0000001mbit", "in whole bits"),
    ],
)
def test_what_is_no_rate_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_rate(text)


@given(st.integers(10**6, 10**13))
def test_a_rate_that_is_written_is_read_as_the_same(bit_s: int) -> None:
    assert parse_rate(rate_text(bit_s)) == bit_s


def test_a_rate_is_written_in_its_largest_unit() -> None:
    assert rate_text(400 * 10**9) == "400gbit"
    assert rate_text(1_500_000) == "1500kbit"


def test_shares() -> None:
    assert parse_share("99:1") == Share() == Share(99, 1)
    assert str(parse_share(" 3:1 ")) == "3:1"
    assert Share(99, 1).kv_bit_s(200 * 10**6) == 2 * 10**6
    assert Share(255, 1).kv_bit_s(10**6) == 3906
    for text, sentence in (
        ("99", "A share is MODEL:KV"),
        ("99:1:1", "A share is MODEL:KV"),
        ("0.5:0.5", "A share is MODEL:KV"),
        ("0:1", r"Weights lie in 1\.\.255"),
        ("256:1", r"Weights lie in 1\.\.255"),
        ("1:99", "behind KV"),
    ):
        with pytest.raises(ValueError, match=sentence):
            parse_share(text)


def test_code_points() -> None:
    assert check_dscp(8) == 8
    for dscp, sentence in ((0, "nobody marks"), (64, r"1\.\.63"), (-1, r"1\.\.63")):
        with pytest.raises(ValueError, match=sentence):
            check_dscp(dscp)
