"""Agents on prefill and decode servers behind `dualpath router`, checked from end to end.

    make demo-pd

Two prefill and two decode servers (one of each where memory is short), real SGLang on the CPU, each
with a node agent as if on a machine of its own. They share a directory, as the nodes of a cluster
share a file system, and an index in Redis, from which the router learns of all of them. Several
agent sessions run side by side; between turns every server forgets what it has in memory, so each
turn's prefix comes from storage, by the path that the router chose. A table grows by a line a
request. At the end the sessions are repeated on a server without any cache, whose answers must be
the same. Ends with status 0 only if everything held. Needs no root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from examples.agent_session import Endpoint, Session, Turn
from examples.demo import (
    COMMON_FLAGS,
    PAGE_TOKENS,
    UNCACHED_FLAGS,
    WORKLOAD,
    DemoError,
    make_model,
    shown,
    working_directory,
)
from examples.demo_cluster import redis_server
from examples.demo_dualpath import Agent
from examples.serving import CPU_ENVIRONMENT, Server

START_S = 300.0
SERVER_BYTES = 1536 << 20
"""Memory of a server with this model, generously."""
READ_AGAIN = 1.5
"""A hit that both sides read for themselves is read twice."""
_MIB = 1 << 20
_NOISE_BYTES = 4 << 20
"""Of a machine in a round: what it imports late, what an agent looks at."""
_ENVIRONMENT = {
    **CPU_ENVIRONMENT,
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
}
_PD_FLAGS = (
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
    "--disable-overlap-schedule",
    "--enable-metrics",
)
_DECODE_FLAGS = (
    "--disaggregation-decode-enable-radix-cache",
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "1.5", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One request: who asked, what came of it, and where it went."""

    session: int
    turn: Turn
    prefill: str
    decode: str
    path: str

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.turn.elapsed_s - self.turn.ttft_s) / max(1, self.turn.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """What a round of turns read from storage.

    Args:
        read: bytes, by machine.
        hit: bytes of the round's hits, once for both sides.
    """

    read: dict[str, int]
    hit: int


class Machine:
    """A server in its role, and the node agent beside it.

    Args:
        name: of the machine.
        role: prefill or decode.
    """

    def __init__(
        self, name: str, role: str, model: Path, directory: Path, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self.role = role
        own = {**settings, "node": "off", "node_name": name, "node_dir": str(directory / name)}
        flags = [*COMMON_FLAGS, *_PD_FLAGS, "--disaggregation-mode", role]
        if role == "prefill":
            flags += ["--disaggregation-bootstrap-port", str(free_port())]
        else:
            flags += _DECODE_FLAGS
            own["prefetch_threshold"] = PAGE_TOKENS
        flags += ["--hicache-storage-backend", "dualpath"]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(own)]
        self.server = Server(model, flags, directory / f"{name}.log", _ENVIRONMENT)
        self.agent = Agent(name, directory, settings)

    def read_bytes(self) -> int:
        """Bytes that its processes have read from files so far; sockets are no files."""
        return sum(_read_by(pid) for pid in (*self.server.workers(), self.agent.pid))


class Demo:
    """The steps, in order.

    Args:
        directory: for the model, the store and the logs.
        index: the address of Redis.
        sessions: how many agents work side by side.
        turns: of each.
        engines: servers of each role.
    """

    def __init__(
        self, directory: Path, index: str, sessions: int, turns: int, engines: int
    ) -> None:
        self._directory = directory
        self._index = index
        self._turns = turns
        self._engines = engines
        self._began = time.monotonic()
        self._sessions = [
            Session(replace(WORKLOAD, seed=seed, system_chars=800 + 300 * seed))
            for seed in range(sessions)
        ]
        self.steps: list[Step] = []
        self.rounds: list[RoundBytes] = []
        self.least_bytes = 0
        """Of all pages that were hit, each counted once."""
        self.reference: list[list[Turn]] = []
        self._nodes_of: dict[str, str] = {}
        """Machines by the names that the router has for their servers."""

    def run(self) -> None:
        """Everything.

        Raises:
            DemoError, ServerError: something did not hold.
        """
        self.say("making a small model with random weights")
        model = make_model(self._directory / "model")
        with self._cluster(model) as machines, self._router() as url:
            self._await_engines(url, machines)
            say_heading()
            for _ in range(self._turns):
                self._round(url, machines)
        self.say("the same sessions on a server without any cache")
        log = self._directory / "plain.log"
        with Server(model, (*COMMON_FLAGS, *UNCACHED_FLAGS), log, CPU_ENVIRONMENT) as plain:
            for session in self._sessions:
                again = Session(session.workload)
                for _ in range(self._turns):
                    again.step(Endpoint(f"{plain.url}/v1"))
                self.reference.append(again.turns)
        self.check()

    # -- what runs --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cluster(self, model: Path) -> Iterator[list[Machine]]:
        settings = {
            "root": str(self._directory / "store"),
            "capacity": "2GiB",
            "index": self._index,
            # On two cores, whose every thread is busy, Redis is not asked to answer within 5 ms.
            "index_timeout_s": 1.0,
            "split_floor": 0,
        }
        machines = [
            Machine(f"{role}-{number}", role, model, self._directory, settings)
            for role in ("prefill", "decode")
            for number in range(1, self._engines + 1)
        ]
        self.say(f"starting {self._engines} prefill and {self._engines} decode servers, and agents")
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor() as pool:
                for machine in machines:
                    stack.callback(machine.server.kill)
                list(pool.map(lambda machine: machine.server.start(START_S), machines))
            for machine in machines:
                stack.callback(machine.agent.kill)
                machine.agent.start()
            yield machines

    @contextlib.contextmanager
    def _router(self) -> Iterator[str]:
        """`dualpath router`: told of nothing but the index."""
        port = free_port()
        command = [
            *(sys.executable, "-m", "dualpath_sglang.cli", "router"),
            *("--host", "127.0.0.1", "--port", str(port), "--index", self._index),
            *("--root", str(self._directory / "store")),
            # Servers forget what they have in memory between turns, which a router cannot know.
            *("--warm-for", "0"),
            # On two cores, whose every thread is busy, a forward takes what it takes.
            *("--stuck-after", "300", "--dead-after", "20"),
        ]
        with (self._directory / "router.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield f"http://127.0.0.1:{port}"
            process.terminate()
            if process.wait(60):
                raise DemoError(f"The router ended with status {process.returncode}")
        finally:
            process.kill()
            process.wait()

    def _await_engines(self, url: str, machines: Sequence[Machine]) -> None:
        """Until the router has learnt of every server, and of every agent."""
        end = time.monotonic() + START_S
        found: object = None
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{url}/engines", timeout=5) as reply:
                    found = json.load(reply)
            except OSError as error:
                found = error
            else:
                engines = [e for e in found["engines"] if e["state"] == "ready"]
                agents = self._nodes(url)
                if {e["node"] for e in engines} == {m.name for m in machines} == agents:
                    self._nodes_of = {e["name"]: e["node"] for e in engines}
                    self.say(f"the router at {url} has found them all in the index")
                    return
            time.sleep(0.2)
        raise DemoError(f"The router does not find every server: {found}")

    def _nodes(self, url: str) -> set[str]:
        """The machines whose agents the router has heard of."""
        text = httpx.get(f"{url}/metrics", timeout=5).text
        return {
            sample.labels["node"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "dualpath_router_read_queue_tokens"
        }

    # -- the sessions -----------------------------------------------------------------------

    def _round(self, url: str, machines: Sequence[Machine]) -> None:
        """A turn of every session, side by side."""
        for machine in machines:
            machine.server.flush()
        before = {machine.name: machine.read_bytes() for machine in machines}
        with ThreadPoolExecutor() as pool:
            numbers = range(len(self._sessions))
            steps = list(pool.map(lambda number: self._turn(url, number), numbers))
        after = {machine.name: machine.read_bytes() for machine in machines}
        read = {name: size - before[name] for name, size in after.items()}
        hits = sum(step.turn.storage_tokens or 0 for step in steps)
        self.steps += steps
        page = self._page_bytes()
        self.rounds.append(RoundBytes(read, hits // PAGE_TOKENS * page))
        # Prefixes grow: the last hit of a session has the pages of all before.
        self.least_bytes = hits // PAGE_TOKENS * page

    def _turn(self, url: str, number: int) -> Step:
        with httpx.Client() as client:
            told: dict[str, str] = {}
            client.event_hooks["response"] = [lambda reply: told.update(reply.headers)]
            turn = self._sessions[number].step(Endpoint(f"{url}/v1", client=client))
        prefill, decode = (
            self._nodes_of[told[f"x-dualpath-{role}"]] for role in ("prefill", "decode")
        )
        path = {prefill: "PE", decode: "DE"}.get(told["x-dualpath-read"], "both")
        step = Step(number + 1, turn, prefill, decode, path)
        print(line(step), flush=True)
        return step

    def _page_bytes(self) -> int:
        """Of one page in the store, its header included."""
        config = DualPathConfig.load(
            {"root": str(self._directory / "store"), "index": self._index, "read_only": True}
        )
        with KVCache(config.store_options(), index=config.index_source()) as cache:
            (geometry,) = [g for g in cache.geometries() if g.pool == "kv"]
        return geometry.slot_bytes

    def check(self) -> None:
        """Every answer is right, every prefix came from storage, and no hit was read there twice.

        Raises:
            DemoError: it is not so.
        """
        for step in self.steps:
            plain = self.reference[step.session - 1][step.turn.number - 1]
            if step.turn.answer != plain.answer:
                raise DemoError(
                    f"Turn {plain.number} of session {step.session} was answered "
                    f"{step.turn.answer!r} by {step.prefill} and {step.decode}, and "
                    f"{plain.answer!r} without a cache"
                )
            if step.turn.number > 1 and not step.turn.storage_tokens:
                raise DemoError(
                    f"Turn {plain.number} of session {step.session} found nothing in storage"
                )
        for role in ("prefill", "decode"):
            used = {getattr(step, role) for step in self.steps}
            if len(used) < self._engines:
                raise DemoError(f"Only {', '.join(sorted(used))} had a request")
        for number, done in enumerate(self.rounds, 1):
            most = READ_AGAIN * done.hit + _NOISE_BYTES * len(done.read)
            if sum(done.read.values()) > most:
                raise DemoError(f"In round {number} hits were read more than once: {done}")
        # What an agent has read for one turn it may still have in memory at the next.
        read, least = (sum(sum(done.read.values()) for done in self.rounds), self.least_bytes)
        if read < least:
            raise DemoError(f"{read} bytes were read, where all hits together have {least}")

    # -- telling ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)

    def report(self, console: Console) -> None:
        """Two tables: what each machine read, round by round, and who served how much."""
        names = list(self.rounds[0].read)
        table = Table(title="MiB that each machine read from storage")
        for name in ("turn", *names, "all", "all / hits"):
            table.add_column(name, justify="right")
        for number, done in enumerate(self.rounds, 1):
            read = sum(done.read.values())
            ratio = f"{read / done.hit:.2f}" if done.hit else "-"
            sizes = (f"{done.read[name] / _MIB:.1f}" for name in names)
            table.add_row(str(number), *sizes, f"{read / _MIB:.1f}", ratio)
        console.print(table)
        paths = Counter(step.path for step in self.steps if step.turn.storage_tokens)
        told = ", ".join(f"{count} by {path}" for path, count in sorted(paths.items()))
        print(f"Hits by the path that they were read over: {told}")


def say_heading() -> None:
    """The first line of the table of requests."""
    print(
        f"{'session':>8} {'turn':>4} {'prefill':>10} {'decode':>10} {'read by':>10} {'prompt':>7} "
        f"{'hit':>6} {'TTFT ms':>8} {'TPOT ms':>8}",
        flush=True,
    )


def line(step: Step) -> str:
    """A request as a line of the table."""
    turn = step.turn
    return (
        f"{step.session:>8} {turn.number:>4} {step.prefill:>10} {step.decode:>10} {step.path:>10} "
        f"{turn.prompt_tokens:>7} {turn.storage_tokens or 0:>6} {1000 * turn.ttft_s:>8.0f} "
        f"{1000 * step.tpot_s:>8.0f}"
    )


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read_by(pid: int | None) -> int:
    """Bytes a process has read through the kernel's file calls; 0 when it is gone."""
    try:
        return 0 if pid is None else int(psutil.Process(pid).io_counters().read_chars)
    except psutil.Error:
        return 0


def engines_that_fit() -> int:
    """How many servers of each role this machine has the memory for: one or two."""
    return 2 if psutil.virtual_memory().available >= 6 * SERVER_BYTES else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="demo-pd", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=4, help="agents at a time (default 4)")
    parser.add_argument("--turns", type=int, default=4, help="of each session (default 4)")
    parser.add_argument("--engines", type=int, help="servers of each role (default: what fits)")
    parser.add_argument("--keep", type=Path, help="new directory to leave store and logs in")
    options = parser.parse_args(arguments)
    engines = engines_that_fit() if options.engines is None else options.engines
    if options.turns < 2 or options.sessions < engines or engines < 1:
        parser.error("there are at least 2 turns, and a session for each server of a role")

    def run() -> None:
        with working_directory(options.keep) as directory, redis_server(directory) as index:
            demo = Demo(directory, index, options.sessions, options.turns, engines)
            demo.run()
        print()
        demo.report(Console(width=None if sys.stdout.isatty() else 110))
        print("Every answer is right, and no hit was read from storage twice for its two sides.")

    return shown(run, keeps=options.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
