"""How long a round of placement takes: ``python -m bench.placement --json FILE``.

No servers: made-up engines and requests, from a fixed seed. CPU seconds of this process, the median
of some runs, so that other load on the machine matters little; beside it how that compares with
placing the same requests in turn.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.measure import median, write_rows
from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Rules, place

ENGINES_A_NODE = 8
ROOMY = 10**9


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of round.

    Args:
        round: what is special about it.
        queued: requests that wait.
        engines: PEs, and as many DEs.
        placed: requests that were placed.
        cpu_ms: of the round.
        to_round_robin: that, over the same queue placed in turn.
    """

    round: str
    queued: int
    engines: int
    placed: int
    cpu_ms: float
    to_round_robin: float


def cluster(dice: random.Random, engines: int, groups: int, free: int) -> Cluster:
    """Engines that have some load, on nodes that have measured their rate."""
    nodes = [f"{kind}{i // ENGINES_A_NODE}" for i in range(engines) for kind in "pd"]
    return Cluster(
        tuple(
            PrefillEngine(f"P{i}", f"p{i // ENGINES_A_NODE}", i % 5, dice.randrange(100_000))
            for i in range(engines)
        ),
        tuple(
            DecodeEngine(
                f"D{i}",
                f"d{i // ENGINES_A_NODE}",
                f"g{i // ENGINES_A_NODE % groups}",
                i % 50,
                dice.randrange(100_000),
                free,
            )
            for i in range(engines)
        ),
        {node: dice.randrange(1_000_000) for node in nodes},
        {node: 1e5 + dice.random() for node in nodes},
    )


def requests(dice: random.Random, count: int, engines: int, warm: bool) -> list[Request]:
    """Agents' turns: nearly all of the prompt is a hit; perhaps its session was here before."""
    queue = []
    for i in range(count):
        tokens = dice.randrange(1_000, 100_000)
        pe, de = f"P{dice.randrange(engines)}", f"D{dice.randrange(engines)}"
        where = (pe, de, tokens // 2) if warm else (None, None, 0)
        queue.append(Request(f"r{i}", tokens, tokens * 19 // 20, 500, *where))
    return queue


def measure(what: str, rules: Rules, count: int, engines: int, runs: int, **more: int) -> Row:
    """The median of some runs of one round."""
    dice = random.Random(1)
    bed = cluster(dice, engines, more.get("groups", 1), more.get("free", ROOMY))
    queue = requests(dice, count, engines, bool(more.get("warm")))

    def seconds(chosen: Rules) -> float:
        begun = time.process_time()
        place(queue, bed, chosen)
        return time.process_time() - begun

    took = median([seconds(rules) for _ in range(runs)])
    in_turn = median([seconds(Rules(policy="round_robin")) for _ in range(runs)])
    placed = len(place(queue, bed, rules).placements)
    return Row(what, count, engines, placed, round(took * 1e3, 3), round(took / in_turn, 2))


def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows here, too.")] = None,
) -> None:
    """How long a round of placement takes."""
    split = Rules(path="split", alpha=300_000.0)
    passing = Rules(when_blocked="pass")
    rows = [
        measure("one request", Rules(), 1, 32, 301),
        measure("one request, warm, split", split, 1, 32, 301, warm=1, groups=4),
        measure("many", Rules(), 10_000, 128, 5),
        measure("many, warm, split, 16 groups", split, 10_000, 128, 5, warm=1, groups=16),
        measure("many, beta reached", Rules(beta=1e5), 10_000, 128, 5, warm=1, groups=16),
        measure("many, memory full", Rules(), 10_000, 128, 5, free=300_000, groups=16),
        measure("many, others pass", passing, 10_000, 128, 5, free=300_000, groups=16),
    ]
    table = Table(title="A round of placement")
    for column in ("round", "queued", "PEs, DEs", "placed", "CPU ms", "to round robin"):
        table.add_column(column, justify="left" if column == "round" else "right")
    for row in rows:
        numbers = (row.queued, row.engines, row.placed, row.cpu_ms, row.to_round_robin)
        table.add_row(row.round, *map(str, numbers))
    Console().print(table)
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
