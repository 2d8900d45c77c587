"""What following a router's hint costs: reads over the own agent, and hits split by key.

``python -m bench.hinted --json FILE``. Rows: {what, layer_kib, layers, direct_io, gb_s, of_direct,
of_runs, mean_io_kib}, medians over rounds that take turns. One process reads, another one is the
agent. ``mean_io_kib`` is of the agent's reads from the store, counted once; 0 where it is not.

| what | |
|---|---|
| ``direct`` | the reader reads the whole hit from the store itself |
| ``own agent`` | the agent reads it, and the reader copies it out of the agent's memory |
| ``again`` | the same once more: the agent has it in memory |
| ``half in runs`` | the agent reads one half of the hit, blocks that are neighbours on disk |
| ``half by key`` | as many blocks, chosen by their keys, as for a hint that names two nodes |
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.agent import LAYERS, SOCKET, Blocks, Checked, DirectIo, ask, blocks_of, serving, written
from bench.measure import BenchError, median, write_rows
from bench.throttle import HookedBackend
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.scheduling.assign import assign
from dualpath_sglang.transport.base import End, FetchRequest, Missing, StridedDestination
from dualpath_sglang.transport.local_client import LocalConnection
from dualpath_storage import StoreOptions, pieces_of

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """One way to read.

    Args:
        of_direct, of_runs: the rate, as a multiple of those of ``direct`` and ``half in runs``.
    """

    what: str
    layer_kib: int
    layers: int
    direct_io: str
    gb_s: float
    of_direct: float
    of_runs: float
    mean_io_kib: float = 0.0


def mean_io_kib(blocks: Blocks, root: Path) -> dict[str, float]:
    """KiB of an agent's reads from the store, for the halves."""
    seen: list[int] = []
    backend = HookedBackend(root, lambda _, __, size: seen.append(size))
    options = StoreOptions(root, 4 * blocks.size, min_free_fraction=0, direct_io="off")
    half = mine(blocks)
    means = {}
    with KVCache(options, backend) as cache:
        pool = cache.attach(blocks.geometry)
        data = pieces_of(memoryview(bytearray(blocks.geometry.block_bytes)), blocks.geometry)
        for at in range(0, len(blocks.keys), 16):
            some = blocks.keys[at : at + 16]
            cache.write(pool, some, [data] * len(some))
        agent = Agent(cache, 2 * blocks.size)
        geometry = blocks.geometry
        for what, keys in (("half in runs", blocks.keys[: len(half)]), ("half by key", half)):
            seen.clear()
            request = FetchRequest(geometry.id_bytes, keys, 0, geometry.layers, _TIMEOUT_S)
            served = agent.serve(request)
            if isinstance(served, End):
                raise BenchError(f"A fetch ended {served.name}")
            with served as parts:
                if any(isinstance(part, Missing) for part in parts):
                    raise BenchError("A block cannot be read")
            means[what] = round(sum(seen) / len(seen) / 1024, 1)
            agent.blocks.forget()
        agent.close()
    return means


def mine(blocks: Blocks) -> list[bytes]:
    """The half of the blocks that is one of two nodes'."""
    index = assign(blocks.keys, [0.5, 0.5])
    return [key for key, i in zip(blocks.keys, index, strict=True) if not i]


def measure(blocks: Blocks, root: Path, rounds: int, direct_io: DirectIo) -> list[Row]:
    """All of them, round by round."""
    size, geometry = blocks.geometry.block_bytes, blocks.geometry
    memory = written(blocks.size)
    rates: dict[str, list[float]] = {}
    half = mine(blocks)
    means = mean_io_kib(blocks, root / "counted")
    root = root / "timed"
    with serving(root, blocks, direct_io) as (pipe, _, _), contextlib.ExitStack() as stack:
        local = LocalConnection(root / SOCKET, time.monotonic() + 10.0)
        stack.callback(local.close)
        options = StoreOptions(root, 4 * blocks.size, read_only=True, direct_io=direct_io)
        cache = stack.enter_context(KVCache(options))
        pool = cache.attach(geometry, writer=False)
        pieces = [
            pieces_of(memory[n * size : (n + 1) * size], geometry) for n in range(len(blocks.keys))
        ]

        def direct() -> None:
            if not all(cache.read(pool, blocks.keys, pieces, timeout_s=_TIMEOUT_S)):
                raise BenchError("A block cannot be read")

        def fetch(keys: Sequence[bytes]) -> None:
            place = StridedDestination.of_layers(memory, geometry.layer_bytes, len(keys))
            request = FetchRequest(geometry.id_bytes, keys, 0, geometry.layers, _TIMEOUT_S)
            told = Checked(place)
            local.fetch(request, told, told).wait(_TIMEOUT_S)
            if told.end is not End.OK or told.bad:
                raise BenchError(f"A fetch ended {told.end.name}, with {told.bad} bad Layer Blocks")

        def timed(what: str, count: int, call: Callable[[], None]) -> None:
            began = time.perf_counter()
            call()
            rates.setdefault(what, []).append(count * size / (time.perf_counter() - began) / 1e9)

        direct()
        fetch(blocks.keys)  # the agent's memory, and the map of it, are there from now on
        for _ in range(rounds):
            timed("direct", len(blocks.keys), direct)
            ask(pipe, "forget")
            timed("own agent", len(blocks.keys), lambda: fetch(blocks.keys))
            timed("again", len(blocks.keys), lambda: fetch(blocks.keys))
            ask(pipe, "forget")
            timed("half in runs", len(half), lambda: fetch(blocks.keys[: len(half)]))
            ask(pipe, "forget")
            timed("half by key", len(half), lambda: fetch(half))
    found = {what: median(values) for what, values in rates.items()}
    return [
        Row(
            what,
            geometry.layer_bytes >> 10,
            geometry.layers,
            direct_io,
            round(rate, 3),
            round(rate / found["direct"], 3),
            round(rate / found["half in runs"], 3),
            means.get(what, 0.0),
        )
        for what, rate in found.items()
    ]


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    layer_kib: Annotated[str, typer.Option(help="KiB of a Layer Block, comma-separated")] = (
        "1,4,16,64"
    ),
    size_mib: Annotated[int, typer.Option(min=1, help="MiB of a hit")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which the medians count")] = 7,
    buffered: Annotated[bool, typer.Option(help="read through a warm page cache")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="where the store is put; default: here")
    ] = None,
) -> None:
    """Measure what reads over the own agent, and splits by key, cost."""
    root = directory or Path(__file__).resolve().parents[1]
    rows: list[Row] = []
    for kib in (int(text) for text in layer_kib.split(",")):
        count = max(2, (size_mib << 10) // (kib * LAYERS))
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=root) as base:
            rows += measure(blocks_of(kib, count), Path(base), rounds, "off" if buffered else "on")
    table = Table(title=f"{size_mib} MiB a hit, blocks of {LAYERS} layers")
    for column in ("what", "layer KiB", "GB/s", "of direct", "of runs", "I/O KiB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for each in rows:
        figures = (f"{each.gb_s:.2f}", f"{each.of_direct:.2f}", f"{each.of_runs:.2f}")
        mean = f"{each.mean_io_kib:.0f}" if each.mean_io_kib else ""
        table.add_row(each.what, str(each.layer_kib), *figures, mean)
    Console().print(table)
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
