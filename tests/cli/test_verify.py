"""`dualpath verify` on damaged stores, and beside a running writer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dualpath_sglang.audit import Audit
from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_storage import StoreOptions
from dualpath_storage.paths import segment_path
from tests.cli.stores import (
    ALL,
    INDEXER,
    KEYS,
    KV,
    OTHER_MODEL,
    OTHER_TENANT,
    PAGES,
    ask,
    dualpath,
    flip,
    place_of,
    read,
    write,
)


def test_a_sound_store_verifies(root: Path) -> None:
    shown = dualpath("verify", "--root", root)
    assert shown.status == 0
    assert "48 blocks: 48 good, 0 damaged" in shown.out
    told = dualpath("verify", "--root", root, "--json").json
    assert (told["blocks"], told["checked_blocks"], told["damaged"]) == (48, 48, [])
    assert told["checked_bytes"] == PAGES * sum(g.block_bytes for g in ALL)


@pytest.mark.parametrize(
    ("offset", "reason", "layers"),
    [(4096 + 2 * KV.layer_bytes + 17, "checksum", [2]), (40, "header", []), (4090, "header", [])],
    ids=["payload", "key in header", "checksum of header"],
)
def test_a_flipped_byte_is_named(root: Path, offset: int, reason: str, layers: list[int]) -> None:
    place = flip(root, KV, 5, offset)
    shown = dualpath("verify", "--root", root)
    assert shown.status == 1
    (line,) = [line for line in shown.out.splitlines() if line.startswith("damaged")]
    for word in (KEYS[5].hex(), KV.id, f"{place.segment:08x}", f"slot {place.slot}", reason):
        assert word in line
    told = dualpath("verify", "--root", root, "--json")
    assert told.status == 1
    (damage,) = told.json["damaged"]
    assert damage["key"] == KEYS[5].hex()
    assert damage["geometry"] == KV.id
    assert (damage["segment"], damage["slot"]) == (f"{place.segment:08x}", place.slot)
    assert (damage["reason"], damage["bad_layers"]) == (reason, layers)


def test_a_reused_slot_a_cut_and_a_lost_segment_are_told_apart(root: Path) -> None:
    first, second = place_of(root, KV, 0), place_of(root, KV, 1)
    path = segment_path(root / KV.id, first.segment)
    assert second.segment == first.segment
    raw = bytearray(path.read_bytes())
    size = KV.slot_bytes
    raw[first.slot * size : (first.slot + 1) * size] = raw[
        second.slot * size : (second.slot + 1) * size
    ]
    path.write_bytes(raw)
    cut = place_of(root, OTHER_MODEL, PAGES - 1)
    path = segment_path(root / OTHER_MODEL.id, cut.segment)
    os.truncate(path, cut.slot * OTHER_MODEL.slot_bytes + 5000)
    for path in (root / OTHER_TENANT.id).glob("seg-*"):
        path.unlink()
    shutil.rmtree(root / INDEXER.id)
    told = dualpath("verify", "--root", root, "--json")
    assert told.status == 1
    reasons: dict[str, set[str]] = {}
    for damage in told.json["damaged"]:
        reasons.setdefault(damage["geometry"], set()).add(damage["reason"])
    assert reasons == {
        KV.id: {"generation"},
        OTHER_MODEL.id: {"short"},
        OTHER_TENANT.id: {"missing"},
        INDEXER.id: {"missing"},
    }


def test_repair_takes_the_damaged_pages_out_and_they_can_be_stored_again(root: Path) -> None:
    flip(root, KV, 5, 4096)
    flip(root, OTHER_MODEL, 7, 100)
    repaired = dualpath("verify", "--repair", "--root", root, "--json")
    assert repaired.status == 0
    assert repaired.json["repaired_blocks"] == 2
    clean = dualpath("verify", "--root", root, "--json")
    assert clean.status == 0
    assert (clean.json["blocks"], clean.json["damaged"]) == (46, [])
    with KVCache(StoreOptions(root, capacity_bytes=64 << 20)) as cache:
        assert read(cache, KV, [4, 5, 6]) == [True, False, True]
        assert write(cache, KV, [5]) == [WriteResult.STORED]
        assert read(cache, KV, [5]) == [True]


def test_repair_of_a_lost_directory_leaves_the_rest(root: Path) -> None:
    shutil.rmtree(root / OTHER_TENANT.id)
    assert dualpath("verify", "--root", root).status == 1
    assert dualpath("verify", "--root", root, "--repair").status == 0
    told = dualpath("verify", "--root", root, "--json")
    assert told.status == 0
    assert told.json["blocks"] == 36


def test_an_unreadable_geometry_is_named(root: Path) -> None:
    (root / INDEXER.id / "geometry.json").write_text("{")
    shown = dualpath("verify", "--root", root)
    assert shown.status == 1
    assert f"{root / INDEXER.id} holds no readable geometry" in shown.out
    assert shown.out.count(": geometry (") == PAGES


def test_verify_without_an_index_checks_what_stands_in_the_store(root: Path) -> None:
    flip(root, KV, 3, 4096 + 11)
    (root / "index.lmdb").unlink()
    told = dualpath("verify", "--root", root, "--json")
    assert told.status == 1
    assert "missing" in told.json["index_problem"]
    assert (told.json["blocks"], told.json["damaged_blocks"]) == (48, 1)
    repaired = dualpath("verify", "--repair", "--root", root, "--json")
    assert repaired.status == 0
    assert dualpath("verify", "--root", root).status == 0


def test_a_header_that_the_index_does_not_know_is_counted_and_is_no_damage(root: Path) -> None:
    with KVCache(StoreOptions(root, capacity_bytes=64 << 20)) as cache:
        place = cache.index.lookup(KV, [KEYS[2]])[0]
        assert place is not None
        cache.index.remove(KV, [(KEYS[2], place.generation)], 1.0)
    told = dualpath("verify", "--root", root, "--json")
    assert told.status == 0
    assert (told.json["blocks"], told.json["unindexed_blocks"]) == (47, 1)


def test_a_block_that_moves_during_the_check_is_no_damage(root: Path) -> None:
    with KVCache(StoreOptions(root, capacity_bytes=64 << 20)) as cache:
        audit = Audit(cache)
        moved = False

        def move() -> None:
            nonlocal moved
            if not moved:
                moved = True
                cache.clear(units={KV.unit})
                write(cache, KV, range(PAGES))

        damages = list(audit.run(move))
    assert moved
    assert damages == []


def test_verify_finds_damage_beside_a_running_writer(
    root: Path, running: subprocess.Popen[str]
) -> None:
    flip(root, KV, 1, 4096)
    assert dualpath("verify", "--root", root).status == 1
    assert dualpath("verify", "--root", root, "--repair").status == 0
    assert ask(running, "read(cache, KV, [0, 1, 2])") == "[True, False, True]"
    assert "STORED" in ask(running, "write(cache, KV, [1])")
    assert dualpath("verify", "--root", root).status == 0
