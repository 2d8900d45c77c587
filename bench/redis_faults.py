"""What a lookup costs while Redis, or the network before it, does not do its part.

``python -m bench.redis_faults --json FILE``. Rows: {fault, calls, hits, misses, wrong, failed,
p50_ms, p99_ms, max_ms, wake_p99_ms, pending, recovery_s, blocks_checked}.

| fault | what it is |
|---|---|
| ``none`` | nothing: every lookup must hit, or the figures of the others say nothing |
| ``slow`` | every reply is 200 ms late |
| ``cut`` | connections end in the middle of a reply |
| ``silent`` | half-open: all is taken, nothing comes back |
| ``trickle`` | replies come byte by byte |
| ``refused`` | nobody listens, connections end |
| ``stopped`` | SIGSTOP of the server |
| ``flushed`` | FLUSHALL, again and again: the index is filled anew from the store each time |
| ``full`` | ``maxmemory`` is what is used, ``noeviction``: reads go on, nothing can be published |

Each has a server, a proxy (a process of its own, as a network is) and a cache of its own. One
thread looks up whole chains and a key that was never stored behind them, and must be told the
length of the chain or nothing. Another writes and reads blocks all the while. Then the fault ends,
and everything that is said to be stored must be found again and have the right bytes.

``wake_p99_ms`` is how late the looking thread is when it only sleeps: what the machine, and the
other threads of the process, cost whoever waits for anything.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, median, percentile, write_rows
from bench.redis_bed import CHAIN, DEADLINE_S, Bed, Crashes, Proxy
from tests.support.redis_server import REDIS_SERVER, RedisServer
from tests.support.toxic_proxy import Toxic

MARGIN_S = 0.002
FLUSH_EVERY_S = 2.5
TOXICS = tuple(toxic.value for toxic in Toxic if toxic is not Toxic.NONE)
FAULTS = ("none", *TOXICS, "stopped", "flushed", "full")


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Args:
        calls: lookups, from the beginning of the fault until all is found again.
        wrong: answers that are neither the whole chain nor a miss, and wrong bytes.
        failed: exceptions, in any call and any thread of the cache.
        wake_p99_ms: how late the looking thread woke from its pauses.
        pending: blocks that were stored without the index.
        recovery_s: from the end of the fault until all that is stored was found and read.
        blocks_checked: so many were.
    """

    fault: str
    calls: int
    hits: int
    misses: int
    wrong: int
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    wake_p99_ms: float
    pending: int
    recovery_s: float
    blocks_checked: int


@contextlib.contextmanager
def harmed(fault: str, server: RedisServer, proxy: Proxy) -> Iterator[Callable[[], object]]:
    """The fault, until the end of the context; what it yields is called every now and then."""
    with server.admin() as admin:
        if fault in TOXICS:
            proxy.set(Toxic(fault))
            yield lambda: None
            proxy.set(Toxic.NONE)
        elif fault == "stopped":
            server.stop()
            yield lambda: None
            server.cont()
        elif fault == "flushed":
            yield admin.flushall
            admin.flushall()
        elif fault == "full":
            admin.config_set("maxmemory", admin.info("memory")["used_memory"])
            yield lambda: None
            admin.config_set("maxmemory", 0)
        else:
            yield lambda: None


def measure(fault: str, seconds: float, root: Path, crashes: Crashes) -> Row:
    """One fault, and all that it does to a cache of its own."""
    crashed = crashes.count
    with RedisServer() as server, Proxy(server.port) as proxy:
        bed = Bed(root, proxy.url)
        try:
            bed.recover()  # from its own beginning
            gc.collect()
            gc.freeze()  # or looking through what the bench has made takes 50 ms now and then
            bed.start()
            began = time.monotonic()
            with harmed(fault, server, proxy) as again:
                while (left_s := began + seconds - time.monotonic()) > 0:
                    again()
                    time.sleep(min(left_s, FLUSH_EVERY_S))
            healed = time.monotonic()
            bed.end_writing()
            bed.recover()
            recovery_s = time.monotonic() - healed
        finally:
            bed.close()
            gc.unfreeze()
    return Row(
        fault=fault,
        calls=len(bed.took_ms),
        hits=bed.hits,
        misses=bed.misses,
        wrong=bed.wrong,
        failed=bed.failed + crashes.count - crashed,
        p50_ms=round(median(bed.took_ms), 3),
        p99_ms=round(percentile(bed.took_ms, 0.99), 3),
        max_ms=round(max(bed.took_ms), 3),
        wake_p99_ms=round(percentile(bed.late_ms or [0.0], 0.99), 3),
        pending=bed.pending,
        recovery_s=round(recovery_s, 2),
        blocks_checked=sum(len(keys) for keys in bed.stored),
    )


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="how long each fault lasts")] = 10.0,
    faults: Annotated[str, typer.Option(help="comma-separated")] = ",".join(FAULTS),
    directory: Annotated[
        Path | None, typer.Option("--dir", help="where the stores are put; default: here")
    ] = None,
) -> None:
    """Measure lookups while Redis fails, and the time until all is found again."""
    progress = Console(stderr=True, soft_wrap=True)
    names = faults.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise typer.BadParameter(f"no fault {unknown[0]}; there are {', '.join(FAULTS)}")
    if REDIS_SERVER is None:
        progress.print("redis-server is not installed", style="red")
        raise typer.Exit(1)
    crashes = Crashes()
    for package in ("dualpath_sglang", "dualpath_storage"):
        logging.getLogger(package).addHandler(crashes)
        logging.getLogger(package).propagate = False
    rows: list[Row] = []
    root = directory or Path(__file__).resolve().parents[1]
    try:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=root) as base:
            for name in names:
                rows.append(row := measure(name, seconds, Path(base) / name, crashes))
                progress.print(f"{name}: all found after {row.recovery_s:.1f} s", style="dim")
                if (name == "none") == (row.misses > 0):  # a fault must be one, and none none
                    said = f"{row.misses or 'no'} lookups missed"
                    progress.print(f"{name}: {said}", style="yellow")
    except BenchError as error:
        progress.print(str(error), style="red")
        raise typer.Exit(1) from None
    width = None if Console().is_terminal else 140
    Console(width=width).print(_table(rows, seconds))
    if json is not None:
        write_rows(json, rows)
    if any(row.wrong or row.failed for row in rows):
        raise typer.Exit(1)


def _table(rows: Sequence[Row], seconds: float) -> Table:
    deadline_ms, bar_ms = 1000 * DEADLINE_S, 1000 * (DEADLINE_S + MARGIN_S)
    table = Table(
        title=f"Lookups of {CHAIN + 1} keys while Redis fails for {seconds:g} s",
        caption=f"deadline {deadline_ms:g} ms; p99 may be {bar_ms:g} ms",
    )
    table.add_column("fault")
    for column in ("calls", "hits", "misses", "wrong", "failed", "p50 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="right")
    for column in ("wake p99 ms", "pending", "recovery s", "blocks checked"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = (row.calls, row.hits, row.misses, row.wrong, row.failed)
        table.add_row(
            row.fault,
            *map(str, counts),
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.max_ms:.2f}",
            f"{row.wake_p99_ms:.2f}",
            str(row.pending),
            f"{row.recovery_s:.1f}",
            str(row.blocks_checked),
            style="red" if row.p99_ms > bar_ms or row.wrong or row.failed else None,
        )
    return table


if __name__ == "__main__":
    typer.run(main)
