"""`dualpath scan` and `dualpath clear`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import StoreOptions
from tests.cli.stores import (
    ALL,
    INDEXER,
    KV,
    OTHER_MODEL,
    OTHER_TENANT,
    PAGES,
    ask,
    blocks_by_geometry,
    dualpath,
    read,
)


@pytest.mark.parametrize("damage", ["sound", "deleted", "zeroed", "cut", "no index at all"])
def test_scan_finds_every_block(root: Path, damage: str) -> None:
    index = root / "index.lmdb"
    if damage == "deleted":
        index.unlink()
    elif damage == "zeroed":
        index.write_bytes(bytes(index.stat().st_size))
    elif damage == "cut":
        os.truncate(index, 5000)
    elif damage == "no index at all":
        index.write_text("nothing of the kind")
    shown = dualpath("scan", "--root", root)
    assert shown.status == 0, shown.err
    assert "48 blocks found" in shown.out
    with KVCache(StoreOptions(root, capacity_bytes=64 << 20)) as cache:
        for geometry in ALL:
            assert all(read(cache, geometry, range(PAGES)))


def test_scan_beside_a_running_writer(root: Path, running: subprocess.Popen[str]) -> None:
    told = dualpath("scan", "--root", root, "--json")
    assert told.status == 0
    assert told.json["blocks"] == 48
    # The writer notices at its next call, and takes the new index up within a second or so.
    for _ in range(100):
        if ask(running, "all(read(cache, KV, range(12)))") == "True":
            break
        ask(running, "__import__('time').sleep(0.1)")
    else:
        pytest.fail("the running writer did not take up the new index")
    assert ask(running, "cache.clear(namespace='guest')") == "12"
    assert "STORED" in ask(running, "write(cache, OTHER_TENANT, [0])")
    assert dualpath("status", "--root", root, "--json").json["geometries"][-1]["blocks"] == 1


def test_clear_empties_its_own_namespace_alone(root: Path) -> None:
    before = dualpath("status", "--root", root, "--json").json["space"]["used_bytes"]
    told = dualpath("clear", "--yes", "--root", root, "--json")
    assert told.status == 0
    assert told.json["removed_blocks"] == 36
    left = blocks_by_geometry(root)
    assert left == {KV.id: 0, INDEXER.id: 0, OTHER_MODEL.id: 0, OTHER_TENANT.id: 12}
    assert told.json["used_bytes"] < before
    # What was cleared does not come back when the index is made anew.
    assert dualpath("scan", "--root", root, "--json").json["blocks"] == 12


def test_clear_of_another_namespace_and_of_one_model(root: Path) -> None:
    shown = dualpath("clear", "-y", "-n", "guest", "--root", root)
    assert shown.out == "Removed 12 blocks in the namespace guest.\n"
    shown = dualpath("clear", "-y", "--model", "Tiny", "--root", root)
    assert shown.out == "Removed 24 blocks of Tiny in the namespace default.\n"
    assert blocks_by_geometry(root)[OTHER_MODEL.id] == PAGES


def test_clear_refuses_what_is_not_there(root: Path) -> None:
    outcome = dualpath("clear", "-y", "-n", "nobody", "--root", root)
    assert outcome.status == 2
    assert "nobody; there are: default, guest" in outcome.err
    outcome = dualpath("clear", "-y", "-m", "Medium", "--root", root)
    assert outcome.status == 2
    assert "Huge:9f9f, Tiny:0a1b" in outcome.err
    assert sum(blocks_by_geometry(root).values()) == 48


def test_clear_without_yes_removes_nothing_when_nobody_can_answer(root: Path) -> None:
    outcome = dualpath("clear", "--root", root)
    assert outcome.status == 2
    assert "Remove 36 blocks" in outcome.err
    assert "--yes" in outcome.err
    assert sum(blocks_by_geometry(root).values()) == 48


def test_clear_beside_a_running_writer(root: Path, running: subprocess.Popen[str]) -> None:
    assert dualpath("clear", "-y", "--root", root, "--json").json["removed_blocks"] == 36
    assert ask(running, "read(cache, KV, [0, 1])") == "[False, False]"
    assert "STORED" in ask(running, "write(cache, KV, range(12))")
    assert dualpath("verify", "--root", root).status == 0
