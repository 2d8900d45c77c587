"""Servers that a test may harm, and indexes in them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualpath_sglang.index.redis import RedisSettings, open_redis_index
from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import FOREVER_S
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def module_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    """An empty server of this module's."""
    with module_server.admin() as admin:
        admin.flushall()
    return module_server


@pytest.fixture
def open_at() -> Iterator[Callable[..., RedisIndex]]:
    """`open_at(url, store=..., **how)`: an index, closed after the test."""
    default = secrets.token_hex(8)
    with contextlib.ExitStack() as opened:

        def make(url: str, store: str = default, **how: Any) -> RedisIndex:
            how = {"lookup_timeout_s": FOREVER_S, **how}
            settings = RedisSettings.parse(url)
            index = open_redis_index(settings, store, **how)
            opened.callback(index.close)
            return index

        yield make


@pytest.fixture
def index(server: RedisServer, open_at: Callable[..., RedisIndex]) -> RedisIndex:
    return open_at(server.url)
