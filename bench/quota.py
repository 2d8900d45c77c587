"""What a compute quota does for short prompts that come while long ones are computed.

``python -m bench.quota --json FILE``. Real SGLang servers on the CPU, each in its own mode, with
the same requests at the same times, in turns: two long prompts at once, and short ones while they
are computed. The profile is made first, on this machine, by the sweep of ``dualpath profile``.

| ``mode`` | prefill batches |
|---|---|
| ``off`` | SGLang's: at most ``--chunk`` tokens |
| ``paper`` | and at most the quota, first come first served |
| ``share`` | and a long prompt in parts leaves half of each batch to short ones behind it |

SGLang's torch_native backend computes a request's whole context for every chunk of it, which no
GPU backend does; ``tests/support/slim_extend.py`` stands in for it, unless ``--stock``.

| row field | meaning |
|---|---|
| ``short_p50_s``, ``short_p99_s`` | time to the first token of short prompts, over all rounds |
| ``long_s`` | the same of long ones, mean |
| ``tokens_s`` | prompt tokens a second, first request to last answer, median of rounds |
| ``cpu_tokens_s`` | prompt tokens a second of the server's CPU time, best of the rounds |
| ``work_s`` | predicted attention time of all batches, a round: what the cuts cost, without noise |
| ``error`` | median relative error of the predicted attention time over all batches |
| ``worst_s`` | largest predicted attention time of a batch |
| ``over_s`` | how far that lies over the quota |
| ``page_s`` | what one page more costs at the longest context |
"""

from __future__ import annotations

import contextlib
import http.client
import json as json_format
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, percentile, write_rows
from dualpath_sglang.prefill import sweep
from dualpath_sglang.prefill.profile import Profile
from dualpath_sglang.prefill.trace import Batch, read_batches, read_header
from dualpath_sglang.scheduling.quota import Work
from tests.support import slim_extend, tiny_model
from tests.support.server import Server, random_tokens

MODES = ("off", "paper", "share")
_SHARES = {"paper": "0", "share": "0.5"}
_PATIENCE_S = 600.0
_PAGE = 16
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Row:
    """See the module."""

    mode: str
    quota_s: float
    shorts: int
    short_p50_s: float
    short_p99_s: float
    long_s: float
    tokens_s: float
    cpu_tokens_s: float
    work_s: float
    batches: int
    error: float
    worst_s: float
    over_s: float
    page_s: float


@dataclass(slots=True)
class Seen:
    """What one mode has shown so far."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    cpu_tokens_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and when it is sent."""

    prompt: list[int]
    at_s: float
    long: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """How large everything is."""

    long_tokens: int
    chunk: int
    shorts: int
    layers: int
    quota_s: float


