"""``dualpath adopt``: what to do with the segments of a node that is gone for good."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import typer

from dualpath_sglang.cli.shared import (
    ConfigFile,
    Json,
    Root,
    Verbose,
    ago,
    configuration,
    fail,
    many,
    new_table,
    opened,
    plain,
    print_json,
    print_line,
    print_table,
    say,
    size,
)
from dualpath_sglang.index.owners import SegmentOwner
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry
from dualpath_storage.paths import segment_path

ALIVE_S = 30.0
"""A node that was heard of since is not gone: it speaks every few seconds."""
_TIMEOUT_S = 60.0

_Segment: TypeAlias = tuple[bytes, int]


@plain
def adopt(
    node: Annotated[
        str | None,
        typer.Argument(
            help="The node that is gone, as `dualpath status` shows it: HOST:PROCESS, or HOST for "
            "all of a machine. Without it, list who owns segments.",
            show_default=False,
        ),
    ] = None,
    free: Annotated[
        bool, typer.Option("--free", help="Remove its blocks and files instead of keeping them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Give the segments of a node that is gone to the others now, not when its lease is over.

    What is whole in them is published, what is torn is blanked, and then any server takes them
    when it needs room. With --free they are removed.
    """
    config = configuration(root, config_file)
    if config.index == "embedded":
        fail(
            "The index is a file of this machine, where locks say which writer lives: whoever "
            "needs room takes over what dead ones left, and `dualpath verify --repair` does at once"
        )
    with opened(config, write=False, verbose=verbose) as cache:
        owners = cache.index.ownership.owners(_TIMEOUT_S)
        sizes = {name: _size(cache, name) for name in owners}
    if node is None:
        _list(owners, sizes, as_json)
        return
    chosen = {s: o for s, o in owners.items() if node in (o.name, o.node, o.node.partition(":")[0])}
    _check(node, chosen, owners.values())
    if free and not yes:
        _ask(node, sum(sizes[name] for name in chosen), as_json)
    with opened(config, write=True, verbose=verbose) as cache:
        for name in sorted({owner.name for owner in chosen.values()}):
            cache.index.ownership.vacate(name, _TIMEOUT_S)
        found = _settle(cache, set(chosen), free=free)
    if as_json:
        print_json({"root": str(cache.root), "node": node, **found})
        return
    print_line(
        f"{many(len(chosen), 'segment')} of {node}: {found['adopted']:,} taken over, "
        f"{found['removed']:,} removed; {many(found['published_blocks'], 'block')} published, "
        f"{found['removed_blocks']:,} removed."
    )
    if found["locked"]:
        print_line(
            f"{many(found['locked'], 'segment')} still locked on the mount for whoever had them: "
            "taken over by whoever needs room once that ends."
        )


def _check(
    node: str, chosen: Mapping[_Segment, SegmentOwner], owners: Iterable[SegmentOwner]
) -> None:
    """Refuse a node that nobody knows, or that lives."""
    if not chosen:
        names = sorted({owner.node for owner in owners if owner.name})
        there = f"there are: {', '.join(names)}" if names else "nobody owns any"
        fail(f"No node {node} owns segments; {there}")
    silent_s = min(owner.silent_s for owner in chosen.values())
    if silent_s < ALIVE_S:
        fail(f"The node {node} was heard of {silent_s:.0f} s ago: it lives. Stop it first")


def _ask(node: str, taken: int, as_json: bool) -> None:
    question = f"Remove the segments of {node} ({size(taken)}) with all their blocks?"
    if as_json or not sys.stdin.isatty():
        fail(f"{question} Say --yes to do it without being asked")
    if not typer.confirm(question):
        say("Nothing was removed.")
        raise typer.Exit(0)


def _settle(cache: KVCache, names: set[_Segment], *, free: bool) -> dict[str, int]:
    """Take the segments over, and remove them when asked."""
    found = dict.fromkeys(("adopted", "removed", "locked", "published_blocks", "removed_blocks"), 0)
    for geometry in cache.geometries():
        mine = {number for name, number in names if name == geometry.id_bytes}
        if not mine:
            continue
        before = cache.index.counts().get(geometry.id_bytes, 0)
        pool = cache.attach(geometry)
        adopted = mine & set(pool.store.slots.owned())
        found["published_blocks"] += cache.index.counts().get(geometry.id_bytes, 0) - before
        if not free:
            found["adopted"] += len(adopted)
            found["locked"] += len(mine - adopted)
            continue
        freed = cache.index.drop_segments(geometry, mine, _TIMEOUT_S)
        pool.take_back(freed)
        pool.give_up_empty(cache.index, _TIMEOUT_S)
        _unlink(cache, geometry, mine - adopted)
        found["removed"] += len(mine)
        found["removed_blocks"] += len(freed)
    return found


def _unlink(cache: KVCache, geometry: Geometry, numbers: set[int]) -> None:
    """Remove files that a lock of the gone node still holds; should it live, it notices."""
    for number in numbers:
        segment_path(cache.root / geometry.id, number).unlink(missing_ok=True)
    cache.index.forget_segments(geometry.id_bytes, numbers, _TIMEOUT_S)


def _list(
    owners: Mapping[_Segment, SegmentOwner], sizes: Mapping[_Segment, int], as_json: bool
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for segment, owner in owners.items():
        row = rows.setdefault(
            owner.name,
            {"node": owner.node, "segments": 0, "bytes": 0, "silent_s": owner.silent_s},
        )
        row["segments"] += 1
        row["bytes"] += sizes[segment]
    if as_json:
        for row in rows.values():
            row["silent_s"] = _finite(row["silent_s"])
        print_json([rows[name] for name in sorted(rows)])
        return
    table = new_table("node", "segments", "bytes", "heard of", numbers=("segments", "bytes"))
    for name in sorted(rows):
        row = rows[name]
        table.add_row(
            row["node"] or "nobody",
            f"{row['segments']:,}",
            size(row["bytes"]),
            _heard(row["silent_s"]),
        )
    print_table(table)


def _finite(silent_s: float) -> float | None:
    return round(silent_s, 1) if math.isfinite(silent_s) else None


def _heard(silent_s: float) -> str:
    return ago(round(1e6 * (time.time() - silent_s))) if math.isfinite(silent_s) else "-"


def _size(cache: KVCache, name: _Segment) -> int:
    try:
        return segment_path(cache.root / name[0].hex(), name[1]).stat().st_size
    except OSError:
        return 0
