"""A Redis for the agents of a test, and agents that do not outlive it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.agents import AgentProcess, Place
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def session_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(session_redis: RedisServer) -> RedisServer:
    """An empty server, which lives on."""
    with session_redis.admin() as admin:
        admin.flushall()
    return session_redis


@pytest.fixture
def place(tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in [name for name in os.environ if name.startswith("DUALPATH_")]:
        monkeypatch.delenv(name)
    return Place(tmp_path, redis_server.url)


@pytest.fixture
def start() -> Iterator[Callable[..., AgentProcess]]:
    """`start(place, *arguments)`: an agent, killed after the test."""
    started: list[AgentProcess] = []

    def begin(at: Place, *arguments: str, log: str = "agent.txt") -> AgentProcess:
        started.append(at.start(*arguments, log=log))
        return started[-1]

    yield begin
    for agent in started:
        agent.kill()
