"""What the tests of the command line share: a small store, and ways to damage it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dualpath_sglang.cli import app
from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_storage import Geometry, Placement, StoreOptions, key_bytes, pieces_of
from dualpath_storage.paths import segment_path

PAGES = 12
KV = Geometry("Tiny:0a1b", "w1", "kv", "float32", 16, 4, 5000, "mha", shard="tp0/2")
INDEXER = Geometry("Tiny:0a1b", "w1", "indexer", "float32", 16, 1, 700, "raw")
OTHER_MODEL = replace(KV, model="Huge:9f9f", shard="")
OTHER_TENANT = replace(KV, namespace="guest")
ALL = (KV, INDEXER, OTHER_MODEL, OTHER_TENANT)
KEYS = [key_bytes(f"page {i}") for i in range(PAGES)]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def dualpath(*arguments: str | Path) -> Outcome:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return Outcome(result.exit_code, result.stdout, result.stderr)


def payload(geometry: Geometry, i: int) -> bytearray:
    return bytearray((geometry.id.encode() + bytes([i])) * geometry.block_bytes)[
        : geometry.block_bytes
    ]


def write(cache: KVCache, geometry: Geometry, numbers: Sequence[int]) -> list[WriteResult]:
    pieces = [pieces_of(memoryview(payload(geometry, i)), geometry) for i in numbers]
    return cache.write(cache.attach(geometry), [KEYS[i] for i in numbers], pieces)


def read(cache: KVCache, geometry: Geometry, numbers: Sequence[int]) -> list[bool]:
    areas = [bytearray(geometry.block_bytes) for _ in numbers]
    pieces = [pieces_of(memoryview(area), geometry) for area in areas]
    good = cache.read(cache.attach(geometry), [KEYS[i] for i in numbers], pieces)
    for area, ok, i in zip(areas, good, numbers, strict=True):
        assert not ok or area == payload(geometry, i)
    return good


def place_of(root: Path, geometry: Geometry, i: int) -> Placement:
    with KVCache(StoreOptions(root, read_only=True)) as cache:
        place = cache.index.lookup(geometry, [KEYS[i]])[0]
    assert place is not None
    return place


def flip(root: Path, geometry: Geometry, i: int, offset: int) -> Placement:
    """Flip a byte, `offset` bytes into the slot of a block."""
    place = place_of(root, geometry, i)
    path = segment_path(root / geometry.id, place.segment)
    with path.open("r+b") as file:
        file.seek(place.slot * geometry.slot_bytes + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    return place


def ask(process: subprocess.Popen[str], expression: str) -> str:
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(expression + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def blocks_by_geometry(root: Path) -> dict[str, int]:
    told = dualpath("status", "--root", root, "--json").json
    return {g["id"]: g["blocks"] for g in told["geometries"]}
