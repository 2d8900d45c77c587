"""Routers, in processes of their own, before the servers of a :class:`tests.support.pd.PdCluster`.

with routers(cluster, "--path", "de") as (router,):
    status, answer = router.post("/generate", {"input_ids": [...], ...})
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.pd import PdCluster
from tests.support.processes import REPOSITORY
from tests.support.server import free_port
from tests.support.streaming import wait_for

REQUEST_TIMEOUT_S = 120.0
START_S = 90.0


class RouterProcess:
    """``dualpath router``, which knows the cluster's servers by their URLs, and its Redis.

    Args:
        arguments: of the command line, beside what it needs.
        name: of its log.
    """

    def __init__(self, cluster: PdCluster, *arguments: str, name: str = "router") -> None:
        self.port = free_port()
        self.log = cluster.folder / f"{name}-{self.port}.log"
        place = next(iter(cluster.engines.values())).place
        self._environment = place.environment()
        self._command = [sys.executable, "-m", "dualpath_sglang.cli", "router"]
        self._command += ["--port", str(self.port), *arguments]
        for engine in cluster.engines.values():
            spec = f"{engine.server.url},node={engine.name}"
            if engine.role == "prefill":
                spec += f",bootstrap_port={engine.bootstrap_port}"
            self._command += [f"--{engine.role}", spec]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have it run; also again, on the same port."""
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
            )

    def ready(self, timeout_s: float = START_S) -> None:
        """Wait until every server that it knows answers it."""
        wait_for(self._is_ready, timeout_s)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            engines = self.engines().values()
        except (OSError, http.client.HTTPException, ValueError):
            return False
        return all(engine["state"] == "ready" for engine in engines)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """A signal to it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    # ---- requests

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> tuple[int, str]:
        """Status and text, also of a stream, when all of it is there.

        Raises:
            OSError, HTTPException: the router is not there, or goes away.
        """
        return self._ask("POST", path, json.dumps(dict(body)), timeout_s)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Likewise."""
        return self._ask("GET", path, None, timeout_s)

    def engines(self) -> dict[str, dict[str, Any]]:
        """What it knows of its servers, by the names of their machines."""
        status, text = self.get("/engines")
        assert status == 200, text
        return {engine["node"]: engine for engine in json.loads(text)["engines"]}

    def health(self) -> dict[str, Any]:
        """What it says of itself."""
        told: dict[str, Any] = json.loads(self.get("/health")[1])
        return told

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        rows = [row for row in self.get("/metrics")[1].splitlines() if not row.startswith("#")]
        return {row.rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in rows}

    def metric(self, name: str) -> float:
        """Of all labels together."""
        found = self.metrics().items()
        return sum(value for key, value in found if key.partition("{")[0] == name)

    def busy(self) -> dict[str, float]:
        """Whatever it still counts; nothing when no request is under way."""
        health = self.health()
        counts: dict[str, float] = {name: health[name] for name in ("waiting", "active")}
        for node, engine in self.engines().items():
            for name in ("own_requests", "own_tokens", "requests", "tokens"):
                counts[f"{node} {name}"] = engine[name]
        return {name: count for name, count in counts.items() if count}

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@contextlib.contextmanager
def routers(
    cluster: PdCluster, *arguments: str, count: int = 1, record: Path | None = None
) -> Iterator[list[RouterProcess]]:
    """Routers over a cluster, when they know that its servers answer."""
    more = [] if record is None else ["--record", str(record)]
    made = [
        RouterProcess(cluster, *arguments, *more, name=f"router{number}") for number in range(count)
    ]
    try:
        for router in made:
            router.start()
        for router in made:
            router.ready()
        yield made
    finally:
        for router in made:
            router.kill()


def end(router: RouterProcess, timeout_s: float = 30.0) -> None:
    """SIGTERM, and wait until it has ended."""
    router.send(signal.SIGTERM)
    end_at = time.monotonic() + timeout_s
    while router._process is not None and router._process.poll() is None:
        assert time.monotonic() < end_at, "the router does not end"
        time.sleep(0.05)
