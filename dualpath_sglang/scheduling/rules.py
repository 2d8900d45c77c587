"""By which rules requests are placed: what the paper fixes, and what it leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["dualpath", "round_robin"]
ReadPath: TypeAlias = Literal["shorter_queue", "split", "pe", "de", "alternate"]
WhenBlocked: TypeAlias = Literal["spill", "group", "pass"]

ALPHA_SECONDS = 3.0
BETA_SECONDS = 5.0


def alpha_tokens(read_rate: float, seconds: float = ALPHA_SECONDS) -> float:
    """The paper's alpha: tokens that a node reads from storage (tokens/s) in so many seconds."""
    return read_rate * seconds


def beta_tokens(compute_rate: float, seconds: float = BETA_SECONDS) -> float:
    """The paper's beta: tokens that a PE processes (tokens/s) in so many seconds."""
    return compute_rate * seconds


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests are placed.

    Args:
        policy: ``dualpath``, Algorithm 1 and the two-level rule; ``round_robin``, the paper's
            ablation: engines in turn, whatever their load (only memory of the DE counts).
        path: who reads a hit. ``shorter_queue``, the node of the pair with the shorter read queue
            (paper); ``split``, both so that they finish together; ``pe`` or ``de`` always;
            ``alternate``, in turn.
        alpha: tokens of a read queue over which a node's PEs are the second choice.
        beta: tokens of a PE over which it gets nothing more.
        z: a DE takes requests by their number while it has at most z times the mean tokens.
        grow_read_queue: whether a placement lengthens the read queues that later placements of
            the same round look at. The paper does not say; without it a node takes a whole burst.
            The queues in the answer grow in any case.
        when_blocked: what becomes of the requests behind one that must wait. ``spill``: strict
            FIFO, but a request tries every group of DEs before it waits; then all wait behind it.
            ``group``: as in the paper, it waits in the group that it was given to, behind it only
            those of that group; for a PE all wait. ``pass``: as spill, but others may pass it; a
            large request may starve.
        affinity: whether a request returns to where its prefix is warm when that pays
            (``affinity``). Not in round robin.
        over_beta: a warm PE may have up to this many times beta, if it pays and another PE is
            not over beta; 1.0: beta always holds.
        compute_rate: tokens a second that a PE processes; None: not known.
        read_rate: tokens a second that a node reads of which the cluster knows no rate; None: not
            known. ``affinity`` says what stands in for rates that are not known.
        decode_rate: a DE with so many tokens more counts as a second slower; None: as a PE.
        decode_restores: whether DEs read hits for themselves too. Then a warm PE saves a read from
            storage only if the DE is warm as well.

    Raises:
        ValueError: a figure that makes no sense.
    """

    policy: Policy = "dualpath"
    path: ReadPath = "shorter_queue"
    alpha: float = math.inf
    beta: float = math.inf
    z: float = 1.05
    grow_read_queue: bool = True
    when_blocked: WhenBlocked = "spill"
    affinity: bool = True
    over_beta: float = 1.0
    compute_rate: float | None = None
    read_rate: float | None = None
    decode_rate: float | None = None
    decode_restores: bool = False

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"alpha ({self.alpha}) and beta ({self.beta}) cannot be negative")
        if not self.z > 0:
            raise ValueError(f"z must be positive, not {self.z}")
        if not self.over_beta >= 1:
            raise ValueError(f"over_beta must be at least 1, not {self.over_beta}")
        for name in ("compute_rate", "read_rate", "decode_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {rate}")
