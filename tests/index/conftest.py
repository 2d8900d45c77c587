"""Indexes of their own files and names, and children to share them with."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import EmbeddedIndex, Index
from dualpath_sglang.index.redis import RedisSettings, open_redis_index
from tests.index.records import FOREVER_S
from tests.support.redis_server import RedisServer
from tests.support.zygote import Zygote, zygote

KINDS = ("embedded", "redis")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server that no test may harm; every test has a store of its own in it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.lmdb"


@pytest.fixture(params=KINDS)
def open_index(request: pytest.FixtureRequest, path: Path) -> Iterator[Callable[[], Index]]:
    """`open_index()`: the index of this test's store, closed after the test."""
    store = secrets.token_hex(8)
    with contextlib.ExitStack() as opened:

        def make() -> Index:
            index: Index
            if request.param == "embedded":
                index = EmbeddedIndex(path)
            else:
                server: RedisServer = request.getfixturevalue("redis_server")
                settings = RedisSettings.parse(server.url)
                index = open_redis_index(settings, store, lookup_timeout_s=FOREVER_S)
            opened.callback(index.close)
            return index

        yield make


@pytest.fixture
def index(open_index: Callable[[], Index]) -> Index:
    return open_index()


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks processes that call functions of tests/index/processes.py."""
    with zygote("tests.index.processes", tmp_path_factory.mktemp("children")) as parent:
        yield parent
