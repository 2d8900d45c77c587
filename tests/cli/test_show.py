"""`dualpath status`, `inspect`, `config`, and how every command begins and ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.stores import (
    ALL,
    INDEXER,
    KEYS,
    KV,
    PAGES,
    blocks_by_geometry,
    dualpath,
    flip,
    payload,
)


def test_status_tells_models_pools_and_blocks(root: Path) -> None:
    shown = dualpath("status", "--root", root)
    assert shown.status == 0
    assert re.search(r"blocks +48\n", shown.out)
    for word in ("Tiny:0a1b", "Huge:9f9f", "guest", "indexer", "tp0/2"):
        assert word in shown.out
    told = dualpath("status", "--root", root, "--json").json
    assert {g["id"]: g["blocks"] for g in told["geometries"]} == {g.id: PAGES for g in ALL}
    assert told["index"]["problem"] is None
    assert 0 < told["space"]["used_bytes"] <= told["space"]["capacity_bytes"]


def test_status_names_the_writers(root: Path, running: subprocess.Popen[str]) -> None:
    told = dualpath("status", "--root", root, "--json").json
    assert list(told["writers"]) == [str(running.pid)]


def test_looking_changes_no_file(root: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = [p for p in root.rglob("*") if p.is_file() and not p.name.endswith("-lock")]
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}

    before = state()
    for command in (["status"], ["verify"], ["inspect", KEYS[0].hex()], ["config"]):
        assert dualpath(*command, "--root", root).status == 0
    assert state() == before


def test_status_without_an_index_says_so(root: Path) -> None:
    (root / "index.lmdb").unlink()
    shown = dualpath("status", "--root", root)
    assert shown.status == 0
    assert "missing or damaged" in shown.out
    assert not (root / "index.lmdb").exists()


@pytest.mark.parametrize(
    "command",
    [["status"], ["verify"], ["verify", "--repair"], ["scan"], ["clear", "-y"], ["inspect", "00"]],
    ids=" ".join,
)
def test_no_command_makes_a_store(tmp_path: Path, command: list[str]) -> None:
    missing = tmp_path / "missing"
    outcome = dualpath(*command, "--root", missing)
    assert outcome.status == 2
    assert outcome.err.startswith("dualpath: There is no store at")
    assert not missing.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert dualpath(*command, "--root", empty).status == 2
    assert list(empty.iterdir()) == []


def test_inspect_shows_every_pool_and_shard_of_a_page(root: Path) -> None:
    told = dualpath("inspect", KEYS[4].hex(), "--root", root, "--json")
    assert told.status == 0
    pages = told.json["pages"]
    assert sorted(len(page["blocks"]) for page in pages) == [1, 1, 2]
    for page in pages:
        assert page["parent"] == KEYS[3].hex()
        assert page["children"] == [KEYS[5].hex()]
    (both,) = [page for page in pages if len(page["blocks"]) == 2]
    assert {block["pool"] for block in both["blocks"]} == {"kv", "indexer"}
    for block in both["blocks"]:
        raw = Path(block["file"]).read_bytes()[block["offset"] :]
        geometry = {"kv": KV, "indexer": INDEXER}[block["pool"]]
        assert raw[4096 : 4096 + geometry.block_bytes] == payload(geometry, 4)
        assert (block["status"], block["bad_layers"]) == ("ok", [])


def test_inspect_takes_the_beginning_of_a_key_and_names_bad_layers(root: Path) -> None:
    flip(root, KV, 4, 4096 + KV.layer_bytes + 3)
    shown = dualpath("inspect", KEYS[4].hex()[:8].upper(), "--root", root)
    assert shown.status == 0
    assert KEYS[4].hex() in shown.out
    assert "DAMAGED: wrong checksum of layer 1" in shown.out
    assert shown.out.count("every checksum is right") == 3


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("00" * 32, "No page in the index of"),
        ("hello", "up to 64 hex digits"),
        ("0" * 65, "up to 64 hex digits"),
    ],
)
def test_inspect_of_no_key(root: Path, key: str, sentence: str) -> None:
    outcome = dualpath("inspect", key, "--root", root)
    assert outcome.status == 2
    assert sentence in outcome.err


def test_inspect_of_an_ambiguous_key_lists_the_candidates(root: Path) -> None:
    firsts = [key.hex()[0] for key in KEYS]
    twice = next(digit for digit in firsts if firsts.count(digit) > 1)
    outcome = dualpath("inspect", twice, "--root", root)
    assert outcome.status == 2
    assert outcome.err.count("\n") == firsts.count(twice) + 1


def test_config_tells_values_and_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dualpath.toml"
    file.write_text('capacity = "10GiB"\nio_threads = 3\n')
    monkeypatch.setenv("DUALPATH_IO_THREADS", "5")
    told = dualpath("config", "-c", file, "-r", tmp_path / "s", "--json").json
    assert told["root"] == {"value": str(tmp_path / "s"), "source": "command line"}
    assert told["io_threads"] == {"value": 5, "source": "environment, DUALPATH_IO_THREADS"}
    assert told["capacity"] == {"value": 10 << 30, "source": f"file, {file}"}
    assert told["durability"]["source"] == "default"
    shown = dualpath("config", "-c", file)
    assert re.search(r"capacity +10.0 GiB +file", shown.out)


def test_the_root_may_come_from_the_environment_or_a_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dualpath.toml"
    file.write_text(f'root = "{root}"\n')
    assert dualpath("status", "--config", file).status == 0
    monkeypatch.setenv("DUALPATH_ROOT", str(root))
    assert dualpath("verify").status == 0


def test_a_read_only_configuration_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALPATH_READ_ONLY", "true")
    assert dualpath("verify", "-r", root).status == 0
    for command in (["verify", "--repair"], ["scan"], ["clear", "-y"]):
        outcome = dualpath(*command, "-r", root)
        assert outcome.status == 2
        assert "read_only" in outcome.err
    assert sum(blocks_by_geometry(root).values()) == 48


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["status", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["status", "--color"], "--color"),
        (["stats"], "stats"),
        (["inspect"], "inspect --help"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(arguments: list[str], word: str) -> None:
    outcome = dualpath(*arguments)
    assert outcome.status == 2
    assert word in outcome.err


def test_a_misspelt_setting_is_refused_with_the_nearest_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALPATH_CAPACTY", "1GiB")
    outcome = dualpath("status", "-r", root)
    assert outcome.status == 2
    assert '"capacity"' in outcome.err


def test_help_and_version() -> None:
    assert re.fullmatch(r"dualpath \d+\.\d+\.\d+\S*\n", dualpath("--version").out)
    for command in ("status", "verify", "scan", "clear", "inspect", "config"):
        assert dualpath(command, "--help").status == 0


def test_it_runs_as_a_program(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dualpath_sglang.cli", "verify", "-r", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "48 good" in done.stdout
