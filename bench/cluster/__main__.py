"""The command line of :mod:`bench.cluster`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.cluster.bed import Shape, bed
from bench.cluster.driver import Figures, Playing, Reading, run
from bench.cluster.model import MODELS
from bench.cluster.sglang_driver import Asking, ask
from bench.cluster.systems import SYSTEMS
from bench.cluster.workload import KINDS, Trajectory, Turn, generate, load_trace, windows
from bench.measure import BenchError, write_rows
from bench.netns import NetworkError, end_on_sigterm
from dualpath_sglang.qos.rates import parse_rate

ENGINES = {"model": "engine", "sglang": "sglang_engine"}
WORKLOADS = ("bandwidth", "io_bound", "compute_bound", "single")
_MOST_TOKENS = 40_000
_MOST_SHAPE = 64
_AGENT_BLOCKS = 256
"""In the memory of a DE: some hits on their way, and not the store."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system under one workload, see :class:`bench.cluster.driver.Figures`."""

    system: str
    engine: str
    p: int
    d: int
    workload: str
    aggregate_mbit_s: float
    snic_max_avg: float
    jct_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    snic_mbit_s: float
    turns: int
    short_pages: int
    failed: int
    from_memory: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How large workloads are.

    Args:
        trace: of other workloads by name.
    """

    quick: bool
    seed: int
    agents: int
    turns: int
    token_s: float
    trace: Mapping[str, Sequence[Trajectory]]

    def workload(self, name: str, shape: Shape) -> Reading | Playing:
        """By its name.

        Raises:
            BenchError: there is none, or the trace does not suffice for it.
        """
        if name == "bandwidth":
            seconds = 3.0 if self.quick else 12.0
            # Enough readers for a rule that gives each hit to one NIC to use all NICs.
            return Reading("io_bound", 4, 4 if self.quick else 5, 64, seconds)
        if name == "single":
            count = 2 if self.quick else 5
            alone = [Trajectory(f"single{i}", 1 << 14, [Turn(320, 0)]) for i in range(count)]
            return Playing("io_bound", alone, 1, 0.0)
        trace = self.trace.get(name) or generate(KINDS["32k"], 500, self.seed)
        count = self.agents * shape.prefill
        model = "compute_bound" if name == "compute_bound" else "io_bound"
        # Where a turn takes longer, fewer are enough; and a first prompt, which hits nothing,
        # would take longer than all others of a run.
        turns, first = (-(-self.turns // 2), 1) if model == "compute_bound" else (self.turns, 0)
        chosen = windows(trace, count, turns, self.seed, most_tokens=_MOST_TOKENS, first=first)
        memory = _AGENT_BLOCKS * MODELS[model].geometry.block_bytes
        return Playing(model, chosen, count, self.token_s, memory)


def shapes_of(text: str, storage_bit_s: float, ratio: float) -> list[Shape]:
    """Out of ``1x1,2x4``.

    Raises:
        BenchError: that is not what it is.
    """
    shapes = []
    for pair in text.split(","):
        p, _, d = pair.strip().partition("x")
        if not (p.isdecimal() and d.isdecimal() and int(p) and int(d)):
            raise BenchError(f"Hosts are given as PxD, at least one of each, unlike {pair!r}")
        if int(p) + int(d) > _MOST_SHAPE:
            raise BenchError(f"{pair} is more than one machine can play")
        shapes.append(Shape(int(p), int(d), storage_bit_s, ratio))
    return shapes


def names_of(text: str, known: Sequence[str], what: str) -> list[str]:
    """Out of a list with commas.

    Raises:
        BenchError: one is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise BenchError(f"There is no {what} {name}; there are {', '.join(known)}")
    return names


def row_of(system: str, engine: str, shape: Shape, workload: str, found: Figures) -> Row:
    """Rounded."""
    return Row(
        system=system,
        engine=engine,
        p=shape.prefill,
        d=shape.decode,
        workload=workload,
        aggregate_mbit_s=round(found.aggregate_mbit_s, 1),
        snic_max_avg=round(found.snic_max_avg, 3),
        jct_s=round(found.jct_s, 3),
        ttft_p50_s=round(found.ttft(0.5), 4),
        ttft_p99_s=round(found.ttft(0.99), 4),
        snic_mbit_s=round(found.snic_mbit_s, 1),
        turns=len(found.ttft_s),
        short_pages=found.short_pages,
        failed=found.failed,
        from_memory=found.from_memory,
    )


