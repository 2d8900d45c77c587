"""Loads while they change within a round; only the rounds of placement see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualpath_sglang.scheduling.engines import DecodeEngine, PrefillEngine, Request


class PrefillLoads:
    """What each PE has been given, by its index.

    Raises:
        ValueError: two have one name.
    """

    def __init__(self, engines: Sequence[PrefillEngine]) -> None:
        self.engines = engines
        self.names = [engine.name for engine in engines]
        self.index = _index("PEs", self.names)
        self.tokens = [engine.tokens for engine in engines]
        self.requests = [engine.requests for engine in engines]
        self._given: set[int] = set()

    def assign(self, i: int, request: Request) -> None:
        """Give it the request."""
        self.tokens[i] += request.tokens
        self.requests[i] += 1
        self._given.add(i)

    def engines_after(self) -> tuple[PrefillEngine, ...]:
        """The engines with what they were given."""
        engines = list(self.engines)
        for i in self._given:
            engines[i] = replace(engines[i], requests=self.requests[i], tokens=self.tokens[i])
        return tuple(engines)


class DecodeLoads:
    """What each DE has been given, by its index, and what its memory still takes.

    Raises:
        ValueError: two have one name.
    """

    def __init__(self, engines: Sequence[DecodeEngine]) -> None:
        self.engines = engines
        self.names = [engine.name for engine in engines]
        self.index = _index("DEs", self.names)
        self.tokens = [engine.tokens for engine in engines]
        self.requests = [engine.requests for engine in engines]
        self.free = [engine.free_tokens for engine in engines]
        self._given: set[int] = set()

    def assign(self, i: int, request: Request) -> None:
        """Give it the request, and reserve memory for prompt and answer."""
        self.tokens[i] += request.tokens
        self.requests[i] += 1
        self.free[i] -= request.reserved_tokens
        self._given.add(i)

    def has_room(self, i: int, request: Request) -> bool:
        """Whether it may take the request: not excluded, and memory is free."""
        return self.free[i] >= request.reserved_tokens and self.names[i] not in request.excluded

    def engines_after(self) -> tuple[DecodeEngine, ...]:
        """The engines with what they were given."""
        engines = list(self.engines)
        for i in self._given:
            engines[i] = replace(
                engines[i],
                requests=self.requests[i],
                tokens=self.tokens[i],
                free_tokens=self.free[i],
            )
        return tuple(engines)


class ReadQueues:
    """The nodes' read queues.

    Args:
        lengths: tokens, by node.
        grow: whether what is added is seen within the round.
    """

    def __init__(self, lengths: Mapping[str, int], grow: bool) -> None:
        self._after = dict(lengths)
        self._seen = self._after if grow else dict(lengths)

    def length(self, node: str) -> int:
        """Tokens that wait there, as far as this round looks."""
        return self._seen.get(node, 0)

    def add(self, node: str, tokens: int) -> None:
        """It has so many more to read."""
        self._after[node] = self._after.get(node, 0) + tokens

    def lengths_after(self) -> dict[str, int]:
        """All queues with what was added."""
        return self._after


def _index(what: str, names: Sequence[str]) -> dict[str, int]:
    index = {name: i for i, name in enumerate(names)}
    if len(index) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two {what} have one name: {', '.join(twice)}")
    return index