class Bench:
    """Servers of all modes, and the requests for them."""

    def __init__(self, folder: Path, shape: Shape, *, stock: bool) -> None:
        self._folder = folder
        self._shape = shape
        self._env = {} if stock else dict(slim_extend.ENVIRONMENT)
        self._model = tiny_model.cached_model(
            folder / "models", "qwen3", 0, num_hidden_layers=shape.layers
        )
        self._seeds = random.Random(7)
        self._alone = 0

    def _server(self, name: str, **settings: str) -> Server:
        slots = 2 * self._shape.long_tokens + 512 * self._shape.shorts
        flags = [
            *("--max-total-tokens", str(slots), "--max-running-requests", "128"),
            *("--chunked-prefill-size", str(self._shape.chunk), "--page-size", str(_PAGE)),
            "--sleep-on-idle",
        ]
        trace = self._trace(name)
        env = {"DUALPATH_PREFILL_TRACE": str(trace), **self._env, **settings}
        return Server(self._model, flags, env=env, log=self._folder / f"{name}.log")

    def _trace(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def profile(self, say: Callable[[str], None]) -> Path:
        """Measure the attention of the model here."""
        with self._server("profile") as server:
            header = read_header(self._trace("profile"))
            if header is None:
                raise BenchError("the server writes no trace")
            points = sweep.run(
                server.url,
                header,
                self._trace("profile"),
                rounds=2,
                most_tokens=self._shape.long_tokens + 512,
                say=lambda done, total: (
                    say(f"profile: {done} of {total}") if done % 30 == 0 else None
                ),
                timeout_s=_PATIENCE_S,
            )
        made, _ = sweep.fitted(header, points)
        say(f"profile: median error on held-out batches {made.error:.1%}, p90 {made.error_p90:.1%}")
        path = self._folder / "profile.json"
        made.save(path)
        self._profile = made
        return path

    def run(self, rounds: int, say: Callable[[str], None]) -> tuple[list[Row], Profile]:
        """All modes, in turns."""
        path = self.profile(say)
        seen = {mode: Seen() for mode in MODES}
        with contextlib.ExitStack() as stack:
            servers = {}
            for mode in MODES:
                settings = {}
                if mode in _SHARES:
                    settings = {
                        "DUALPATH_PREFILL_QUOTA_S": str(self._shape.quota_s),
                        "DUALPATH_PREFILL_QUOTA_SHARE": _SHARES[mode],
                        "DUALPATH_PREFILL_PROFILE": str(path),
                    }
                servers[mode] = stack.enter_context(self._server(mode, **settings))
            alone = [Request(r.prompt, 0.0, r.long) for r in self._requests(0.0) if r.long]
            window_s = self._play(servers["off"], alone, Seen())
            self._alone = len(read_batches(self._trace("off")))
            say(f"the long prompts alone take {window_s:.1f} s")
            for number in range(rounds):
                requests = self._requests(0.8 * window_s)
                order = MODES[number % 3 :] + MODES[: number % 3]
                for mode in order:
                    took = self._play(servers[mode], requests, seen[mode])
                    each = seen[mode].cpu_tokens_s[-1]
                    say(f"round {number + 1}, {mode}: {took:.1f} s, {each:.0f} tokens a CPU second")
        return [self._row(mode, seen[mode]) for mode in MODES], self._profile

    def _requests(self, window_s: float) -> list[Request]:
        def prompt(tokens: int) -> list[int]:
            return random_tokens(tokens, self._seeds.randrange(1 << 40))

        shape = self._shape
        longs = [Request(prompt(shape.long_tokens), 0.0, long=True) for _ in range(2)]
        times = sorted(self._seeds.uniform(0.1, max(window_s, 0.2)) for _ in range(shape.shorts))
        lengths = [self._seeds.randrange(32, 257) for _ in times]
        return longs + [
            Request(prompt(n), t, long=False) for n, t in zip(lengths, times, strict=True)
        ]

    def _play(self, server: Server, requests: Sequence[Request], seen: Seen) -> float:
        """Send all of it at its times; returns the seconds to the last answer."""
        server.flush()
        cpu = _cpu_s(server)
        began = time.monotonic()
        results: list[tuple[Request, float]] = []
        failures: list[Exception] = []

        def ask(request: Request) -> None:
            try:
                time.sleep(max(0.0, began + request.at_s - time.monotonic()))
                results.append((request, _first_token_s(server, request.prompt)))
            except Exception as error:  # noqa: BLE001 -- told below
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(r,), daemon=True) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        if failures or len(results) < len(requests):
            raise BenchError(f"{len(requests) - len(results)} requests failed: {failures[:1]}")
        took = time.monotonic() - began
        tokens = sum(len(r.prompt) for r in requests)
        seen.short_s += [s for r, s in results if not r.long]
        seen.long_s += [s for r, s in results if r.long]
        seen.tokens_s.append(tokens / took)
        seen.cpu_tokens_s.append(tokens / (_cpu_s(server) - cpu))
        return took

    def _row(self, mode: str, seen: Seen) -> Row:
        model, shape = self._profile.model, self._shape
        batches = [b for b in read_batches(self._trace(mode)) if b.attention_s]
        predicted = [model.predict(b.requests) for b in batches]
        first = self._alone if mode == "off" else 0
        longest = Work(shape.long_tokens - _PAGE, _PAGE)
        worst = max(predicted)
        return Row(
            mode=mode,
            quota_s=shape.quota_s if mode in _SHARES else 0.0,
            shorts=len(seen.short_s),
            short_p50_s=percentile(seen.short_s, 0.5),
            short_p99_s=percentile(seen.short_s, 0.99),
            long_s=statistics.mean(seen.long_s),
            tokens_s=statistics.median(seen.tokens_s),
            cpu_tokens_s=max(seen.cpu_tokens_s),
            work_s=sum(predicted[first:]) / len(seen.tokens_s),
            batches=len(batches),
            error=statistics.median(_errors(batches, predicted)),
            worst_s=worst,
            over_s=max(0.0, worst - shape.quota_s) if mode in _SHARES else 0.0,
            page_s=model.request(longest) + model.batch_s,
        )


