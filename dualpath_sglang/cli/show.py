"""``dualpath status`` and ``dualpath inspect``: look without touching."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dualpath_sglang.audit import examine
from dualpath_sglang.cli.shared import (
    REASONS,
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
from dualpath_sglang.index import Entry, IndexUnavailableError
from dualpath_sglang.index.recovery import INDEX_FILE
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import NO_PARENT, BlockStore, Geometry
from dualpath_storage.owners import owners
from dualpath_storage.paths import segment_path, segment_paths

_SHOWN_KEYS = 10


@plain
def status(
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            "-w",
            min=0.1,
            max=86400,
            metavar="SECONDS",
            help="Again and again, until Ctrl-C.",
        ),
    ] = None,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show what is in the store: space, index, blocks by model and pool, and who writes."""
    with opened(configuration(root, config_file), write=False, verbose=verbose) as cache:
        while True:
            found = _status(cache)
            if watch is not None and sys.stdout.isatty():
                Console().clear()
            if as_json:
                print_json(found, line=watch is not None)
            else:
                _print_status(found)
            if watch is None:
                return
            sys.stdout.flush()
            time.sleep(watch)


def _print_status(found: dict[str, Any]) -> None:
    space, index = found["space"], found["index"]
    used = space["used_bytes"] / max(1, space["capacity_bytes"])
    print_line(f"store     {found['root']}")
    print_line(
        f"space     {size(space['used_bytes'])} of {size(space['capacity_bytes'])} ({used:.0%}) "
        f"in segments; {size(space['free_bytes'])} of {size(space['file_system_bytes'])} free "
        "on the file system"
    )
    print_line(
        f"index     {index['kind']}{', ' + size(index['bytes']) if index['bytes'] else ''}"
        if index["problem"] is None
        else f"index     {index['problem']}: a server rebuilds it at start, `dualpath scan` now"
    )
    writers = ", ".join(f"{pid} ({many(n, 'segment')})" for pid, n in found["writers"].items())
    print_line(f"writers   {'process ' + writers if writers else 'none seen on this machine'}")
    _print_nodes(found["nodes"])
    geometries = found["geometries"]
    print_line(f"blocks    {sum(g['blocks'] for g in geometries):,}")
    if geometries:
        print_line("")
        _print_geometries(geometries)


def _print_nodes(nodes: dict[str, Any]) -> None:
    if not nodes:
        return
    numbers = ("rank", "up", "to read", "memory", "segments", "pending", "version")
    table = new_table("node", "address", "role", *numbers, numbers=numbers)
    for node in nodes.values():  # another version may tell less
        queued = size(node.get("read_queue_bytes", 0))
        table.add_row(
            f"{node['host']}:{node['pid']}",
            node.get("address", ""),
            node["role"],
            str(node["rank"]),
            f"{node['up_s']:,.0f} s",
            f"{queued}, {node.get('read_queue_tokens', 0):,} tokens",
            _memory(node),
            f"{node.get('segments', 0):,}",
            f"{node.get('pending_blocks', 0):,}",
            node["version"],
        )
    print_table(table)
    print_line("")


def _memory(node: dict[str, Any]) -> str:
    """What an agent keeps for others; a server keeps nothing."""
    if "memory_bytes" not in node:
        return "-"
    return f"{size(node.get('cached_bytes', 0))} of {size(node['memory_bytes'])}"


def _print_geometries(rows: list[dict[str, Any]]) -> None:
    numbers = ("tokens", "block", "blocks", "segments", "last used")
    table = new_table(
        *("geometry", "namespace", "model", "weights", "pool", "shard", "dtype"),
        *numbers,
        numbers=numbers,
    )
    for row in rows:
        table.add_row(
            row["id"][:8],
            *(row[name] for name in ("namespace", "model", "weights", "pool")),
            row["shard"] or "-",
            row["dtype"],
            str(row["page_tokens"]),
            size(row["block_bytes"]),
            f"{row['blocks']:,}",
            f"{row['segments']:,}",
            ago(row["last_used_us"]),
        )
    print_table(table)


def _status(cache: KVCache) -> dict[str, Any]:
    problem = None
    blocks: dict[bytes, int] = {}
    used_us: dict[bytes, int] = {}
    nodes: dict[str, Any] = {}
    kind, index_bytes = "embedded", 0
    try:
        index = cache.index
        kind = index.name
        nodes = {name: dict(fields) for name, fields in index.nodes().items()}
        blocks = index.counts()
        for (geometry_id, _), when in index.segment_uses().items():
            used_us[geometry_id] = max(used_us.get(geometry_id, 0), when)
        index_bytes = _allocated_bytes(cache.root / INDEX_FILE)
    except IndexUnavailableError as error:
        problem = str(error)
    stats = cache.stats()
    mount = os.statvfs(cache.root)
    writers: Counter[int] = Counter()
    geometries = []
    for geometry in sorted(cache.geometries(), key=lambda g: (g.namespace, g.model, g.pool, g.id)):
        segments = segment_paths(cache.root / geometry.id)
        writers.update(owners(segments).values())
        geometries.append(
            {
                **_describe(geometry),
                "blocks": blocks.get(geometry.id_bytes, 0),
                "bytes": blocks.get(geometry.id_bytes, 0) * geometry.slot_bytes,
                "segments": len(segments),
                "last_used_us": used_us.get(geometry.id_bytes, 0),
            }
        )
    return {
        "root": str(cache.root),
        "space": {
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "free_bytes": mount.f_bavail * mount.f_frsize,
            "file_system_bytes": mount.f_blocks * mount.f_frsize,
        },
        "index": {"kind": kind, "bytes": index_bytes, "problem": problem},
        "nodes": nodes,
        "writers": {str(pid): count for pid, count in sorted(writers.items())},
        "geometries": geometries,
    }


