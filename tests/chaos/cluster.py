"""The cluster: a host with Redis, a prefill host, and decode hosts with agents, in namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from bench.netns import Network
from tests.chaos.loads import Load, Window, between, parse
from tests.chaos.spec import Mode, Spec
from tests.support.redis_server import REDIS_SERVER

REPOSITORY = Path(__file__).resolve().parents[2]
CONTROL, COMPUTE = "control", "compute"
RATE = "400mbit"
START_S = 90.0
"""Generous: the machine may be busy."""
_PORT, _BEHIND_PROXY, _PROXY = 7000, 7002, 7001


def wait_for(true: Callable[[], Any], what: str, timeout_s: float = START_S) -> None:
    """Until a call returns something true."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.02)


class Process:
    """One of a host, its log in a file, lines on its standard input.

    Args:
        lines: called with each line of its standard output, in a thread.
    """

    def __init__(
        self,
        net: Network,
        host: str,
        argv: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        lines: Callable[[str], None] | None = None,
    ) -> None:
        self.log = log
        self._from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self.process: subprocess.Popen[str] = net.popen(
                host,
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env={**_plain_environment(), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=file if lines is None else subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=REPOSITORY,
            )
        if lines is not None:
            args = (self.process.stdout, lines)
            threading.Thread(target=_read_lines, args=args, daemon=True).start()

    @property
    def said(self) -> str:
        """What it has said."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def says(self, text: str) -> None:
        """Wait until it does."""

        def heard() -> bool:
            if text in self.said:
                return True
            assert self.process.poll() is None, f"it ended: {self.said[-2000:]}"
            return False

        wait_for(heard, f"{text!r} of {self.log.stem}")

    def tell(self, **what: Any) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also when it is stopped."""
        self.process.kill()
        self.process.wait(START_S)

    def hang_up(self) -> None:
        """Have it end with its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.kill()


def _read_lines(stream: IO[str], lines: Callable[[str], None]) -> None:
    with contextlib.suppress(ValueError):
        for line in stream:
            lines(line)


def _plain_environment() -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if not name.startswith("DUALPATH_")}
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "storage")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class DecodeHost:
    """A host with an agent, and perhaps with something in front of it."""

    def __init__(self, cluster: Cluster, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.agent: Process | None = None
        self._cluster = cluster
        self.proxied = False
        self._proxy: Process | None = None
        cluster.clock(name, 0.0)

    @property
    def environment(self) -> dict[str, str]:
        """Of its agent."""
        port = _BEHIND_PROXY if self.proxied else _PORT
        more = {
            "node_name": self.name,
            "node_listen": f"{self.address}:{port}",
            "node_dir": str(self._cluster.folder / f"machine-{self.name}"),
        }
        settings = {**self._cluster.settings, **more}
        environment = {f"DUALPATH_{name.upper()}": value for name, value in settings.items()}
        return {**environment, **self._cluster.clocked(self.name)}

    def start(self) -> None:
        """Start its agent; returns once that serves."""
        self.begin()
        self.await_start()

    def begin(self) -> None:
        """Start its agent."""
        argv = [sys.executable, "-m", "dualpath_sglang.cli", "node", "--drain-timeout", "5"]
        self.agent = self._cluster.process(self.name, argv, f"agent-{self.name}", self.environment)

    def await_start(self) -> None:
        """Until its agent serves."""
        assert self.agent is not None
        self.agent.says(" serves ")

    def use_proxy(self, proxied: bool) -> Process | None:
        """Have its agent reached through a proxy, or not; the proxy."""
        if proxied and self._proxy is None:
            argv = [sys.executable, "-m", "tests.chaos.proxy", self.address, str(_PROXY)]
            self._proxy = self._cluster.process(
                self.name, [*argv, str(_BEHIND_PROXY)], f"proxy-{self.name}"
            )
            self._proxy.says("listens")
        if proxied is not self.proxied:
            self.proxied = proxied
            if self.agent is not None:
                self.agent.kill()
            self.start()
        return self._proxy

    def pose(self) -> Process:
        """Start something that says it is an agent, where the agent was."""
        argv = [sys.executable, "-m", "tests.chaos.garbage", self.address, str(_PORT)]
        garbage = self._cluster.process(self.name, argv, f"garbage-{self.name}", self.environment)
        garbage.says("listens")
        return garbage

    def link_down(self) -> None:
        """Its compute network."""
        self._cluster.net.link_down(self.name, COMPUTE)

    def link_up(self) -> None:
        """Its compute network."""
        self._cluster.net.link_up(self.name, COMPUTE)

    def set_rate(self, rate: str) -> None:
        """Of its compute network."""
        self._cluster.net.set_rate(self.name, COMPUTE, rate)


class Cluster:
    """See the module. Use as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.net = Network("chaos")
        self.loads: list[Load] = []
        self.errors: list[str] = []
        self._mode: tuple[Mode, bool] | None = None
        self._prefill: Process | None = None
        self._ready = threading.Event()
        self.settings = {
            "root": str(folder / "store"),
            "index": "redis://10.91.0.1:6379",
            "index_timeout_s": "0.5",
            "capacity": "512MiB",
            "min_free": "0%",
            "segment_size": "16MiB",
            "direct_io": "off",
            "node": "off",
            "node_memory": "32MiB",
            "stream_staging": "32MiB",
            "stream_piece_size": "1MiB",
            "stream_queue_depth": "4",
            "stream_probe_s": "0",
        }

    def __enter__(self) -> Cluster:
        self.net.__enter__()
        try:
            hosts = ("s0", "p0", "d0", "d1")
            for number, name in enumerate(hosts, 1):
                self.net.host(name)
                self.net.join(name, CONTROL, f"10.91.0.{number}/24")
                if name != "s0":
                    self.net.join(name, COMPUTE, f"10.92.0.{number}/24", RATE)
            self.redis = self.start_redis()
            self.decode = [DecodeHost(self, f"d{i}", f"10.92.0.{3 + i}") for i in range(2)]
        except BaseException:
            self.net.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_prefill()
        self.net.close()

    @property
    def sides(self) -> list[str]:
        """Who brings blocks when all is well."""
        return ["local", *(host.address for host in self.decode)]

    def process(
        self,
        host: str,
        argv: Sequence[str],
        log: str,
        environment: dict[str, str] | None = None,
        lines: Callable[[str], None] | None = None,
    ) -> Process:
        """Start one in a host."""
        return Process(self.net, host, argv, self.folder / f"{log}.txt", environment, lines)

    def clock(self, host: str, wrong_by_s: float) -> None:
        """Have the wall clock of what runs in a host go wrong by so much, from now on."""
        draft = self.folder / "clock"
        draft.write_text(str(wrong_by_s))
        draft.replace(self.folder / f"clock-{host}")

    def clocked(self, host: str) -> dict[str, str]:
        """The environment of a process that has that clock."""
        places = ("tests/chaos/clock", ".", "storage")
        path = os.pathsep.join(str(REPOSITORY / place) for place in places)
        return {"PYTHONPATH": path, "WRONG_CLOCK": str(self.folder / f"clock-{host}")}

    def start_redis(self) -> Process:
        """With nothing in it."""
        assert REDIS_SERVER is not None, "redis-server is not installed"
        options = ["--bind", "10.91.0.1", "--port", "6379", "--save", "", "--appendonly", "no"]
        self.redis = self.process("s0", [REDIS_SERVER, *options, "--protected-mode", "no"], "redis")
        self.redis.says("Ready to accept connections")
        return self.redis

    # -- the prefill host -------------------------------------------------------------------

    def use(self, mode: Mode, *, checked: bool = True) -> None:
        """Have hits loaded in a mode; returns once all decode hosts bring their part."""
        if self._mode != (mode, checked):
            self._end_prefill()
            self._start_prefill(mode, checked)
        for host in self.decode:
            if host.agent is None:
                host.start()

    def _start_prefill(self, mode: Mode, checked: bool) -> None:
        more = {"node_name": "p0", "node_dir": str(self.folder / "machine-p0")}
        via = {
            f"{host.address}:{_BEHIND_PROXY}": f"{host.address}:{_PROXY}" for host in self.decode
        }
        spec = Spec(mode, "10.92.0.2", {**self.settings, **more}, via, checked=checked)
        argv = [sys.executable, "-m", "tests.chaos.prefill", spec.to_json()]
        self._ready.clear()
        self.loads.clear()
        self.clock("p0", 0.0)
        self._prefill = self.process(
            "p0", argv, f"prefill-{mode}", self.clocked("p0"), lines=self._heard
        )
        self._mode = (mode, checked)
        assert self._ready.wait(START_S), f"the prefill process: {self._prefill.said[-2000:]}"

    def _heard(self, text: str) -> None:
        line = json.loads(text)
        if "ready" in line:
            self._ready.set()
        elif "error" in line:
            self.errors.append(line["error"])
        else:
            self.loads.append(parse(line))

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.hang_up()
        self._prefill, self._mode = None, None

    def hang_store(self, seconds: float) -> None:
        """Of the prefill host."""
        assert self._prefill is not None
        self._prefill.tell(hang_s=seconds)

    # -- looking on -------------------------------------------------------------------------

    def normal(self, seconds: float) -> Window:
        """Loads of a while in which nothing is wrong: all are well, all sides bring their part."""
        end = time.monotonic() + START_S
        while True:
            began = time.monotonic()
            time.sleep(seconds)
            wait_for(partial(self._enough_since, began), "loads")
            window = self._since(began)
            if set(window.outcomes) == {"ok"} and window.brings(self.sides, _LEAST):
                return window
            assert time.monotonic() < end, f"nothing is normal: {self.loads[-5:]} {self.errors}"

    def _enough_since(self, began: float) -> bool:
        return len(self._since(began).loads) >= _ENOUGH

    def _since(self, began: float) -> Window:
        return between(list(self.loads), began, time.monotonic())

    def recovers(self, since: float, within_s: float, most_s: float) -> float | None:
        """How long it takes until a stretch of time begins in which loads are normal.

        Args:
            most_s: the median that is normal.

        Returns:
            None when there is none that begins within so many seconds.
        """
        for begin in _steps(since, within_s):
            until = begin + max(_STRETCH_S, 2 * most_s)
            wait_for(partial(self._over, until), "the end of loads")
            window = between(list(self.loads), begin, until)
            if (
                len(window.loads) >= 3
                and set(window.outcomes) == {"ok"}
                and window.median_s <= most_s
                and window.brings(self.sides, _LEAST)
            ):
                return begin - since
        return None

    def _over(self, until: float) -> bool:
        """Whether every load that began before then has ended."""
        assert not self.errors, self.errors
        later = {load.worker for load in list(self.loads) if load.began >= until}
        return len(later) == _WORKERS


_LEAST = 0.05
_STRETCH_S = 1.5
_ENOUGH = 9
_WORKERS = 3


def _steps(since: float, within_s: float) -> Iterator[float]:
    begin = since
    while begin <= since + within_s:
        yield begin
        begin += 0.25
