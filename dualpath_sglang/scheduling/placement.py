"""One round of placement: which PE, which DE, and who reads, for each request that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dualpath_sglang.scheduling.engines import Cluster, Request
from dualpath_sglang.scheduling.rules import Rules

__all__ = ["Placement", "Round", "Rules", "place"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Args:
        request: its id.
        prefill: name of the PE.
        decode: name of the DE.
        shares: who reads its hits from storage: (node, weight > 0), weights sum to 1. Never empty,
            also when no hit is expected.
        read_tokens: how many tokens are expected to be read from storage.
        warm_prefill: whether the PE is the one in which its prefix is warm.
        warm_decode: whether the DE is.
    """

    request: str
    prefill: str
    decode: str
    shares: tuple[tuple[str, float], ...]
    read_tokens: int = 0
    warm_prefill: bool = False
    warm_decode: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What came of a round. Every request of the queue is in one of the three.

    Args:
        placements: in the order of the queue.
        waiting: those that are to be given to the next round, in the order of the queue.
        stranded: those that no engine of this cluster will ever take, however empty: excluded
            everywhere, or larger than each DE. They hold up nobody. The caller fails them, lifts
            their exclusion, or offers them again when an engine has joined.
        cluster_after: the cluster with the placements counted: requests, tokens, memory reserved,
            read queues, turns.
    """

    placements: tuple[Placement, ...]
    waiting: tuple[Request, ...]
    stranded: tuple[Request, ...]
    cluster_after: Cluster


def place(queue: Sequence[Request], cluster: Cluster, rules: Rules) -> Round:
    """Place what can be placed, in the order of the queue.

    Pure and deterministic: the same queue, cluster and rules give the same round.

    Raises:
        ValueError: two PEs or two DEs have one name.
    """
    placements: list[Placement] = []
    waiting = list(queue)
    pes, des = list(cluster.prefill), list(cluster.decode)
    while waiting and pes and des:
        head = waiting[0]
        i = min(range(len(pes)), key=lambda i: pes[i].tokens)
        j = min(range(len(des)), key=lambda j: des[j].tokens)
        pe, de = pes[i], des[j]
        if pe.tokens > rules.beta or de.free_tokens < head.reserved_tokens:
            break
        pes[i] = replace(pe, requests=pe.requests + 1, tokens=pe.tokens + head.tokens)
        des[j] = replace(
            de,
            requests=de.requests + 1,
            tokens=de.tokens + head.tokens,
            free_tokens=de.free_tokens - head.reserved_tokens,
        )
        placements.append(Placement(head.id, pe.name, de.name, ((pe.node, 1.0),), head.hit_tokens))
        waiting.pop(0)
    after = replace(cluster, prefill=tuple(pes), decode=tuple(des))
    return Round(tuple(placements), tuple(waiting), (), after)
