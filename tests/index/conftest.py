"""Indexes of their own files, and children to share them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import EmbeddedIndex
from tests.support.zygote import Zygote, zygote


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.lmdb"


@pytest.fixture
def open_index(path: Path) -> Iterator[Callable[[], EmbeddedIndex]]:
    """`open_index()`: the index of this test's file, closed after the test."""
    opened: list[EmbeddedIndex] = []

    def make() -> EmbeddedIndex:
        opened.append(EmbeddedIndex(path))
        return opened[-1]

    yield make
    for index in opened:
        index.close()


@pytest.fixture
def index(open_index: Callable[[], EmbeddedIndex]) -> EmbeddedIndex:
    return open_index()


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks processes that call functions of tests/index/processes.py."""
    with zygote("tests.index.processes", tmp_path_factory.mktemp("children")) as parent:
        yield parent