def table_of(rows: Sequence[Row], rate: str) -> Table:
    """For people."""
    table = Table(title=f"Storage NICs of {rate}")
    columns = ("workload", "hosts", "system", "landed Mbit/s", "SNICs Mbit/s", "SNIC max/avg")
    for column in (*columns, "JCT s", "TTFT p50 s", "p99 s", "in DEs", "failed"):
        left = column in ("workload", "hosts", "system")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            row.workload if row.engine == "model" else f"{row.workload} ({row.engine})",
            f"{row.p}P{row.d}D",
            row.system,
            f"{row.aggregate_mbit_s:.0f}",
            f"{row.snic_mbit_s:.0f}",
            f"{row.snic_max_avg:.2f}",
            f"{row.jct_s:.1f}",
            f"{row.ttft_p50_s:.3f}",
            f"{row.ttft_p99_s:.3f}",
            str(row.from_memory),
            str(row.failed),
        )
    return table


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    systems: Annotated[str, typer.Option(help=f"of {', '.join(SYSTEMS)}")] = ",".join(SYSTEMS),
    pd: Annotated[str, typer.Option(help="prefill x decode hosts")] = "1x1,1x2,2x4",
    workloads: Annotated[
        str, typer.Option(help=f"of {', '.join(WORKLOADS)}, trace (see --trace)")
    ] = ",".join(WORKLOADS),
    trace: Annotated[
        Path | None, typer.Option(help="play trajectories of this file: the workload trace")
    ] = None,
    storage_rate: Annotated[str, typer.Option(help="of a storage NIC")] = "200mbit",
    compute_ratio: Annotated[
        float, typer.Option(min=0.1, help="of a compute NIC's rate to a storage NIC's")
    ] = 8.0,
    agents: Annotated[int | None, typer.Option(min=1, help="for each prefill host")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="of each agent")] = None,
    decode_ms: Annotated[float, typer.Option(min=0, help="of a generated token")] = 2.0,
    engine: Annotated[
        str, typer.Option(help=f"of {', '.join(ENGINES)}; sglang plays the workload single on xP1")
    ] = "model",
    seed: Annotated[int, typer.Option(help="of the trajectories")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="seconds, for a first look")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="where the store is put; default: /tmp")
    ] = None,
) -> None:
    """Measure the second path in a cluster of network namespaces. Needs root."""
    end_on_sigterm()
    console = Console(stderr=True)
    try:
        rate = parse_rate(storage_rate)
        shapes = shapes_of(pd, rate, compute_ratio)
        chosen = names_of(systems, SYSTEMS, "system")
        loads = names_of(workloads, [*WORKLOADS, "trace"], "workload")
        if "trace" in loads and trace is None:
            raise BenchError("The workload trace needs a file: --trace FILE")
        traces = {} if trace is None else {"trace": load_trace(trace)}
        if trace is not None and "trace" not in loads:
            loads.append("trace")
        plan = Plan(
            quick, seed, agents or (3 if quick else 12), turns or (2 if quick else 6),
            decode_ms / 1000, traces,
        )  # fmt: skip
        where = directory or Path(tempfile.gettempdir())
        (kind,) = names_of(engine, list(ENGINES), "engine")
        if kind == "sglang":
            rows = measure_sglang(plan, shapes, chosen, where, console)
        else:
            rows = measure(plan, shapes, chosen, loads, where, console)
    except (BenchError, NetworkError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    width = None if Console().is_terminal else 140
    Console(width=width).print(table_of(rows, storage_rate))
    if json is not None:
        write_rows(json, rows)
    if any(row.failed for row in rows):
        console.print("Some hits could not be loaded", style="red")
        raise typer.Exit(1)


def measure(
    plan: Plan,
    shapes: Sequence[Shape],
    systems: Sequence[str],
    workloads: Sequence[str],
    directory: Path,
    console: Console,
) -> list[Row]:
    """Every system under every workload, each in hosts of its own.

    Raises:
        BenchError, NetworkError: one could not be run.
    """
    rows = []
    with console.status("starting") as status:
        for shape in shapes:
            for name in workloads:
                workload = plan.workload(name, shape)
                for system in systems:
                    if system == "oracle" and isinstance(workload, Reading):
                        continue  # it reads nothing
                    progress = _progress(status.update, f"{name} {shape.name} {system}")
                    progress("starting the hosts")
                    memory = workload.agent_bytes
                    with bed(shape, workload.model, system, directory, memory) as hosts:
                        found = run(workload, hosts, progress)
                    row = row_of(system, "model", shape, name, found)
                    rows.append(row)
                    console.print(
                        f"{name} {shape.name} {system}: {row.aggregate_mbit_s:.0f} Mbit/s, "
                        f"JCT {row.jct_s:.1f} s",
                        style="dim",
                    )
    return rows


def measure_sglang(
    plan: Plan,
    shapes: Sequence[Shape],
    systems: Sequence[str],
    directory: Path,
    console: Console,
) -> list[Row]:
    """Every system with a real server as the PE, one request at a time; their answers are alike.

    Raises:
        BenchError, NetworkError: one could not be run, or was answered otherwise.
    """
    rows: list[Row] = []
    answers: Sequence[str] = ()
    with console.status("starting") as status:
        for shape in shapes:
            if shape.prefill != 1:
                raise BenchError("One machine has room for one real server: hosts are 1xD")
            for system in systems:
                progress = _progress(status.update, f"sglang {shape.name} {system}")
                progress("starting the hosts, and a server")
                nodes = shape.decode if system in ("dualpath", "split") else 0
                work = Asking(2 if plan.quick else 5, 2400, 160, nodes)
                played = replace(shape, engine=ENGINES["sglang"])
                with bed(played, "io_bound", system, directory, 256 << 20) as hosts:
                    found, texts = ask(work, hosts, progress)
                if answers and list(texts) != list(answers):
                    raise BenchError(f"{system} was answered {texts}, and others {answers}")
                answers = texts
                rows.append(row_of(system, "sglang", shape, "single", found))
                console.print(
                    f"sglang {shape.name} {system}: TTFT {rows[-1].ttft_p50_s:.2f} s", style="dim"
                )
    return rows


def _progress(update: Callable[[str], None], what: str) -> Callable[[str], None]:
    return lambda text: update(f"{what}: {text}")


if __name__ == "__main__":
    typer.run(main)
