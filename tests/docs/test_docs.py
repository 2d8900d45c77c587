"""What the documentation says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from dualpath_sglang.cli import app
from dualpath_sglang.cli.shared import REASONS
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import rows
from dualpath_sglang.launch_args import PAGE_TOKENS
from dualpath_sglang.plugin import KNOWN_VERSIONS
from dualpath_storage import Geometry, ReadStatus, header
from dualpath_storage.geometry import MAX_LAYERS

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
README = DOCUMENTS[0].read_text()


def between(text: str, name: str) -> list[str]:
    """Rows of the table between two comments."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert match is not None
    return match.group(1).strip().splitlines()


def settings() -> dict[str, str]:
    rows = [
        re.fullmatch(r"\| `(\w+)` \| `?([^|`]+)`? \| .+ \|", r)
        for r in between(README, "settings")[2:]
    ]
    assert all(rows)
    return {row.group(1): row.group(2) for row in rows if row}


def test_the_readme_has_every_setting_and_no_other() -> None:
    assert list(settings()) == list(DualPathConfig.model_fields)


@pytest.mark.parametrize("name", list(DualPathConfig.model_fields))
def test_the_readme_tells_the_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = getattr(DualPathConfig(), name)
    told = settings()[name]
    if told == "unset":
        assert default is None
    else:
        assert getattr(DualPathConfig.load({name: told}), name) == default


def test_the_readme_has_every_command_and_no_other() -> None:
    group = typer.main.get_command(app)
    commands = set(group.commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^\| `dualpath (\w+)", README, re.MULTILINE)) == commands
    for document in DOCUMENTS:
        mentioned = set(re.findall(r"`dualpath (\w+)", document.read_text()))
        assert mentioned <= commands, document


def test_make_targets_that_are_mentioned_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = document.read_text()
        mentioned = set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE))
        assert mentioned <= targets, document


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"(?:^ {4}|`)((?:dualpath_sglang|storage|examples|docs)/[\w/.]*)", text):
        assert (REPOSITORY / path).exists(), path


def test_numbers_that_are_told() -> None:
    assert f"at most {MAX_LAYERS} layers" in README
    assert f"--page-size {PAGE_TOKENS}" in README
    assert KNOWN_VERSIONS == ("0.5.23",)
    assert f"other than {KNOWN_VERSIONS[0]}" in README


def test_the_format_is_that_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "format.md").read_text()
    for name, module in (("header", header), ("index", rows)):
        assert "\n".join(between(text, name)) in (module.__doc__ or "")
    fields = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert fields == list(Geometry.__dataclass_fields__)[:-2]


def test_the_reasons_for_damage_are_all_told() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    told = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert told == {s.value for s in ReadStatus if s.damaged} | {"geometry"}
    assert told <= set(REASONS)
