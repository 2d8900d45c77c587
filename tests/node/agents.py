"""Agents in processes of their own, over a real store and a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.base import Report
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.machine import AgentInfo, MachineDir
from dualpath_sglang.node.options import NodeOptions
from dualpath_sglang.transport.base import FetchRequest, StridedDestination
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_storage import Geometry
from tests.kvcache.caches import write
from tests.node.test_agent import Waiting

REPOSITORY = Path(__file__).resolve().parents[2]
SOON_S = 90.0
"""Generous: machines of tests are slow, and nothing here is about speed."""


def wait_for(true: Callable[[], Any], what: str = "it", timeout_s: float = SOON_S) -> Any:
    """What a call returns, once that is true."""
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.05)
    return found


class AgentProcess:
    """``dualpath node``, its log in a file."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "dualpath_sglang.cli", "node", *arguments]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )

    @property
    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def says(self, text: str) -> None:
        """Wait until it does."""
        end = time.monotonic() + SOON_S
        while text not in self.log:
            assert time.monotonic() < end, f"it does not say {text!r}: {self.log}"
            assert self.process.poll() is None or text in self.log, f"it ended: {self.log}"
            time.sleep(0.05)

    def ends(self) -> int:
        """Its status, once it has ended."""
        return self.process.wait(SOON_S)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Place:
    """A machine with a store and an index; a folder of the test stands for it."""

    folder: Path
    url: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "store"

    def extra(self) -> dict[str, str]:
        """Settings of whoever uses the store here."""
        return {
            "root": str(self.root),
            "index": self.url,
            "index_timeout_s": "5",
            "capacity": "64MiB",
            "min_free": "0%",
            "node_dir": str(self.folder / "machine"),
            "node_name": "here",
            "node_memory": "32MiB",
            "stream_staging": "1MiB",
            **self.settings,
        }

    def config(self) -> DualPathConfig:
        return DualPathConfig.load(self.extra())

    def options(self) -> NodeOptions:
        options = self.config().node_options()
        assert options is not None
        return options

    def machine(self) -> MachineDir:
        options = self.options()
        return MachineDir(options.base, options.store)

    def environment(self) -> dict[str, str]:
        ours = {f"DUALPATH_{name.upper()}": value for name, value in self.extra().items()}
        others = {n: v for n, v in os.environ.items() if not n.startswith("DUALPATH_")}
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "storage")])
        return {**others, **ours, "PYTHONPATH": path}

    def cache(self) -> KVCache:
        """What a server has."""
        config = self.config()
        return KVCache(config.store_options(), index=config.index_source())

    def store(self, of: Geometry, keys: list[bytes]) -> None:
        with self.cache() as cache:
            write(cache.attach(of), cache, keys)

    def start(self, *arguments: str, log: str = "agent.txt") -> AgentProcess:
        return AgentProcess(self.folder / log, self.environment(), *arguments)

    def info(self) -> AgentInfo:
        """Of the agent, once it listens."""
        found = wait_for(self.machine().info, "an agent")
        assert isinstance(found, AgentInfo)
        return found

    def connect(self, secret: bytes, info: AgentInfo | None = None, **how: Any) -> Connection:
        info = info or self.info()
        address = PeerAddress(info.host, info.port, secret, **how)
        return Connection(address, time.monotonic() + SOON_S)


def agents(cache: KVCache) -> list[Report]:
    """Reports of the agents that live."""
    try:
        return [fields for fields in cache.index.nodes().values() if fields.get("role") == "node"]
    except IndexUnavailableError:
        return []


def begin(
    connection: Connection, of: Geometry, keys: Sequence[bytes], timeout_s: float = SOON_S
) -> Waiting:
    """Ask for whole blocks."""
    request = FetchRequest(of.id_bytes, keys, 0, of.layers, timeout_s)
    memory = memoryview(bytearray(len(keys) * of.block_bytes))
    fetched = Waiting(request, StridedDestination.of_layers(memory, of.layer_bytes, len(keys)))
    fetched.fetch = connection.fetch(request, fetched.destination, fetched)
    return fetched


def fetch(connection: Connection, of: Geometry, keys: Sequence[bytes]) -> Waiting:
    """Ask for whole blocks, and wait until that has ended."""
    fetched = begin(connection, of, keys)
    assert fetched.fetch.wait(SOON_S)
    return fetched
