"""What scheduling knows: engines with their load, requests, and the cluster they make up.

Loads are the paper's (arXiv 2602.21548): of every engine e its unfinished requests, seq_e, and
their tokens, tok_e; of every node its read queue, read_q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """A PE.

    Args:
        name: unique among the PEs.
        node: name of the machine it runs on; its read queue is that of the node.
        requests: seq_e, requests given to it whose prefill has not ended.
        tokens: tok_e, their prompt tokens.
    """

    name: str
    node: str
    requests: int = 0
    tokens: int = 0

    def could_take(self, request: Request) -> bool:
        """Whether it may ever take the request."""
        return self.name not in request.excluded


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """A DE.

    Args:
        name: unique among the DEs.
        node: name of the machine it runs on.
        group: engines of a group share a queue; a node lies in one group.
        requests: seq_e, requests given to it that have not ended.
        tokens: tok_e, their tokens.
        free_tokens: tokens that its memory takes, less all that is reserved for requests given to
            it, whether they have arrived or not.
        capacity_tokens: tokens that its memory takes when it is empty; None when not known. Says
            which requests would wait for ever.
    """

    name: str
    node: str
    group: str
    requests: int
    tokens: int
    free_tokens: int
    capacity_tokens: int | None = None

    def could_take(self, request: Request) -> bool:
        """Whether it may ever take the request, were it empty."""
        fits = self.capacity_tokens is None or request.reserved_tokens <= self.capacity_tokens
        return fits and self.name not in request.excluded


@dataclass(frozen=True, slots=True)
class Request:
    """A request that waits for a PE and a DE.

    Args:
        id: given back in the placement.
        tokens: length of the prompt.
        hit_tokens: how many of them are expected to be read from storage by an engine that has
            none of them in memory.
        output_tokens: reserved at the DE for what will be generated.
        warm_prefill: the PE in whose memory a prefix is believed to lie, None if none.
        warm_decode: the DE in whose memory a prefix is believed to lie, None if none.
        warm_tokens: length of that prefix.
        excluded: names of PEs and DEs that failed this request; it is not placed on them again.

    Raises:
        ValueError: a negative number of tokens.
    """

    id: str
    tokens: int
    hit_tokens: int = 0
    output_tokens: int = 0
    warm_prefill: str | None = None
    warm_decode: str | None = None
    warm_tokens: int = 0
    excluded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if min(self.tokens, self.hit_tokens, self.output_tokens, self.warm_tokens) < 0:
            raise ValueError(f"request {self.id} has a negative number of tokens: {self}")

    @property
    def reserved_tokens(self) -> int:
        """Memory that a DE reserves for it, tokens: prompt and answer."""
        return self.tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Cluster:
    """All engines and nodes at one moment. A value: a round of placement gives the next one.

    Args:
        prefill: the PEs, in an order that stays the same from round to round (it breaks ties).
        decode: the DEs, likewise.
        read_queues: tokens that each node has accepted to read and not yet read; a node that is
            not named has none.
        read_rates: tokens a second that each node reads from storage, where measured. A rate that
            is not positive says that the node cannot read.
        next_prefill: index of the PE whose turn it is in round robin.
        next_decode: index of the DE whose turn it is in round robin.
        next_side: whose turn it is to read when the sides alternate, 0 the PE, 1 the DE.
    """

    prefill: tuple[PrefillEngine, ...] = ()
    decode: tuple[DecodeEngine, ...] = ()
    read_queues: Mapping[str, int] = field(default_factory=dict)
    read_rates: Mapping[str, float] = field(default_factory=dict)
    next_prefill: int = 0
    next_decode: int = 0
    next_side: int = 0
