"""``dualpath sizing``: how many prefill nodes to how many decode nodes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dualpath_sglang.cli.shared import (
    Json,
    fail,
    new_table,
    plain,
    print_json,
    print_line,
    print_table,
)
from dualpath_sglang.qos.rates import parse_rate
from dualpath_sglang.scheduling.bounds import Bounds, Load, Machine, bounds, loads
from dualpath_sglang.sizes import parse_size

EXIT_NOT_BALANCED = 1


@plain
def sizing(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    cnic: Annotated[
        str, typer.Option(metavar="RATE", help="One GPU's compute NIC, one direction.")
    ] = "400gbit",
    snic: Annotated[
        str, typer.Option(metavar="RATE", help="The storage NICs of a node together.")
    ] = "400gbit",
    dram: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="DRAM bandwidth of a node, bytes a second, both ways together."
        ),
    ] = "500GB",
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill nodes, to check.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode nodes, to check.")] = None,
    as_json: Json = False,
) -> None:
    """Say for which ratio of prefill to decode nodes all storage NICs can be used in full.

    Beside that range a compute NIC, or DRAM, is the limit before storage is. With --prefill and
    --decode the ratio of a cluster is checked; the exit status is then 1 when it is outside.
    """
    if (prefill is None) != (decode is None):
        fail("To check a cluster say both, --prefill and --decode")
    machine = Machine(gpus, _rate(snic) / 8, _rate(cnic) / 8, _bytes(dram))
    found = bounds(machine)
    used = () if prefill is None or decode is None else loads(machine, prefill, decode)
    if as_json:
        print_json(_json(found, used))
    else:
        _print(found, used, prefill, decode)
    if any(not load.holds for load in used):
        raise typer.Exit(EXIT_NOT_BALANCED)


def _rate(text: str) -> int:
    try:
        return parse_rate(text)
    except ValueError as error:
        fail(str(error))


def _bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size <= 0:
        fail(f'A bandwidth of DRAM is a size a second such as "500GB", unlike {text!r}')
    return size


def _json(found: Bounds, used: tuple[Load, ...]) -> dict[str, Any]:
    return {
        "least": _finite(found.least),
        "most": _finite(found.most),
        "possible": found.possible,
        "binds_below": list(found.binds_below),
        "binds_above": list(found.binds_above),
        "constraints": [
            {"resource": c.resource, "least": _finite(c.least), "most": _finite(c.most)}
            for c in found.constraints
        ],
        "loads": [{**asdict(load), "holds": load.holds} for load in used],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _print(found: Bounds, used: tuple[Load, ...], prefill: int | None, decode: int | None) -> None:
    by_name = {load.resource: load for load in used}
    numbers = ("least P/D", "most P/D", *(("used",) if used else ()))
    table = new_table("resource", *numbers, numbers=numbers)
    for constraint in found.constraints:
        cells = [constraint.resource, _ratio(constraint.least), _ratio(constraint.most)]
        if used:
            load = by_name[constraint.resource]
            cells.append(f"{load.used:.0%}" + ("" if load.holds else " !"))
        table.add_row(*cells)
    print_table(table)
    if not found.possible:
        print_line("With such nodes there is no ratio for which storage is the limit.")
    else:
        print_line(
            f"P/D from {_ratio(found.least)} ({_names(found.binds_below)}) to "
            f"{_ratio(found.most)} ({_names(found.binds_above)})."
        )
    if used:
        failing = [load.resource for load in used if not load.holds]
        print_line(
            f"{prefill} prefill and {decode} decode nodes: "
            + (f"the limit is {_names(tuple(failing))}." if failing else "balanced.")
        )


def _ratio(value: float) -> str:
    if value <= 0 or not math.isfinite(value):
        return "-"
    return f"{value:.3g}"


def _names(resources: tuple[str, ...]) -> str:
    return " and ".join(resources) or "nothing"
