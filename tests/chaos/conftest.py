"""One cluster for all cases, and a table of what they took."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.table import Table

from tests.chaos.cluster import Cluster

ROWS: pytest.StashKey[list[list[str]]] = pytest.StashKey()
HEADS = (
    "fault",
    "mode",
    "loads",
    "not ok",
    "before p50 s",
    "fault p50 s",
    "fault p99 s",
    "slowest s",
    "by others before",
    "fault",
    "normal after s",
)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("chaos")) as made:
        yield made


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[list[str]]:
    """Of the table."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(ROWS, [])
    if not found:
        return
    table = Table(*HEADS, title="Loads while something breaks")
    for row in found:
        table.add_row(*row)
    console = Console(width=150, color_system=None)
    with console.capture() as capture:
        console.print(table)
    terminalreporter.write_line(capture.get())
