"""``dualpath adopt``: what to do with the segments of a node that is gone for good."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from dualpath_sglang.cli.shared import (
    ConfigFile,
    Json,
    Root,
    Verbose,
    ago,
    ask,
    configuration,
    fail,
    many,
    new_table,
    opened,
    plain,
    print_json,
    print_line,
    print_table,
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
            help="The node that is gone, as this command lists it, or HOST:PROCESS, or HOST for "
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
    if node is None and free:
        fail("Say whose segments are to be removed")
    with opened(config, write=False, verbose=verbose) as cache:
        owners = cache.index.ownership.owners(_TIMEOUT_S)
        sizes = {name: _size(cache, name) for name in owners}
    if node is None:
        _list(owners, sizes, as_json)
        return
    chosen = _chosen(node, owners)
    if free and not yes:
        taken = sum(sizes[s] for s, owner in owners.items() if owner.name in chosen)
        question = f"Remove the segments of {node} ({size(taken)}) with all their blocks?"
        ask(question, as_json=as_json)
    with opened(config, write=True, verbose=verbose) as cache:
        inherited: list[_Segment] = []
        for name in chosen:
            # It is asked once more: it may have woken up, or others may have been faster.
            inherited += cache.index.ownership.inherit(name, ALIVE_S, _TIMEOUT_S) or []
        found = _settle(cache, set(inherited), free=free)
    if as_json:
        print_json({"root": str(cache.root), "node": node, **found})
        return
    print_line(
        f"{many(len(inherited), 'segment')} of {node}: {found['adopted']:,} taken over, "
        f"{found['removed']:,} removed; {many(found['published_blocks'], 'block')} published, "
        f"{found['removed_blocks']:,} removed."
    )
    if found["locked"]:
        print_line(
            f"{many(found['locked'], 'segment')} still locked on the mount: taken over by whoever "
            "needs room once that ends."
        )


def _chosen(node: str, owners: Mapping[_Segment, SegmentOwner]) -> list[str]:
    """The owners that are meant and gone. Refuses a node that nobody knows, or that lives."""
    meant = {o.name: o for o in owners.values() if o.name and node in _names(o)}
    if not meant:
        names = sorted({owner.name for owner in owners.values() if owner.name})
        there = f"there are: {', '.join(names)}" if names else "nobody owns any"
        fail(f"No node {node or '(no name)'} owns segments; {there}")
    gone = sorted(name for name, owner in meant.items() if owner.silent_s >= ALIVE_S)
    if not gone:
        silent_s = min(owner.silent_s for owner in meant.values())
        fail(f"The node {node} was heard of {silent_s:.0f} s ago: it lives. Stop it first")
    return gone


def _names(owner: SegmentOwner) -> tuple[str, str, str]:
    """All that an owner answers to."""
    return owner.name, owner.node, owner.node.rpartition(":")[0]


def _settle(cache: KVCache, names: set[_Segment], *, free: bool) -> dict[str, int]:
    """Settle segments that are this process's now, and remove them when asked."""
    found = dict.fromkeys(("adopted", "removed", "locked", "published_blocks", "removed_blocks"), 0)
    index = cache.index
    for geometry in cache.geometries():
        mine = {number for name, number in names if name == geometry.id_bytes}
        if not mine:
            continue
        before = index.counts().get(geometry.id_bytes, 0)
        pool = cache.attach(geometry)
        adopted = mine & set(pool.store.slots.owned())
        found["published_blocks"] += max(0, index.counts().get(geometry.id_bytes, 0) - before)
        if free:
            freed = index.drop_segments(geometry, mine, _TIMEOUT_S)
            pool.take_back(freed)
            found["removed_blocks"] += len(freed)
            found["removed"] += pool.give_up_empty(index, _TIMEOUT_S)
            found["removed"] += _unlink(cache, geometry, mine - adopted)
            continue
        found["adopted"] += len(adopted)
        found["locked"] += len(mine - adopted)
        index.ownership.give_up(geometry.id_bytes, sorted(mine - adopted), _TIMEOUT_S)
    return found


def _unlink(cache: KVCache, geometry: Geometry, numbers: set[int]) -> int:
    """Remove files that a lock of the gone node still holds; how many."""
    removed = 0
    for number in numbers:
        path = segment_path(cache.root / geometry.id, number)
        removed += path.exists()
        path.unlink(missing_ok=True)
    cache.index.forget_segments(geometry.id_bytes, numbers, _TIMEOUT_S)
    return removed


def _list(
    owners: Mapping[_Segment, SegmentOwner], sizes: Mapping[_Segment, int], as_json: bool
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for segment, owner in owners.items():
        row = rows.setdefault(
            owner.name,
            {"node": owner.name, "segments": 0, "bytes": 0, "silent_s": owner.silent_s},
        )
        row["segments"] += 1
        row["bytes"] += sizes[segment]
    if as_json:
        for row in rows.values():
            row["silent_s"] = _finite(row["silent_s"])
        print_json({"owners": [rows[name] for name in sorted(rows)]})
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
