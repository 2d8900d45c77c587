"""The same pages through SGLang's storage interface, by backend, beside what the machine can do.

``python -m bench.backend --json FILE``; docs/benchmarks.md says what the rows mean.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.huge_pages import huge_pages
from bench.measure import write_rows
from bench.pages import Case, prepare_sglang

if TYPE_CHECKING:
    from bench.rounds import Contest, Row

# Llama-3.2-1B with pages of 64 and of 4 tokens.
_MODEL = {"layers": 16, "heads": 8, "head_dim": 64}
CASES = (
    Case("2MiB", pages=256, page_tokens=64, **_MODEL),
    Case("128KiB", pages=2048, page_tokens=4, **_MODEL),
)
EXISTS_COUNTS = {"2MiB": (256,), "128KiB": (256, 2048, 16384)}

_STORE_BYTES = 16384 * 132 * 1024  # of each backend's largest store

TARGETS = (
    ("2MiB", "set_durable", "share", 0.85),
    ("2MiB", "get_cold", "share", 0.90),
    ("128KiB", "set_durable", "share", 0.70),
    ("128KiB", "get_cold", "share", 0.80),
    ("2MiB", "set_durable", "cpu_s_per_gb", 0.15),
    ("2MiB", "get_cold", "cpu_s_per_gb", 0.15),
    ("128KiB", "exists_16384", "p50_ms", 15.0),
)
"""What dualpath is meant to reach: at least for shares, at most for the others."""


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of everybody")] = 5,
    systems: Annotated[str, typer.Option(help="backends, comma-separated")] = (
        "dualpath,file,nixl,lmcache"
    ),
    cases: Annotated[str, typer.Option(help="cases, comma-separated")] = "2MiB,128KiB",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="where the stores are put; default: in this repository"),
    ] = None,
    huge: Annotated[
        bool, typer.Option("--huge-pages/--no-huge-pages", help="for SGLang's host pool")
    ] = True,
    scale: Annotated[int, typer.Option(min=1, help="divide the number of pages, to try out")] = 1,
) -> None:
    """Measure storage backends against the disk and memcpy, round by round."""
    console = Console(stderr=True, soft_wrap=True)
    chosen = [case for case in CASES if case.name in cases.split(",")]
    names = systems.split(",")
    _quieten_peers()
    prepare_sglang()
    from bench.systems import OPENERS, why_missing

    unknown = [name for name in names if name not in OPENERS]
    if unknown or not chosen:
        raise typer.BadParameter(
            f"systems are {', '.join(OPENERS)}; cases are {', '.join(c.name for c in CASES)}"
        )
    for name in list(names):
        reason = why_missing(name)
        if reason is not None:
            console.print(f"{name} is left out, it is not installed: {reason}")
            names.remove(name)
    root = directory or Path(__file__).resolve().parents[1]
    rows: list[Row] = []
    failed: dict[str, str] = {}
    pool_bytes = 2 * max(case.total_bytes for case in chosen) // scale if huge else 0
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=root) as base,
        huge_pages(pool_bytes) as enough,
    ):
        console.print(f"the host pool lies in {'huge' if enough else 'small'} pages", style="dim")
        need = len(names) * max(16384 * 131072, 2 * 512 << 20) // scale
        stat = os.statvfs(base)
        if stat.f_bavail * stat.f_frsize < need:
            raise typer.BadParameter(
                f"{root} has less than the {need / 1e9:.0f} GB that are needed"
            )
        for case in chosen:
            contest = _contest(case, names, Path(base), scale, console)
            try:
                contest.populate()
                for number in range(rounds):
                    contest.round(number)
                rows += contest.rows()
                failed |= contest.failed
            finally:
                contest.close()
    Console().print(*_tables(rows, rounds), sep="\n")
    if json is not None:
        write_rows(json, rows)
    if "dualpath" in failed:
        raise typer.Exit(1)


def _quieten_peers() -> None:
    """Peers log every page that is missing; here some are asked for to see them miss."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="sglang")


def _contest(case: Case, names: Sequence[str], base: Path, scale: int, console: Console) -> Contest:
    from bench.rounds import Contest

    small = replace(case, pages=max(2, case.pages // scale))
    counts = [max(2, count // scale) for count in EXISTS_COUNTS[case.name]]
    directory = base / case.name
    directory.mkdir()
    return Contest(small, names, directory, counts, lambda line: console.print(line, style="dim"))


def _tables(rows: Sequence[Row], rounds: int) -> list[Table]:
    table = Table(title=f"Medians of {rounds} rounds; share of the limit in the same round")
    for column in ("case", "op", "system", "GB/s", "share", "p50 ms", "p99 ms", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("case", "op", "system") else "right")
    for row in sorted(rows, key=lambda r: (r.case != CASES[0].name, r.op, -(r.gb_s or 0))):
        table.add_row(
            row.case,
            row.op,
            f"[bold]{row.system}[/bold]" if row.system == "dualpath" else row.system,
            _text(row.gb_s, 2),
            "" if row.share is None else f"{row.share:.0%}",
            _text(row.p50_ms, 2),
            _text(row.p99_ms, 2),
            _text(row.cpu_s_per_gb, 3),
        )
    targets = Table(title="Targets of dualpath")
    for column in ("case", "op", "figure", "target", "reached", ""):
        targets.add_column(column)
    own = {(r.case, r.op): r for r in rows if r.system == "dualpath"}
    for case, op, figure, target in TARGETS:
        value = getattr(own[case, op], figure) if (case, op) in own else None
        if value is not None:
            met = value >= target if figure == "share" else value <= target
            sign = ">=" if figure == "share" else "<="
            targets.add_row(
                case, op, figure, f"{sign} {target}", f"{value:.3g}", "met" if met else "MISSED"
            )
    return [table, targets]


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    typer.run(main)
