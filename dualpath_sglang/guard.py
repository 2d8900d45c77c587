"""Keeps failures of a backend from the engine that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class NotesFailures(Protocol):
    """Who owns guarded methods."""

    def note_failure(self, call: str, error: Exception) -> None:
        """Hear of a call that failed."""


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Owner = TypeVar("_Owner", bound=NotesFailures)
_Method = Callable[Concatenate[_Owner, _P], _T]


def never_raises(
    otherwise: Callable[..., _T],
) -> Callable[[_Method[_Owner, _P, _T]], _Method[_Owner, _P, _T]]:
    """Answer ``otherwise(*args)`` when a method fails, whatever it was called with."""

    def decorate(method: _Method[_Owner, _P, _T]) -> _Method[_Owner, _P, _T]:
        @functools.wraps(method)
        def guarded(self: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- the engine must never see one
                self.note_failure(method.__name__, error)
                return otherwise(*args, **kwargs)

        return guarded

    return decorate


def length(items: Any) -> int:
    """Of a list or tuple; nothing else has one here."""
    return len(items) if isinstance(items, list | tuple) else 0


def all_false(keys: Any = (), *_: Any, **__: Any) -> list[bool]:
    """No key."""
    return [False] * length(keys)


def all_none(keys: Any = (), *_: Any, **__: Any) -> list[Any]:
    """Nothing for each key."""
    return [None] * length(keys)


def all_false_by_pool(transfers: Any = (), *_: Any, **__: Any) -> dict[str, list[bool]]:
    """No key of any pool."""
    named = [t for t in transfers if hasattr(t, "name")] if length(transfers) else []
    return {t.name: all_false(getattr(t, "keys", ())) for t in named}
