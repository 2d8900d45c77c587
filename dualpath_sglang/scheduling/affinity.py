"""Whether a session returns to the engine where its prefix is warm. Not in the paper.

Returning saves time: what is warm need not be read, behind the read queue, nor computed where
storage does not have it. It costs the longer queue of tokens there. It pays when it saves at least
as much as it costs; so the longer a warm prefix or a read queue, the more load is put up with, and
never more than is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from dualpath_sglang.scheduling.reading import usable_rate
from dualpath_sglang.scheduling.rules import ALPHA_SECONDS, BETA_SECONDS, Rules


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second.

    Args:
        read: that a node reads from storage.
        compute: that a PE processes.
        decode: of load that slow a DE by a second.
    """

    read: float
    compute: float
    decode: float


@dataclass(frozen=True, slots=True)
class Visit:
    """What a request would meet at an engine.

    Args:
        queue_tokens: tok_e there.
        read_seconds: until its hits have been read.
        compute_tokens: that it would have to compute.
    """

    queue_tokens: int
    read_seconds: float
    compute_tokens: int = 0

    def seconds(self, rate: float) -> float:
        """Until it is through, with so many tokens a second.

        Reading and waiting are added up, as if nothing were read while the request waits: what
        can overlap at one engine can at the other.
        """
        return self.read_seconds + (self.queue_tokens + self.compute_tokens) / rate


def pays(warm: Visit, other: Visit, rate: float) -> bool:
    """Whether the warm engine is to be taken; so it is in a tie."""
    return warm.seconds(rate) <= other.seconds(rate)


def rates(rules: Rules, read_rates: Mapping[str, float]) -> Rates:
    """The rates to reckon with where some are not known.

    Reading: the rule's, else the mean of what nodes measured, else alpha over 3 s. Computing: the
    rule's, else beta over 5 s. When one of the two is still unknown it is taken to be like the
    other: a warm token then makes up for one token of queue.
    """
    measured = [rate for node in read_rates if (rate := usable_rate(read_rates, node)) is not None]
    read = (
        rules.read_rate
        or (fmean(measured) if measured else None)
        or _per_second(rules.alpha, ALPHA_SECONDS)
    )
    compute = rules.compute_rate or _per_second(rules.beta, BETA_SECONDS)
    read, compute = read or compute or 1.0, compute or read or 1.0
    return Rates(read, compute, rules.decode_rate or compute)


def _per_second(tokens: float, seconds: float) -> float | None:
    return tokens / seconds if 0 < tokens < math.inf else None
