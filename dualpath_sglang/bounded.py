"""Memory of the most recent requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

MAX_REQUESTS = 4096

_T = TypeVar("_T")


def remember(memory: OrderedDict[str, _T], rid: str, value: _T) -> None:
    """Keep something for a request, and forget the request that was told the longest ago."""
    memory[rid] = value
    memory.move_to_end(rid)
    if len(memory) > MAX_REQUESTS:
        memory.popitem(last=False)
