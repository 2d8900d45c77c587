"""Servers and connections that end with their test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.server import Server, ServerOptions
from tests.transport.peers import SOON_S, Blocks


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """`serve(source, **options)`: a server, closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(source: Blocks, **options: Any) -> Server:
            server = Server(source, ServerOptions(**options))
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    """`connect(server or port, **how)`: a connection, closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(server: Server | int, **how: Any) -> Connection:
            port = server if isinstance(server, int) else server.port
            address = PeerAddress("127.0.0.1", port, **how)
            connection = Connection(address, time.monotonic() + SOON_S)
            stack.callback(connection.close)
            return connection

        yield make
