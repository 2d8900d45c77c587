"""``dualpath verify``, ``scan`` and ``clear``: check a store, mend it, empty it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dualpath_sglang.audit import Audit, Damage
from dualpath_sglang.cli.shared import (
    EXIT_DAMAGE,
    REASONS,
    ConfigFile,
    Json,
    Root,
    Verbose,
    ask,
    configuration,
    many,
    opened,
    plain,
    print_json,
    print_line,
    size,
)
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry, StoreError

_OPEN_LOCK_S = 60.0


@plain
def verify(
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Take damaged blocks out of the index, and settle what killed writers left.",
        ),
    ] = False,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read every block that the index calls present, and every header; name what is damaged.

    A damaged block is never served: it is a miss, and is stored again when it is next computed.
    """
    began = time.monotonic()
    with opened(configuration(root, config_file), write=repair, verbose=verbose) as cache:
        if repair:
            for geometry in cache.geometries():
                cache.attach(geometry)  # takes the segments of dead writers, and settles them
        audit = Audit(cache)
        damages = []
        with _progress(audit) as advance:
            for damage in audit.run(advance):
                damages.append(damage)
                if not as_json:
                    print_line(_sentence(damage))
        repaired = audit.repair(damages) if repair and damages else 0
        tally = audit.tally
        bad = len(audit.unreadable) + tally.late_blocks
        bad += 0 if repair else len(damages) + (audit.index_problem is not None)
        if as_json:
            print_json(
                {
                    "root": str(cache.root),
                    "index_problem": audit.index_problem,
                    **asdict(tally),
                    "repaired_blocks": repaired,
                    "damaged": [_row(damage) for damage in damages],
                    "unreadable": [str(directory) for directory in audit.unreadable],
                    "seconds": round(time.monotonic() - began, 3),
                }
            )
        else:
            _summarize(audit, repaired, repair, time.monotonic() - began)
    if bad:
        raise typer.Exit(EXIT_DAMAGE)


