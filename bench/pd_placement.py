"""Placement by the paper's scheduler against round robin, through a real router.

    python -m bench.pd_placement --json OUT

The router is a process of its own; engines are stubs with fixed speeds (``bench.pd_stubs``), so
that two cores suffice and both policies meet the same engines. In each round both policies get the
same sessions at the same times, in another order each round. Requests are of unequal length
(lognormal). What is said is how round robin's figure compares with the scheduler's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.measure import percentile
from bench.pd_stubs import Engine, Speeds, World, engines
from tests.support.server import free_port

POLICIES = ("dualpath", "round_robin")
PREDICTION = (
    "With unequal lengths, turns give some engines two long requests in a row. Predicted: "
    "outstanding tokens max/mean at least 10 % lower, storage bytes max/mean at least 10 % lower "
    "(of its part above 1: half), and TTFT p99 at least 20 % lower than round robin's."
)
SAMPLE_S = 0.02
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions that begin at random times, independent of each other.

    Args:
        seconds: how long sessions begin.
        rate: sessions a second.
        median_tokens, sigma: of the first prompt, lognormal.
        turns: requests of a session, one after the other.
        growth: tokens that each turn adds, as a share.
        output: tokens of each answer.
        pause_s: mean time of a tool.
    """

    seconds: float
    rate: float = 4.0
    median_tokens: int = 1500
    sigma: float = 1.0
    most_tokens: int = 16_000
    turns: int = 4
    growth: float = 0.08
    output: int = 16
    pause_s: float = 0.3

    def sessions(self, seed: int) -> list[tuple[float, list[int], list[float]]]:
        """When each begins, the lengths of its prompts, and the pauses after them."""
        source = random.Random(seed)
        made, at = [], 0.0
        while (at := at + source.expovariate(self.rate)) < self.seconds:
            first = min(
                self.most_tokens,
                max(64, source.lognormvariate(math.log(self.median_tokens), self.sigma)),
            )
            sizes = [int(first * (1 + self.growth) ** turn) for turn in range(self.turns)]
            pauses = [source.expovariate(1 / self.pause_s) for _ in sizes]
            made.append((at, sizes, pauses))
        return made


@dataclass(frozen=True, slots=True)
class Row:
    """A policy in a round.

    Args:
        prefill_tokens, decode_tokens: outstanding tokens, max over mean of engines, both averaged
            over time.
        storage: tokens read by a node, max over mean of nodes.
        ttft_p50_s, ttft_p99_s: seconds until the first token.
    """

    round: int
    policy: str
    requests: int
    prefill_tokens: float
    decode_tokens: float
    storage: float
    ttft_p50_s: float
    ttft_p99_s: float


FIGURES = ("prefill_tokens", "decode_tokens", "storage", "ttft_p50_s", "ttft_p99_s")


async def play(url: str, world: World, workload: Workload, seed: int) -> dict[str, Any]:
    """All sessions; what came of them."""
    world.reset()
    firsts: list[float] = []
    samples: dict[str, list[list[int]]] = {"prefill": [], "decode": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        watching = asyncio.create_task(watch(world.engines, samples))
        told = workload.sessions(seed)
        await asyncio.gather(
            *(hold(http, url, workload, f"{seed}-{n}", one, firsts) for n, one in enumerate(told))
        )
        watching.cancel()
    found = {f"{role}_tokens": imbalance(rows) for role, rows in samples.items()}
    read = [line.done for line in world.storage.values()]
    return {
        "requests": len(firsts),
        **found,
        "storage": max(read) / statistics.mean(read),
        "ttft_p50_s": percentile(firsts, 0.5),
        "ttft_p99_s": percentile(firsts, 0.99),
    }


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """Mean of the largest over mean of all."""
    return statistics.mean(map(max, rows)) / statistics.mean(map(statistics.mean, rows))


async def watch(all_engines: Sequence[Engine], samples: dict[str, list[list[int]]]) -> None:
    """Note what each engine has to do, now and then."""
    while True:
        for role, rows in samples.items():
            rows.append([e.outstanding for e in all_engines if e.role == role])
        await asyncio.sleep(SAMPLE_S)


async def hold(
    http: aiohttp.ClientSession,
    url: str,
    workload: Workload,
    name: str,
    session: tuple[float, list[int], list[float]],
    firsts: list[float],
) -> None:
    """One session."""
    begins, sizes, pauses = session
    await asyncio.sleep(begins)
    for size, pause in zip(sizes, pauses, strict=True):
        body = {
            "input_ids": [7] * size,
            "session_id": name,
            "sampling_params": {"max_new_tokens": workload.output},
            "stream": True,
        }
        began = time.monotonic()
        async with http.post(f"{url}/generate", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"the router says {answer.status}: {await answer.text()}")
            first = True
            async for line in answer.content:
                if first and line.startswith(b"data:"):
                    firsts.append(time.monotonic() - began)
                    first = False
        await asyncio.sleep(pause)


@asynccontextmanager
async def router(world: World, policy: str, *arguments: str) -> AsyncIterator[str]:
    """Its URL, when it knows that all engines answer."""
    port = free_port()
    command = [sys.executable, "-m", "dualpath_sglang.cli", "router", "--port", str(port)]
    command += ["--policy", policy, "--no-affinity", *arguments]
    for engine in world.engines:
        spec = f"http://127.0.0.1:{engine.port},node={engine.node}"
        command += [f"--{engine.role}", spec]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        await _ready(url)
        yield url
    finally:
        process.kill()
        process.wait()


async def _ready(url: str) -> None:
    end = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < end:
            try:
                async with http.get(f"{url}/engines") as answer:
                    told = (await answer.json())["engines"]
                    if all(engine["state"] == "ready" for engine in told):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError("the router does not get ready")


async def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rounds."""
    rows = []
    workload = Workload(arguments.seconds)
    speeds = Speeds()
    rates = ["--read-rate", str(speeds.read), "--prefill-rate", str(speeds.prefill)]
    async with engines(arguments.prefills, arguments.decodes, speeds) as world:
        for number in range(arguments.rounds):
            order = POLICIES if number % 2 == 0 else POLICIES[::-1]
            for policy in order:
                async with router(world, policy, *rates) as url:
                    found = await play(url, world, workload, arguments.seed + number)
                rows.append(Row(number, policy, **found))
                print(rows[-1], flush=True)
    return rows


def compare(rows: Sequence[Row]) -> dict[str, float]:
    """By figure: the scheduler's over round robin's, median over the rounds."""
    by = {(row.round, row.policy): row for row in rows}
    rounds = sorted({row.round for row in rows})
    return {
        name: statistics.median(
            getattr(by[r, "dualpath"], name) / getattr(by[r, "round_robin"], name) for r in rounds
        )
        for name in FIGURES
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefills", type=int, default=4)
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(PREDICTION)
    rows = asyncio.run(measure(arguments))
    ratios = compare(rows)
    print(f"{'':16} {'dualpath':>10} {'round robin':>12} {'ratio':>6}")
    for name in FIGURES:
        medians = [
            statistics.median(getattr(row, name) for row in rows if row.policy == policy)
            for policy in POLICIES
        ]
        print(f"{name:16} {medians[0]:10.3f} {medians[1]:12.3f} {ratios[name]:6.2f}")
    if arguments.json:
        told = [*map(asdict, rows), {"policy": "ratio", **ratios}]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
