"""Runs the workload ``single`` on a real SGLang server in a prefill host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cluster.bed import STORAGE, Bed
from bench.cluster.counters import NicSampler
from bench.cluster.driver import Figures
from bench.cluster.lines import Peer
from bench.measure import BenchError

_START_S = 30.0
_TURN_S = 180.0


@dataclass(frozen=True, slots=True)
class Asking:
    """One request after the other, each with a prefix of its own in the store.

    Args:
        requests: how many.
        context: tokens of the prefix.
        append: tokens behind it.
        nodes: other nodes that the server is to know of before it is asked.
    """

    requests: int
    context: int
    append: int
    nodes: int


def ask(work: Asking, bed: Bed, progress: Callable[[str], None]) -> tuple[Figures, Sequence[str]]:
    """Store the prefixes and ask; also what was answered.

    Raises:
        BenchError: a process failed, or a hit was not whole.
    """
    (engine,) = bed.prefill
    names = [f"single{i}" for i in range(work.requests)]
    pages = 0
    for i, name in enumerate(names, 1):
        progress(f"filling the store: {i} of {len(names)}")
        told = engine.ask("fill", _TURN_S, trajectory=name, tokens=work.context, pages_before=pages)
        pages += told["pages"]
    _await_nodes(engine, work.nodes)
    before = engine.ask("stats", _START_S)["landed_bytes"]
    ttft, texts, short = [], [], 0
    with NicSampler([peer.process.pid for peer in bed.hosts], STORAGE) as nics:
        began = time.monotonic()
        for i, name in enumerate(names, 1):
            progress(f"request {i} of {len(names)}")
            told = engine.ask(
                "prefill", _TURN_S, trajectory=name, context=work.context, append=work.append
            )
            ttft.append(told["ttft_s"])
            texts.append(told["text"])
            short += told["short_pages"]
        took = time.monotonic() - began
    time.sleep(1.5)  # the server tells its counters every second
    landed = engine.ask("stats", _START_S)["landed_bytes"] - before
    if short:
        raise BenchError(f"{short} pages of prefixes were not found in the store")
    figures = Figures(
        landed * 8e-6 / took, nics.spread, sum(nics.bytes) * 8e-6 / took, took, ttft, short
    )
    return figures, texts


def _await_nodes(engine: Peer, count: int) -> None:
    end = time.monotonic() + _START_S
    while engine.ask("nodes", _START_S)["nodes"] != count:
        if time.monotonic() > end:
            raise BenchError(f"The server does not know {count} other nodes")
        time.sleep(0.2)
