"""What a server remembers of its requests' hints."""

from __future__ import annotations

from dualpath_sglang.read_hint import ReadHint, into_rid, kv_hints
from dualpath_sglang.request_hints import RequestHints

A, B = ReadHint((("a", 1.0),)), ReadHint((("b", 0.5), ("c", 0.5)))


def test_a_request_has_the_hint_of_its_envelope_or_else_of_its_id() -> None:
    hints = RequestHints()
    assert hints.of("r") is None
    assert hints.of(into_rid("r", A)) == A
    hints.note(into_rid("r", A), kv_hints(B, "m"))
    assert hints.of(into_rid("r", A)) == B
    hints.forget(into_rid("r", A))
    assert hints.of(into_rid("r", A)) == A


def test_a_request_without_a_hint_has_none_of_one_that_had_its_id() -> None:
    hints = RequestHints()
    for later in (None, {"actions": 5}, "nonsense"):
        hints.note("r", kv_hints(A, "m"))
        assert hints.of("r") == A
        hints.note("r", later)
        assert hints.of("r") is None


def test_no_more_than_so_many_are_remembered() -> None:
    hints = RequestHints(most=10)
    for i in range(1000):
        hints.note(f"r{i}", kv_hints(A, "m"))
        hints.note("again", kv_hints(B, "m"))
    assert len(hints) == 10
    assert (hints.of("r0"), hints.of("r999"), hints.of("again")) == (None, A, B)
    hints.clear()
    assert len(hints) == 0