def _describe(geometry: Geometry) -> dict[str, Any]:
    return {
        "id": geometry.id,
        "namespace": geometry.namespace,
        "model": geometry.model,
        "weights": geometry.weights,
        "pool": geometry.pool,
        "shard": geometry.shard,
        "dtype": geometry.dtype,
        "form": geometry.form,
        "page_tokens": geometry.page_tokens,
        "layers": geometry.layers,
        "layer_bytes": geometry.layer_bytes,
        "block_bytes": geometry.block_bytes,
    }


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


@plain
def inspect(
    key: Annotated[
        str, typer.Argument(help="Key of a page, 64 hex digits, or the first few of them.")
    ],
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show a page: every pool and shard of it, where it lies, and whether its bytes are good."""
    wanted = key.lower().removeprefix("0x")
    if not wanted or len(wanted) > 64 or set(wanted) - set("0123456789abcdef"):
        fail(f"A key is made of up to 64 hex digits, unlike {key!r}")
    with opened(configuration(root, config_file), write=False, verbose=verbose) as cache:
        entries = list(cache.index.entries())
        found = [entry for entry in entries if entry.key.hex().startswith(wanted)]
        keys = sorted({entry.key.hex() for entry in found})
        if not found:
            fail(f"No page in the index of {cache.root} has a key that begins with {wanted}")
        if len(keys) > 1:
            for other in keys[:_SHOWN_KEYS]:
                say(other)
            fail(f"{wanted} is the beginning of {many(len(keys), 'key')}; say more of it")
        pages = [
            _page(cache, unit, [e for e in found if e.unit == unit], entries)
            for unit in sorted({entry.unit for entry in found})
        ]
    if as_json:
        print_json({"key": keys[0], "pages": pages})
        return
    print_line(f"key       {keys[0]}")
    for page in pages:
        _print_page(page)


def _page(cache: KVCache, unit: bytes, found: list[Entry], entries: list[Entry]) -> dict[str, Any]:
    key, parent = found[0].key, found[0].parent
    children = {e.key.hex() for e in entries if e.unit == unit and e.parent == key}
    blocks = []
    left = {entry.geometry_id: entry for entry in found}
    for store in cache.stores():
        entry = left.pop(store.geometry.id_bytes, None)
        if entry is not None:
            blocks.append(_block(store, entry))
    return {
        "parent": None if parent == NO_PARENT else parent.hex(),
        "children": sorted(children),
        "last_used_us": max(entry.last_used_us for entry in found),
        "blocks": blocks,
        "lost_geometries": sorted(geometry_id.hex() for geometry_id in left),
    }


def _block(store: BlockStore, entry: Entry) -> dict[str, Any]:
    geometry, place = store.geometry, entry.placement
    seen = examine(store, entry)
    return {
        "geometry": geometry.id,
        **{name: value for name, value in _describe(geometry).items() if name != "id"},
        "segment": f"{place.segment:08x}",
        "slot": place.slot,
        "generation": place.generation,
        "written_us": place.generation // 1000,
        "file": str(segment_path(store.directory, place.segment)),
        "offset": place.slot * geometry.slot_bytes,
        "status": seen.status.value,
        "bad_layers": [i for i, good in enumerate(seen.layers) if not good],
        "checksums": [] if seen.header is None else [f"{c:016x}" for c in seen.header.checksums],
    }


def _print_page(page: dict[str, Any]) -> None:
    blocks = page["blocks"]
    print_line("")
    if blocks:
        first = blocks[0]
        print_line(f"model     {first['model']}, weights {first['weights']}")
        print_line(f"tenant    {first['namespace']}, pages of {first['page_tokens']} tokens")
    print_line(f"parent    {page['parent'] or 'none known'}")
    print_line(f"children  {', '.join(page['children']) or 'none'}")
    print_line(f"used      {ago(page['last_used_us'])}")
    for block in blocks:
        print_line("")
        print_line(f"  pool      {block['pool']}, {block['dtype']}, {block['form']}")
        print_line(f"  shard     {block['shard'] or 'none'}")
        print_line(f"  geometry  {block['geometry']}")
        print_line(f"  place     segment {block['segment']}, slot {block['slot']}")
        print_line(f"  file      {block['file']}, at byte {block['offset']}")
        print_line(f"  written   {ago(block['written_us'])}, generation {block['generation']}")
        print_line(f"  bytes     {_verdict(block)}")
    for geometry_id in page["lost_geometries"]:
        print_line("")
        print_line(f"  geometry  {geometry_id}: its directory is gone or cannot be read")


def _verdict(block: dict[str, Any]) -> str:
    what = f"{many(block['layers'], 'layer')} of {block['layer_bytes']:,} bytes"
    if block["status"] == "ok":
        return f"{what}, every checksum is right"
    if block["bad_layers"]:
        bad = ", ".join(str(layer) for layer in block["bad_layers"])
        return f"{what}, DAMAGED: wrong checksum of layer {bad}"
    return f"{what}, DAMAGED: {REASONS.get(block['status'], block['status'])}"
