"""What the router tells servers about a read, and how it travels."""

from __future__ import annotations

import string

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from dualpath_sglang.read_hint import (
    MAX_NAME,
    MAX_SHARES,
    ReadHint,
    from_kv_hints,
    from_rid,
    into_rid,
    kv_hints,
    without_hint,
)

NAMES = st.text(min_size=1, max_size=60).filter(str.isprintable)
PRINTABLE = st.text(string.printable[:94], max_size=80)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@st.composite
def hints(draw: st.DrawFn) -> ReadHint:
    names = draw(st.lists(NAMES, min_size=1, max_size=MAX_SHARES, unique=True))
    parts = [draw(st.floats(1e-9, 1)) for _ in names]
    shares = tuple((n, p / sum(parts)) for n, p in zip(names, parts, strict=True))
    return ReadHint(shares, draw(st.booleans()))


@settings(deadline=None, max_examples=50)
@given(PRINTABLE, hints())
def test_a_request_id_brings_the_hint_and_stays_a_legal_one(rid: str, hint: ReadHint) -> None:
    hinted = into_rid(rid, hint)
    assert from_rid(hinted) == hint
    assert hinted.startswith(without_hint(rid)) and hinted.isascii() and hinted.isprintable()
    assert " " not in hinted


@settings(deadline=None, max_examples=50)
@given(PRINTABLE, hints(), hints())
def test_a_second_hint_takes_the_place_of_the_first(
    rid: str, first: ReadHint, second: ReadHint
) -> None:
    assert into_rid(into_rid(rid, first), second) == into_rid(rid, second)
    assert without_hint(into_rid(rid, first)) == without_hint(rid)


@settings(deadline=None, max_examples=50)
@given(PRINTABLE, hints(), hints())
def test_no_hint_is_left_under_the_one_that_is_taken_off(
    rid: str, first: ReadHint, second: ReadHint
) -> None:
    nested = into_rid(rid, first) + into_rid("", second)
    assert from_rid(nested) == second
    assert from_rid(without_hint(nested)) is None


@settings(deadline=None, max_examples=50)
@given(hints(), st.integers(0, 999))
def test_the_number_that_sglang_adds_does_not_hide_the_hint(hint: ReadHint, number: int) -> None:
    assert from_rid(f"{into_rid('a', hint)}_{number}") == hint
    assert from_rid(f"{into_rid('a', hint)}_{number}_0") == hint


@settings(deadline=None, max_examples=50)
@given(hints(), st.text(max_size=20))
def test_an_envelope_brings_the_hint_through_sglang(hint: ReadHint, message_id: str) -> None:
    envelope = kv_hints(hint, message_id)
    assert from_kv_hints(envelope) == hint
    sent = msgspec.json.decode(msgspec.json.encode(envelope))
    assert from_kv_hints(decode_kv_hints_envelope(sent)) == hint


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200))
def test_no_request_id_fails(rid: str) -> None:
    assert from_rid(rid) is None or without_hint(rid) != rid


@settings(deadline=None, max_examples=50)
@given(PRINTABLE, st.text("abz=,.%01e-+ _|\x00é", max_size=40))
def test_nothing_at_the_end_of_a_request_id_fails(rid: str, inside: str) -> None:
    hint = from_rid(f"{rid}|dp1|{inside}|")
    assert hint is None or sum(weight for _, weight in hint.shares) == pytest.approx(1)


@settings(deadline=None, max_examples=50)
@given(JSON | st.binary() | st.builds(object))
def test_no_envelope_fails(thing: object) -> None:
    action = {"action_type": "dualpath.read", "action_version": "1"}
    for envelope in (
        thing,
        {"actions": thing},
        {"actions": [thing]},
        {"actions": [{**action, "payload": thing}]},
        {"actions": [{**action, "payload": {"shares": thing}}]},
        {"actions": [{**action, "payload": {"shares": [thing]}}]},
        {"actions": [{**action, "payload": {"shares": [["a", thing]]}}]},
    ):
        found = from_kv_hints(envelope)
        assert found is None or found.shares == (("a", 1.0),)


def test_an_envelope_that_cannot_even_be_looked_at_is_no_hint() -> None:
    class Bad:
        @property
        def actions(self) -> object:
            raise RuntimeError

    assert from_kv_hints(Bad()) is None


def test_hints_of_others_are_passed_over() -> None:
    hint = ReadHint((("a", 1.0),))
    mine = kv_hints(hint, "m")
    other = {**kv_hints(ReadHint((("b", 1.0),)), "m")["actions"][0], "action_type": "pin"}
    later = {**mine["actions"][0], "action_version": "2"}
    assert from_kv_hints({"actions": [other, later, *mine["actions"]]}) == hint
    assert from_kv_hints({"actions": [other, later]}) is None


@pytest.mark.parametrize(
    "shares",
    [
        (),
        (("a", 0.5),),
        (("a", 0.5), ("a", 0.5)),
        (("a", 1.5), ("b", -0.5)),
        (("a", 1.0), ("b", 0.0)),
        (("a", float("nan")),),
        (("a", float("inf")),),
        (("", 1.0),),
        (("a\n", 1.0),),
        (("\ud800", 1.0),),
        (("a" * (MAX_NAME + 1), 1.0),),
        (("ß" * (MAX_NAME // 2 + 1), 1.0),),
        tuple((f"n{i}", 1 / (MAX_SHARES + 1)) for i in range(MAX_SHARES + 1)),
    ],
)
def test_what_cannot_be_is_no_hint(shares: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"hint|name|part"):
        ReadHint(shares)
    listed = ",".join(f"{name}={weight!r}" for name, weight in shares)
    assert from_rid(f"r|dp1|{listed}|") is None
    action = {"action_type": "dualpath.read", "action_version": "1", "payload": {"shares": shares}}
    assert from_kv_hints({"actions": [action]}) is None


def test_the_longest_hint_is_carried() -> None:
    names = [chr(0x10330 + i) * (MAX_NAME // 4) for i in range(MAX_SHARES)]
    hint = ReadHint(tuple((name, 1 / MAX_SHARES) for name in names))
    assert from_rid(into_rid("r" * 100_000, hint)) == hint
    assert len(into_rid("", hint)) < 7000