@contextmanager
def _progress(audit: Audit) -> Iterator[Any]:
    """A bar on the terminal, nothing in a pipe; yields what to call as the tally changes."""
    console = Console(stderr=True)
    columns = (
        TextColumn("checking"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks, {task.fields[read]}, {task.fields[bad]} damaged"),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed would not reach the pipe
    ) as bar:
        task = bar.add_task("checking", total=None, read="0 B", bad=0)

        def advance() -> None:
            tally = audit.tally
            done = tally.checked_blocks + tally.damaged_blocks + tally.vanished_blocks
            bar.update(
                task,
                total=tally.blocks,
                completed=done + tally.late_blocks,
                read=size(tally.checked_bytes),
                bad=tally.damaged_blocks,
            )

        yield advance


def _row(damage: Damage) -> dict[str, Any]:
    place, geometry = damage.placement, damage.geometry
    return {
        "key": damage.key.hex(),
        "geometry": damage.geometry_id,
        "namespace": None if geometry is None else geometry.namespace,
        "model": None if geometry is None else geometry.model,
        "pool": None if geometry is None else geometry.pool,
        "shard": None if geometry is None else geometry.shard,
        "segment": f"{place.segment:08x}",
        "slot": place.slot,
        "generation": place.generation,
        "reason": damage.reason,
        "bad_layers": list(damage.layers),
    }


def _sentence(damage: Damage) -> str:
    geometry, place = damage.geometry, damage.placement
    pool = "" if geometry is None else f" {geometry.pool}"
    shard = f" {geometry.shard}" if geometry is not None and geometry.shard else ""
    layers = f", layer {', '.join(map(str, damage.layers))}" if damage.layers else ""
    return (
        f"damaged  {damage.key.hex()}{pool}{shard}, geometry {damage.geometry_id}, "
        f"segment {place.segment:08x}, slot {place.slot}: {damage.reason}{layers} "
        f"({REASONS.get(damage.reason, damage.reason)})"
    )


def _summarize(audit: Audit, repaired: int, repair: bool, seconds: float) -> None:
    tally = audit.tally
    if audit.index_problem is not None:
        print_line(f"{audit.index_problem}: checked what stands in the segments instead.")
    print_line(
        f"{many(tally.blocks, 'block')}: {tally.checked_blocks:,} good, "
        f"{tally.damaged_blocks:,} damaged; read {size(tally.checked_bytes)} in {seconds:.1f} s."
    )
    if tally.vanished_blocks:
        print_line(f"{many(tally.vanished_blocks, 'block')} went away meanwhile, as they may.")
    if tally.late_blocks:
        print_line(f"{many(tally.late_blocks, 'block')} could not be read in time.")
    if tally.unindexed_blocks:
        print_line(
            f"{many(tally.unindexed_blocks, 'header')} of the store not in the index (freed, in "
            "writing, or left by a killed writer): never served."
        )
    for directory in audit.unreadable:
        print_line(f"{directory} holds no readable geometry: restore geometry.json or remove it.")
    if repair and tally.damaged_blocks:
        print_line(f"Repaired: {many(repaired, 'block')} taken out of the index.")
    elif tally.damaged_blocks:
        print_line(
            "A damaged block is a miss and is stored again when it is next computed; "
            "`dualpath verify --repair` takes it out of the index now."
        )


@plain
def scan(
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make the index anew from what stands in the segments. Servers go on, and take it up.

    What they store meanwhile is forgotten, and stored again when it is next computed.
    """
    began = time.monotonic()
    config = configuration(root, config_file)
    with opened(config, write=False, verbose=verbose) as cache:
        if config.read_only:
            raise StoreError("The configuration says read_only, so nothing is changed")
        try:
            config.index_source().rebuild(cache.root, cache.stores, timeout_s=_OPEN_LOCK_S)
        except IndexUnavailableError as error:
            raise StoreError(str(error)) from error
    with opened(config, write=False, verbose=verbose) as cache:
        counts = cache.index.counts()
        geometries: list[dict[str, Any]] = [
            {"id": g.id, "model": g.model, "pool": g.pool, "blocks": counts.get(g.id_bytes, 0)}
            for g in cache.geometries()
        ]
        total = sum(counts.values())
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {
                "root": str(cache.root),
                "blocks": total,
                "geometries": geometries,
                "seconds": round(seconds, 3),
            }
        )
        return
    for row in geometries:
        print_line(f"{row['id'][:8]}  {row['model']}, {row['pool']}: {row['blocks']:,}")
    print_line(f"{many(total, 'block')} found; the index was made anew in {seconds:.1f} s.")


@plain
def clear(
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Whose blocks; the configured one by default.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Only this model, named as `dualpath status` shows it.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Remove every block of one namespace, or of one model in it. Asks first."""
    config = configuration(root, config_file)
    namespace = config.namespace if namespace is None else namespace
    with opened(config, write=False, verbose=verbose) as cache:
        chosen = _chosen(cache, namespace, model)
        counts = cache.index.counts()
        blocks = sum(counts.get(g.id_bytes, 0) for g in chosen)
        taken = sum(counts.get(g.id_bytes, 0) * g.slot_bytes for g in chosen)
    of_model = "" if model is None else f" of {model}"
    if not yes:
        question = (
            f"Remove {many(blocks, 'block')} ({size(taken)}){of_model} in the namespace "
            f"{namespace} from {cache.root}?"
        )
        ask(question, as_json=as_json)
    with opened(config, write=True, verbose=verbose) as cache:
        removed = cache.clear(namespace=namespace, units={g.unit for g in chosen})
        left = cache.index.counts()
        still = sum(left.get(g.id_bytes, 0) for g in chosen)
        used_bytes = cache.stats().used_bytes
    if as_json:
        print_json(
            {
                "root": str(cache.root),
                "namespace": namespace,
                "model": model,
                "removed_blocks": removed,
                "left_blocks": still,
                "used_bytes": used_bytes,
            }
        )
    else:
        print_line(f"Removed {many(removed, 'block')}{of_model} in the namespace {namespace}.")
        if still:
            print_line(f"{many(still, 'block')} stored meanwhile, or not removable now, are left.")


def _chosen(cache: KVCache, namespace: str, model: str | None) -> list[Geometry]:
    """The geometries to clear.

    Raises:
        StoreError: there is no such namespace or model.
    """
    geometries = cache.geometries()
    chosen = [g for g in geometries if g.namespace == namespace]
    if not chosen:
        names = sorted({g.namespace for g in geometries})
        there = f"there are: {', '.join(names)}" if names else "it is empty"
        raise StoreError(f"The store has nothing in the namespace {namespace}; {there}")
    if model is None:
        return chosen
    matching = [g for g in chosen if model in (g.model, g.model.partition(":")[0])]
    if not matching:
        names = sorted({g.model for g in chosen})
        raise StoreError(
            f"The namespace {namespace} has nothing of the model {model}; "
            f"there are: {', '.join(names)}"
        )
    return matching
