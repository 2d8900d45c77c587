"""What a running decode notices of loads from a slow store: the time between its tokens.

``python -m bench.decode_stall --json FILE``. A real SGLang server on the CPU in streaming mode. One
request decodes; meanwhile prompts ten times as long as its own arrive one after the other, all of
whose pages are in a store so slow that a load takes several times the stall budget.

| ``mode`` | beside the decode |
|---|---|
| ``alone`` | nothing |
| ``recompute`` | prompts as long that nobody has stored: what they cost without a store |
| ``budget`` | stored prompts, under the stall budget |
| ``no_budget`` | the same with a budget that never binds: what the budget is for |

| row field | meaning |
|---|---|
| ``tokens`` | tokens of the decode over all rounds |
| ``p50_ms``, ``p99_ms``, ``max_ms`` | between two of them, as a streaming client sees them |
| ``budget_ms`` | configured |
| ``loaded`` | tokens of the prompts that came from the store |
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json as json_format
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, percentile, write_rows
from tests.support import tiny_model
from tests.support.server import random_tokens
from tests.support.streaming import PAGE_TOKENS, Background, StreamingServer

TIMES_LONGER = 10
MODES = ("alone", "recompute", "budget", "no_budget")
_NEVER_S = 60.0
_PATIENCE_S = 300.0
_JSON = {"Content-Type": "application/json"}
_DECODER = random_tokens(96, seed=1)


@dataclass(frozen=True, slots=True)
class Row:
    """See the module."""

    mode: str
    tokens: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    budget_ms: float
    loaded: int


class Decode:
    """A streaming request on a thread of its own, and when each of its tokens came."""

    def __init__(self, server: StreamingServer, tokens: int) -> None:
        self._server = server
        self._tokens = tokens
        self._began = threading.Event()
        self._call = Background(lambda: list(self._times()))

    @property
    def running(self) -> bool:
        """Whether more tokens are to come."""
        return self._call.running

    def wait_for_the_first(self) -> None:
        """Until it decodes."""
        if not self._began.wait(_PATIENCE_S):
            raise BenchError("the decode does not begin")

    def result(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in itertools.pairwise(self._call.result(_PATIENCE_S))]

    def _times(self) -> Iterator[float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=_PATIENCE_S)
        sampling = {"temperature": 0, "max_new_tokens": self._tokens, "ignore_eos": True}
        body = {"input_ids": _DECODER, "sampling_params": sampling, "stream": True}
        with contextlib.closing(connection):
            connection.request("POST", "/generate", json_format.dumps(body), _JSON)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self._began.set()
                    yield time.monotonic()


class Bench:
    """One server with a store full of prompts."""

    def __init__(self, folder: Path, budget_s: float, load_s: float, tokens: int) -> None:
        self._folder = folder
        self._budget_s = budget_s
        self._load_s = load_s
        self._tokens = tokens
        self._prompts = [
            random_tokens(TIMES_LONGER * len(_DECODER), seed=100 + i) for i in range(5)
        ]
        self._fresh = itertools.count(1000)

    def run(self, rounds: int, say: Callable[[str], None]) -> list[Row]:
        """All modes, in turns."""
        model = tiny_model.cached_model(self._folder / "models", "qwen3", 0)
        gaps: dict[str, list[float]] = {mode: [] for mode in MODES}
        loaded = dict.fromkeys(MODES, 0)
        for budget_s, modes in ((self._budget_s, MODES[:3]), (_NEVER_S, MODES[3:])):
            settings = {
                "stall_budget_s": budget_s,
                "stream_queue_depth": 4,
                "load_timeout_s": 2 * _NEVER_S,
            }
            folder = self._folder / f"budget-{budget_s}"
            with StreamingServer(model, folder, settings=settings) as server:
                self._prepare(server)
                for number, mode in itertools.product(range(rounds), modes):
                    seen, hit = self._round(server, mode)
                    gaps[mode] += seen
                    loaded[mode] += hit
                    worst = 1000 * max(seen)
                    say(f"round {number + 1}, {mode}: {len(seen)} tokens, worst {worst:.0f} ms")
        return [self._row(mode, gaps[mode], loaded[mode]) for mode in MODES]

    def _prepare(self, server: StreamingServer) -> None:
        server.store(*self._prompts)
        before = server.metric("dualpath_read_bytes_total")
        hit = server.generate(self._prompts[0], 1).cached.storage
        if hit < len(self._prompts[0]) - PAGE_TOKENS:
            raise BenchError(f"only {hit} tokens came from the store")
        end = time.monotonic() + 10.0  # metrics are published every second
        while (size := server.metric("dualpath_read_bytes_total") - before) == 0:
            if time.monotonic() > end:
                raise BenchError("the server does not say how much it read")
            time.sleep(0.1)
        server.faults.on("read_rate", size / self._load_s)
        for prompt in self._prompts:  # how slow it is has to be seen
            server.flush()
            server.generate(prompt, 1)

    def _round(self, server: StreamingServer, mode: str) -> tuple[list[float], int]:
        server.flush()
        decode = Decode(server, self._tokens)
        decode.wait_for_the_first()
        loaded = 0
        for prompt in [] if mode == "alone" else self._prompts:
            if not decode.running:
                break
            if mode == "recompute":
                prompt = random_tokens(len(prompt), seed=next(self._fresh))
            loaded += server.generate(prompt, 1).cached.storage
        return decode.result(), loaded

    def _row(self, mode: str, gaps: Sequence[float], loaded: int) -> Row:
        p50, p99, most = (1000 * percentile(gaps, share) for share in (0.5, 0.99, 1.0))
        budget_s = _NEVER_S if mode == "no_budget" else self._budget_s
        return Row(mode, len(gaps), p50, p99, most, 1000 * budget_s, loaded)


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    budget: Annotated[float, typer.Option(min=0.01, help="stall budget, seconds")] = 0.2,
    load: Annotated[float, typer.Option(min=0.1, help="seconds that a whole load takes")] = 1.0,
    tokens: Annotated[int, typer.Option(min=20, help="that the decode makes")] = 300,
) -> None:
    """Measure what a decode notices of loads from a slow store."""
    console = Console(stderr=True, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="dualpath-bench-"))
    try:
        bench = Bench(folder, budget, load, tokens)
        rows = bench.run(rounds, lambda line: console.print(line, style="dim"))
    except BenchError as error:
        console.print(str(error), style="red")
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    Console().print(_table(rows))
    if json is not None:
        write_rows(json, rows)


def _table(rows: Sequence[Row]) -> Table:
    alone = next(row for row in rows if row.mode == "alone")
    bound = max(2 * alone.p99_ms, rows[0].budget_ms)
    table = Table(title="A decode beside loads: time between tokens")
    for column in ("mode", "tokens", "p50 ms", "p99 ms", "max ms", "from the store", ""):
        table.add_column(column, justify="left" if column in ("mode", "") else "right")
    for row in rows:
        verdict = ""
        if row.mode == "budget":
            verdict = f"target: p99 <= {bound:.0f} ms, "
            verdict += "met" if row.p99_ms <= bound else "MISSED"
        times = (row.p50_ms, row.p99_ms, row.max_ms)
        numbers = (str(row.tokens), *(f"{ms:.1f}" for ms in times), str(row.loaded))
        table.add_row(row.mode, *numbers, verdict)
    return table


if __name__ == "__main__":
    typer.run(main)
