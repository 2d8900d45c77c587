"""Fixtures that every test folder may use."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import sglang_cpu.boot
from tests.support import tiny_model
from tests.support.server import Server

if not Path("/dev/nvidiactl").exists():
    # For tests that import SGLang into this process, as sglang_cpu.pth does for its servers.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sglang_cpu.boot.install()

_SERVERS: pytest.StashKey[list[Server]] = pytest.StashKey()


@pytest.fixture(scope="session")
def model() -> Callable[..., Path]:
    """`model(kind, seed=0, **config)`: directory of a tiny model, kept from run to run."""
    source = Path(tiny_model.__file__).read_bytes()
    name = f"tiny-models-{hashlib.sha256(source).hexdigest()[:12]}"
    root = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:  # not in a virtual environment: leave no trace in the system
        root = Path(tempfile.gettempdir())
    cache = root / name

    def make(kind: str, seed: int = 0, **config: object) -> Path:
        return tiny_model.cached_model(cache, kind, seed, **config)

    return make


@pytest.fixture
def start_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`start_server(model, flags, env=..., warm=...)`: a running server, killed after the test.

    The end of its log is part of the report when the test fails.
    """
    servers: list[Server] = []
    request.node.stash[_SERVERS] = servers

    def start(*args: object, **kwargs: object) -> Server:
        kwargs.setdefault("log", tmp_path / f"server-{len(servers)}.log")
        server = Server(*args, **kwargs)  # type: ignore[arg-type]
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill9()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.stash.get(_SERVERS, []):
            report.sections.append((f"server log {server.log.name}", server.log_tail()))
    return report
