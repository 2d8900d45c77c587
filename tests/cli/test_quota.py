"""``dualpath quota``: shown, set, taken away, and refused when it makes no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_storage.quotas import QUOTAS_FILE, read_quotas
from tests.cli.stores import ALL

Run = Callable[..., "subprocess.CompletedProcess[str]"]
NAMES = sorted({geometry.namespace for geometry in ALL})


@pytest.fixture
def dualpath(root: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dualpath_sglang.cli", "quota", *arguments, "-r", str(root)],
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_without_quotas_the_usage_is_shown(dualpath: Run) -> None:
    shown = dualpath("--json")
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(shown.stdout)["namespaces"]
    assert [row["namespace"] for row in rows] == NAMES
    assert all(row["used_bytes"] > 0 and row["quota_bytes"] is None for row in rows)


def test_a_quota_is_set_changed_and_taken_away(dualpath: Run, root: Path) -> None:
    name = NAMES[0]
    assert dualpath(name, "64GiB").returncode == 0
    assert read_quotas(root) == {name: 64 << 30}
    shown = dualpath("tenant of the future", "1000")
    assert "64.0 GiB" in shown.stdout
    assert read_quotas(root) == {name: 64 << 30, "tenant of the future": 1000}
    rows = json.loads(dualpath(name, "none", "--json").stdout)["namespaces"]
    assert {row["namespace"]: row["quota_bytes"] for row in rows} == {
        **dict.fromkeys(NAMES),
        "tenant of the future": 1000,
    }
    assert not list(root.glob(f".{QUOTAS_FILE}*"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a",), "Say how much the namespace a may take"),
        (("a", "much"), "unlike 'much'"),
        (("a", "--", "-5"), "unlike '-5'"),
        (("a", "50%"), "unlike '50%'"),
        (("a", "10,000GiB"), "unlike '10,000GiB'"),
        (("", "5GiB"), "has a name"),
    ],
)
def test_what_makes_no_sense_is_refused(
    dualpath: Run, root: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    root_option = ("-r", str(root))
    command = [sys.executable, "-m", "dualpath_sglang.cli", "quota", *root_option, *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2, refused.stdout
    assert sentence in refused.stderr
    assert read_quotas(root) == {}


def test_a_file_that_is_none_of_ours_is_not_overwritten(dualpath: Run, root: Path) -> None:
    texts = ("not json", '{"a": "much"}', "[]", '{"a": true}', '{"a": -1}', "[" * 200_000)
    for text in (*texts, " " * (2 << 20)):
        (root / QUOTAS_FILE).write_text(text)
        refused = dualpath("a", "5GiB")
        assert refused.returncode == 2
        assert str(root / QUOTAS_FILE) in refused.stderr
        assert (root / QUOTAS_FILE).read_text() == text


def test_a_pipe_in_its_place_keeps_nobody_waiting(dualpath: Run, root: Path) -> None:
    os.mkfifo(root / QUOTAS_FILE)
    assert dualpath("a", "5GiB").returncode == 2
    assert dualpath().returncode == 2


def test_names_are_shown_as_they_are(dualpath: Run) -> None:
    for name in ("[/x]", "[bold]y", ":smile:", "a/b", "none"):
        assert dualpath(name, "5GiB").returncode == 0
        assert f"{name} " in dualpath().stdout


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "dualpath_sglang.cli", "quota", "-r", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2
    assert "There is no store" in refused.stderr