def _errors(batches: Sequence[Batch], predicted: Sequence[float]) -> list[float]:
    return [
        abs(p - b.attention_s) / b.attention_s
        for p, b in zip(predicted, batches, strict=True)
        if b.attention_s
    ]


def _cpu_s(server: Server) -> float:
    """CPU seconds of all processes of a server so far."""
    total = 0.0
    for pid in server.pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _first_token_s(server: Server, prompt: Sequence[int]) -> float:
    """Seconds until a streaming client has the first token; returns when the answer is whole."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_PATIENCE_S)
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    first = None
    began = time.monotonic()
    with contextlib.closing(connection):
        connection.request("POST", "/generate", json_format.dumps(body), _JSON)
        for line in connection.getresponse():
            if line.startswith(b"data: {") and first is None:
                first = time.monotonic() - began
    if first is None:
        raise BenchError("a request has no answer")
    return first


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    quota: Annotated[float, typer.Option(min=0.001, help="seconds of attention a batch")] = 0.9,
    long_tokens: Annotated[int, typer.Option(min=512, max=16000)] = 12000,
    chunk: Annotated[int, typer.Option(min=64, help="SGLang's --chunked-prefill-size")] = 2048,
    shorts: Annotated[int, typer.Option(min=1, help="short prompts a round")] = 40,
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 4,
    stock: Annotated[bool, typer.Option("--stock", help="torch_native as it is")] = False,
) -> None:
    """Measure what a compute quota does for short prompts beside long ones."""
    console = Console(stderr=True, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="dualpath-bench-"))
    try:
        bench = Bench(folder, Shape(long_tokens, chunk, shorts, layers, quota), stock=stock)
        rows, profile = bench.run(rounds, lambda line: console.print(line, style="dim"))
    except BenchError as error:
        console.print(str(error), style="red")
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    out = Console()
    out.print(_table(rows))
    out.print(
        f"Profile: {profile.points} batches; over {profile.held_out} held out, median error "
        f"{profile.error:.1%} (target: 15 %), p90 {profile.error_p90:.1%}"
    )
    if json is not None:
        write_rows(json, rows)


def _table(rows: Sequence[Row]) -> Table:
    off = rows[0]
    table = Table(title="Short prompts beside two long ones: time to the first token")
    columns = ("mode", "short p50 s", "short p99 s", "long s", "tokens/s", "tokens/CPU s", "work s")
    for column in (*columns, "batches", "error", "worst batch s", "over quota s", ""):
        table.add_column(column, justify="left" if column in ("mode", "") else "right")
    for row in rows:
        verdict = ""
        if row.mode == "share":
            goals = {
                "p99 -25 %": row.short_p99_s <= 0.75 * off.short_p99_s,
                "throughput -3 %": row.cpu_tokens_s >= 0.97 * off.cpu_tokens_s,
                "error 15 %": row.error <= 0.15,
                "one page over": row.over_s <= row.page_s,
            }
            verdict = ", ".join(f"{k}: {'met' if ok else 'MISSED'}" for k, ok in goals.items())
        figures = (row.short_p50_s, row.short_p99_s, row.long_s)
        table.add_row(
            row.mode,
            *(f"{value:.2f}" for value in figures),
            f"{row.tokens_s:.0f} ({row.tokens_s / off.tokens_s:.2f})",
            f"{row.cpu_tokens_s:.0f} ({row.cpu_tokens_s / off.cpu_tokens_s:.2f})",
            f"{row.work_s:.2f} ({row.work_s / off.work_s:.2f})",
            str(row.batches),
            f"{row.error:.1%}",
            f"{row.worst_s:.3f}",
            f"{row.over_s:.4f}",
            verdict,
        )
    return table


if __name__ == "__main__":
    typer.run(main)
