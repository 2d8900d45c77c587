"""Time to first token of one prefix hit: read layer by layer, read whole, or computed anew.

``python -m bench.streaming --json FILE``. The store is throttled to a rate at which reading the
hit takes as long as the forward of the rest of the prompt. The forward is a stand-in: for each
layer it waits until that layer of the hit is there, and then takes a fixed time, during which the
processor is free, as it is beside a GPU. Every mode's pages are compared byte for byte.

| row field | meaning |
|---|---|
| ``mode`` | ``streaming``, ``whole_page`` (the forward begins after the last byte), ``recompute`` |
| ``read_s`` | from the lookup until the last layer of the hit is in the pages |
| ``compute_s`` | the layers' own time, waits left out |
| ``layer0_s`` | from the lookup until layer 0 of the hit is in the pages |
| ``ttft_s`` | from the lookup until the last layer is computed |

A row is the median of the rounds; the modes take turns.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, write_rows
from bench.throttle import HookedBackend, Throttle
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.streaming.landing import MemoryLanding
from dualpath_sglang.streaming.load import LoadRequest, PoolLoad
from dualpath_sglang.streaming.options import MIB, StreamOptions
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_storage import Geometry, StoreOptions, pieces_of

WHOLE_PAGE_BATCH = 128
"""Pages that SGLang reads in one call before it looks around."""


@dataclass(frozen=True, slots=True)
class Row:
    """See the module."""

    mode: str
    layers: int
    read_s: float
    compute_s: float
    layer0_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """One size of model and hit.

    Args:
        seconds: that reading the hit takes, and that computing the rest takes.
        hit_share: of the prompt.
    """

    layers: int
    pages: int
    layer_bytes: int
    seconds: float
    hit_share: float


class Bench:
    """A store with one stored prefix of a case."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case = case
        geometry = Geometry(
            model="bench",
            weights="none",
            pool="kv",
            dtype="bfloat16",
            page_tokens=64,
            layers=case.layers,
            layer_bytes=case.layer_bytes,
            form="bench",
        )
        size = geometry.slot_bytes * case.pages
        self._throttle = Throttle(0)
        backend = HookedBackend(root, self._throttle)
        options = StoreOptions(
            root=root,
            capacity_bytes=4 * size,
            min_free_fraction=0.0,
            read_timeout_s=120.0,
            lookup_timeout_s=10.0,
        )
        self.cache = KVCache(options, backend)
        self.pool = self.cache.attach(geometry)
        rng = np.random.default_rng(1)
        self.keys = [rng.bytes(32) for _ in range(case.pages)]
        self._stored = bytearray(rng.bytes(geometry.block_bytes * case.pages))
        self._pages = bytearray(len(self._stored))
        self._pieces = self._cut(self._pages)
        self.cache.write(self.pool, self.keys, self._cut(self._stored))
        self._throttle.bytes_per_s = size / case.seconds
        self.streamer = LayerStreamer(self.cache, StreamOptions(staging_bytes=max(MIB, size // 4)))
        self._measure_device()

    def _cut(self, memory: bytearray) -> list[list[memoryview]]:
        size = self.pool.geometry.block_bytes
        view = memoryview(memory)
        return [
            pieces_of(view[i : i + size], self.pool.geometry) for i in range(0, len(memory), size)
        ]

    def _measure_device(self) -> None:
        self.streamer.measure(self.pool)
        end = time.monotonic() + 30
        while self.streamer.forecast().bytes_per_s is None:
            if time.monotonic() > end:
                raise BenchError("the throttled store was not measured within 30 s")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop every thread."""
        self._throttle.bytes_per_s = 0
        self.streamer.close()
        self.cache.close()

    def run(self, mode: str) -> Row:
        """One hit in one mode."""
        self._pages[:] = bytes(len(self._pages))
        row: Row = getattr(self, f"_{mode}")()
        if mode != "recompute" and self._pages != self._stored:
            raise BenchError(f"{mode} put wrong bytes into the pages")
        return row

    def _forward(self, ready_at: Callable[[int], float], seconds: float) -> float:
        """Compute every layer once it is ready; the seconds without the waits.

        A device begins a layer when the one before it is done and its input is there, however
        late this thread wakes up: so ends are reckoned from those times, and then waited for.
        """
        each_s = seconds / self.case.layers
        end = time.monotonic()
        for layer in range(self.case.layers):
            end = max(end, ready_at(layer)) + each_s
            time.sleep(max(0.0, end - time.monotonic()))
        return each_s * self.case.layers

    def _streaming(self) -> Row:
        case = self.case
        began = time.monotonic()
        found = self.cache.prefix(self.pool, self.keys)
        self.cache.promise("bench", self.pool, self.keys[found - 1])
        part = PoolLoad(
            self.pool,
            MemoryLanding(self._pieces),
            self.keys[:found],
            range(found),
            range(case.layers),
        )
        looked_up_s = time.monotonic() - began
        load = self.streamer.start(
            [LoadRequest("bench", [part])],
            layers=case.layers,
            deadline=time.monotonic() + 120,
        )

        def ready_at(layer: int) -> float:
            _check(load.wait_layer(layer, 120))
            return load.began + load.ready_s[layer]

        computed = self._forward(ready_at, case.seconds)
        ttft_s = time.monotonic() - began
        _check(load.wait()["bench"].ok and found == case.pages)
        self.cache.release("bench")
        ready = load.ready_s
        return Row(
            "streaming",
            case.layers,
            looked_up_s + ready[-1],
            computed,
            looked_up_s + ready[0],
            ttft_s,
        )

    def _whole_page(self) -> Row:
        began = time.monotonic()
        found = self.cache.prefix(self.pool, self.keys)
        for i in range(0, found, WHOLE_PAGE_BATCH):
            span = slice(i, i + WHOLE_PAGE_BATCH)
            _check(all(self.cache.read(self.pool, self.keys[span], self._pieces[span])))
        read_s = time.monotonic() - began
        computed = self._forward(_at_once, self.case.seconds)
        ttft_s = time.monotonic() - began
        _check(found == self.case.pages)
        return Row("whole_page", self.case.layers, read_s, computed, read_s, ttft_s)

    def _recompute(self) -> Row:
        began = time.monotonic()
        whole_s = self.case.seconds / (1 - self.case.hit_share)
        computed = self._forward(_at_once, whole_s)
        ttft_s = time.monotonic() - began
        return Row("recompute", self.case.layers, 0.0, computed, 0.0, ttft_s)


def _at_once(layer: int) -> float:
    del layer
    return 0.0


def _check(ok: bool) -> None:
    if not ok:
        raise BenchError("a load did not end as it must")


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every mode")] = 3,
    layers: Annotated[int, typer.Option(min=2, help="of the model")] = 16,
    times: Annotated[int, typer.Option(min=1, help="and once more with this many times it")] = 8,
    pages: Annotated[int, typer.Option(min=16, help="of the hit")] = 32,
    layer_kib: Annotated[int, typer.Option(min=1, help="of one layer of a page")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="to read, and to compute")] = 1.0,
    hit_share: Annotated[float, typer.Option(min=0.0, max=0.99, help="of the prompt")] = 0.8,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="where the stores are put; default: in this repository"),
    ] = None,
) -> None:
    """Measure the time to first token of a prefix hit on a store as slow as the forward."""
    console = Console(stderr=True, soft_wrap=True)
    root = directory or Path(__file__).resolve().parents[1]
    rows: list[Row] = []
    for count in sorted({layers, layers * times}):
        case = Case(count, pages, layer_kib << 10, seconds, hit_share)
        base = Path(tempfile.mkdtemp(prefix=".bench-", dir=root))
        try:
            bench = Bench(case, base / "store")
            try:
                rows += _measure(bench, rounds, console)
            finally:
                bench.close()
        finally:
            shutil.rmtree(base)
    Console().print(_table(rows), _targets(rows))
    if json is not None:
        write_rows(json, rows)


def _measure(bench: Bench, rounds: int, console: Console) -> list[Row]:
    found: dict[str, list[Row]] = {mode: [] for mode in ("streaming", "whole_page", "recompute")}
    for number in range(rounds):
        for mode, seen in found.items():
            seen.append(bench.run(mode))
            line = f"{bench.case.layers} layers, round {number + 1}: {mode} {seen[-1].ttft_s:.3f} s"
            console.print(line, style="dim")
    return [_median(seen) for seen in found.values()]


def _median(rows: list[Row]) -> Row:
    names = ("read_s", "compute_s", "layer0_s", "ttft_s")
    values = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return Row(rows[0].mode, rows[0].layers, **values)


def _table(rows: list[Row]) -> Table:
    table = Table(title="One prefix hit on a throttled store")
    for column in ("layers", "mode", "read s", "compute s", "layer 0 s", "TTFT s"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in rows:
        numbers = (row.read_s, row.compute_s, row.layer0_s, row.ttft_s)
        table.add_row(str(row.layers), row.mode, *(f"{number:.3f}" for number in numbers))
    return table


def _targets(rows: list[Row]) -> Table:
    """What streaming is meant to reach, and whether it does."""
    table = Table(title="Targets")
    for column in ("layers", "figure", "reached", "target", ""):
        table.add_column(column)
    last_ratio = 0.0
    by_layers = {row.layers: {r.mode: r for r in rows if r.layers == row.layers} for row in rows}
    for layers, modes in sorted(by_layers.items()):
        stream, whole = modes["streaming"], modes["whole_page"]
        compute_s = stream.compute_s
        bound_s = 1.15 * max(whole.read_s, compute_s) + compute_s / layers
        ratio = whole.ttft_s / stream.ttft_s
        for figure, value, target, met in (
            ("TTFT, s", stream.ttft_s, f"<= {bound_s:.3f}", stream.ttft_s <= bound_s),
            ("whole pages are slower, x", ratio, ">= 1.6", ratio >= 1.6),
            ("not less than with fewer layers, x", ratio, f">= {last_ratio:.2f}",
             ratio >= last_ratio),
            ("layer 0 ready, share of the read", stream.layer0_s / whole.read_s, "<= 0.25",
             stream.layer0_s <= 0.25 * whole.read_s),
        ):  # fmt: skip
            table.add_row(str(layers), figure, f"{value:.3f}", target, "met" if met else "MISSED")
        last_ratio = ratio
    return table


if __name__ == "__main__":
    typer.run(main)
