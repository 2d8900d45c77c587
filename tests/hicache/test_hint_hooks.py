"""What SGLang's threads see of the hooks that pass hints on: nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dualpath_sglang import hint_hooks
from dualpath_sglang.read_hint import ReadHint, kv_hints
from dualpath_sglang.request_hints import RequestHints

HINT = ReadHint((("a", 1.0),))


class Backend:
    """Of the calls that the hooks make, those of the real one."""

    def __init__(self) -> None:
        self.hints = RequestHints()
        self.reading: list[str] = []
        self.failures: list[str] = []

    @contextlib.contextmanager
    def reading_for(self, rid: str) -> Iterator[None]:
        self.reading.append(rid)
        yield
        self.reading.append("over")

    def note_failure(self, call: str, error: Exception) -> None:
        self.failures.append(f"{call}: {error}")


def controller(backend: Any, name: str = "dualpath") -> Any:
    return SimpleNamespace(storage_backend=backend, storage_backend_type=name)


def owner(backend: Any, name: str = "dualpath") -> Any:
    return SimpleNamespace(tree_cache=SimpleNamespace(cache_controller=controller(backend, name)))


def test_what_a_router_said_is_noted_before_a_request_is_read() -> None:
    backend = Backend()
    req = SimpleNamespace(rid="r", kv_hints=kv_hints(HINT, "m"))
    assert hint_hooks.before_prefetch(owner(backend), req, 5, storage_hit_end=6) is None
    assert backend.hints.of("r") == HINT
    hint_hooks.before_prefetch(owner(backend), SimpleNamespace(rid="r"))
    assert backend.hints.of("r") is None


def test_a_request_that_is_not_as_it_must_be_fails_nothing() -> None:
    backend = Backend()
    hint_hooks.before_prefetch(owner(backend), SimpleNamespace())
    assert len(backend.failures) == 1
    for nobody in (SimpleNamespace(), SimpleNamespace(tree_cache=None), owner(object())):
        hint_hooks.before_prefetch(nobody, SimpleNamespace(rid="r"))


@pytest.mark.parametrize("raises", [False, True])
def test_a_transfer_says_whose_it_is_and_passes_everything_through(raises: bool) -> None:
    backend = Backend()

    def original(of: Any, operation: Any, *args: Any) -> Any:
        assert backend.reading == [operation.request_id]
        if raises:
            raise RuntimeError("SGLang's own")
        return args

    operation = SimpleNamespace(request_id="r")
    expected: Any = pytest.raises(RuntimeError) if raises else contextlib.nullcontext()
    with expected:
        assert hint_hooks.transfer(original, controller(backend), operation, 1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("backend", "name", "operation"),
    [
        (Backend(), "file", SimpleNamespace(request_id="r")),
        (object(), "dualpath", SimpleNamespace(request_id="r")),
        (Backend(), "dualpath", SimpleNamespace()),
    ],
)
def test_what_is_not_ours_is_left_alone(backend: Any, name: str, operation: Any) -> None:
    done = hint_hooks.transfer(lambda *_: "done", controller(backend, name), operation)
    assert done == "done"
    assert not getattr(backend, "reading", [])
