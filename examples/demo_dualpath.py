"""A prefill server whose hits are read by three machines at once, checked from end to end.

    make demo-dualpath

Three nodes on this machine: a real SGLang server on the CPU in streaming mode, and two agents as
decode nodes have them (`dualpath node`). They share a directory, as the nodes of a cluster share a
file system, and an index in Redis. Before every turn of an agent session the server forgets all
that it has in memory, so that the prefix comes from storage: through the server, and through the
agents, layer by layer under the forward. In the middle one agent is killed with SIGKILL, and
started again later. At the end the session is repeated on a server without any cache, whose answers
must be the same. Ends with status 0 only if everything held. Needs no root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from examples.agent_session import Endpoint, Session, Turn
from examples.demo import (
    COMMON_FLAGS,
    TOOL_SECONDS,
    UNCACHED_FLAGS,
    WORKLOAD,
    DemoError,
    make_model,
    shown,
    working_directory,
)
from examples.demo_cluster import redis_server
from examples.serving import CPU_ENVIRONMENT, Server

AGENTS = ("decode 1", "decode 2")
PREFILL = "prefill"
PATIENCE_S = 60.0
_SETTLE_S = 1.2
"""Agents tell what they have sent every half second, servers every second."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """A turn, and the bytes of its hit by the node that read them."""

    turn: Turn
    node_bytes: dict[str, int]
    note: str

    @property
    def total(self) -> int:
        """Bytes of the hit."""
        return sum(self.node_bytes.values())


class Agent:
    """``dualpath node`` in a process of its own, with a directory as if on its own machine."""

    def __init__(self, name: str, directory: Path, settings: dict[str, Any]) -> None:
        self.name = name
        own = {"node_dir": str(directory / name.replace(" ", "-")), "node_name": name}
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("DUALPATH_")},
            **{f"DUALPATH_{key.upper()}": str(v) for key, v in {**settings, **own}.items()},
        }
        self._log = directory / f"{name.replace(' ', '-')}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; it is there when it is reported."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dualpath_sglang.cli", "node"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int | None:
        """Of its process; None before it was started."""
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> int | None:
        """SIGTERM: it lets what is under way end; its exit status."""
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"The agent {self.name} does not end") from None


class Demo:
    """The steps, in order.

    Args:
        directory: for the model, the store and the logs.
        index: the address of Redis.
        turns: of the session.
    """

    def __init__(self, directory: Path, index: str, turns: int) -> None:
        self._directory = directory
        self._turns = turns
        self._began = time.monotonic()
        self._settings = {
            "root": str(directory / "store"),
            "capacity": "1GiB",
            "index": index,
            # On two cores, whose every thread is busy, Redis is not asked to answer within 5 ms.
            "index_timeout_s": 1.0,
        }
        self.steps: list[Step] = []
        self.reference: list[Turn] = []

    def run(self) -> None:
        """Everything.

        Raises:
            DemoError, ServerError: something did not hold.
        """
        self.say("making a small model with random weights")
        model = make_model(self._directory / "model")
        # Small hits of a small model are to be split too; and no agent of the server's own, which
        # would be a fourth node.
        own = {**self._settings, "split_floor": 0, "node": "off"}
        own["node_dir"] = str(self._directory / PREFILL)
        flags = (
            *COMMON_FLAGS,
            *("--hicache-storage-backend", "dualpath", "--enable-metrics"),
            *("--hicache-storage-backend-extra-config", json.dumps(own)),
        )
        log = self._directory / "server.log"
        self.say("starting SGLang with --hicache-storage-backend dualpath, and two agents")
        agents = [Agent(name, self._directory, self._settings) for name in AGENTS]
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(Server(model, flags, log, CPU_ENVIRONMENT))
            for agent in agents:
                stack.callback(agent.kill)
                agent.start()
            self._looker = stack.enter_context(self._look())
            self.await_nodes(server, len(AGENTS))
            self.talk(server, agents)
            for agent in agents:
                if status := agent.end():
                    raise DemoError(f"The agent {agent.name} ended with status {status}")
        self.say("the same session on a server without any cache")
        with Server(model, (*COMMON_FLAGS, *UNCACHED_FLAGS), log, CPU_ENVIRONMENT) as plain:
            session = Session(WORKLOAD)
            for _ in range(self._turns):
                session.step(Endpoint(f"{plain.url}/v1"))
            self.reference = session.turns
        self.check()

    @contextlib.contextmanager
    def _look(self) -> Iterator[KVCache]:
        """The store as a tool sees it: who there is, and what they have done."""
        config = DualPathConfig.load({**self._settings, "read_only": True})
        end = time.monotonic() + PATIENCE_S
        while not Path(self._settings["root"]).is_dir():
            if time.monotonic() > end:
                raise DemoError("The server has made no store")
            time.sleep(0.2)
        with KVCache(config.store_options(), index=config.index_source()) as cache:
            yield cache

    def talk(self, server: Server, agents: Sequence[Agent]) -> None:
        """The session; in its middle one agent is killed, and started again."""
        session = Session(WORKLOAD)
        killed, back = self._turns // 2, self._turns // 2 + 2
        for number in range(1, self._turns + 1):
            note = ""
            server.flush()
            if number == killed + 1:
                note = f"{agents[1].name} was killed"
                self.say(f"SIGKILL to the agent of {agents[1].name}")
                agents[1].kill()
                self.await_nodes(server, len(AGENTS) - 1)
            elif number == back + 1:
                note = f"{agents[1].name} is back"
                self.say(f"the agent of {agents[1].name} starts again")
                agents[1].start()
                self.await_nodes(server, len(AGENTS))
            before = self.sent(server)
            turn = session.step(Endpoint(f"{server.url}/v1"))
            time.sleep(max(TOOL_SECONDS, _SETTLE_S))  # the tool runs, and the nodes report
            after = self.sent(server)
            self.steps.append(Step(turn, grown(before, after), note))
            sizes = self.steps[-1].node_bytes.items()
            self.say(
                f"  turn {turn.number}: {turn.prompt_tokens} prompt tokens, {turn.storage_tokens} "
                f"from storage, first token after {turn.ttft_s:.2f} s; "
                + ", ".join(f"{name} {size / _MIB:.1f} MiB" for name, size in sizes)
            )

    def await_nodes(self, server: Server, count: int) -> None:
        """Until the server can ask so many agents.

        Raises:
            DemoError: that does not happen.
        """
        end = time.monotonic() + PATIENCE_S
        while server.metric("dualpath_nodes") != count:
            if time.monotonic() > end:
                raise DemoError(f"The server does not know {count} other nodes")
            time.sleep(0.2)

    def sent(self, server: Server) -> dict[tuple[str, str], int]:
        """Bytes of hits so far, by the node that read them and its process."""
        reports = (self._looker.nodes() or {}).values()
        own = int(server.metric("dualpath_path_bytes_total", path="pe"))
        return {(PREFILL, ""): own} | {
            (str(report["host"]), str(report["node_id"])): int(report["served_bytes"])
            for report in reports
            if report.get("role") == "node"
        }

    def check(self) -> None:
        """Everybody read while it lived, and every answer is right.

        Raises:
            DemoError: it is not so.
        """
        for step, plain in zip(self.steps, self.reference, strict=True):
            if step.turn.answer != plain.answer:
                raise DemoError(
                    f"Turn {plain.number} was answered {step.turn.answer!r} over both paths and "
                    f"{plain.answer!r} without a cache"
                )
            if step.turn.number > 1 and not step.turn.storage_tokens:
                raise DemoError(f"Turn {plain.number} found nothing in storage")
        for name in (PREFILL, *AGENTS):
            if not any(step.node_bytes[name] > 0 for step in self.steps):
                raise DemoError(f"Nothing was read by {name}")

    # -- telling ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)

    def report(self, console: Console) -> None:
        """The table of bytes a path."""
        table = Table(title="Bytes of each hit, in MiB, by the node that read them from storage")
        for name in ("turn", "prompt tokens", "from storage", PREFILL, *AGENTS, "TTFT ms"):
            table.add_column(name, justify="right")
        table.add_column("same answer")
        table.add_column("")
        for step, plain in zip(self.steps, self.reference, strict=True):
            turn = step.turn
            table.add_row(
                str(turn.number),
                str(turn.prompt_tokens),
                str(turn.storage_tokens or 0),
                *(f"{step.node_bytes[name] / _MIB:.1f}" for name in (PREFILL, *AGENTS)),
                f"{1000 * turn.ttft_s:.0f}",
                "yes" if turn.answer == plain.answer else "NO",
                step.note,
            )
        table.add_section()
        totals = {name: sum(s.node_bytes[name] for s in self.steps) for name in (PREFILL, *AGENTS)}
        whole = sum(totals.values()) or 1
        shares = (f"{100 * size / whole:.0f} %" for size in totals.values())
        table.add_row("", "", "share", *shares, "", "", "")
        console.print(table)


def grown(before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]) -> dict[str, int]:
    """What was added, by node: a process that has ended adds nothing, a new one began at 0."""
    added = dict.fromkeys((PREFILL, *AGENTS), 0)
    for key, size in after.items():
        added[key[0]] += size - before.get(key, 0)
    return added


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="demo-dualpath", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=8, help="of the session (default 8)")
    parser.add_argument("--keep", type=Path, help="new directory to leave store and logs in")
    options = parser.parse_args(arguments)
    if options.turns < 6:
        parser.error("a session in which an agent goes and comes back has at least 6 turns")

    def run() -> None:
        with working_directory(options.keep) as directory, redis_server(directory) as index:
            demo = Demo(directory, index, options.turns)
            demo.run()
        print()
        demo.report(Console(width=None if sys.stdout.isatty() else 110))
        print("Every answer is right, and every node has read for the prefill while it lived.")

    return shown(run, keeps=options.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
