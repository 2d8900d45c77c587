"""An agent session that moves from one server to another, with its KV cache.

    make demo-cluster

Starts a redis-server and two real SGLang servers on the CPU. They share a directory, as the nodes
of a cluster share a file system, and an index in Redis. An agent session runs half its turns on
the first server and goes on, on the second, from storage; from then on it changes every turn.
At the end the whole session is repeated on a server without any cache, whose answers must be the
same. Ends with status 0 only if everything held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.agent_session import Endpoint, Session, row
from examples.agent_session import heading as session_heading
from examples.demo import (
    CACHED_FLAGS,
    COMMON_FLAGS,
    PAGE_TOKENS,
    TOOL_SECONDS,
    UNCACHED_FLAGS,
    WORKLOAD,
    DemoError,
    make_model,
    shown,
    working_directory,
)
from examples.serving import CPU_ENVIRONMENT, Server

START_S = 20.0


class Cluster:
    """Two servers, one store, one index.

    Args:
        directory: for the model, the store and the logs.
        index: the address of Redis.
    """

    def __init__(self, directory: Path, index: str) -> None:
        self._directory = directory
        self._began = time.monotonic()
        self.say("making a small model with random weights")
        self.model = make_model(directory / "model")
        # On two cores, whose every thread is busy, Redis is not asked to answer within 5 ms.
        settings = {
            "root": str(directory / "store"),
            "capacity": "1GiB",
            "index": index,
            "index_timeout_s": 1.0,
            # Servers of one machine have nobody else to ask, and an agent would outlive them.
            "node": "off",
        }
        self._flags = (
            *(*COMMON_FLAGS, *CACHED_FLAGS),
            *("--hicache-storage-backend-extra-config", json.dumps(settings)),
        )

    def server(self, name: str) -> Server:
        """One node."""
        return Server(self.model, self._flags, self._directory / f"{name}.log", CPU_ENVIRONMENT)

    def plain(self) -> Server:
        """A server without any cache."""
        flags = (*COMMON_FLAGS, *UNCACHED_FLAGS)
        return Server(self.model, flags, self._directory / "plain.log", CPU_ENVIRONMENT)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)


def run(directory: Path, turns: int) -> None:
    """Everything.

    Raises:
        DemoError, ServerError: something did not hold.
    """
    with redis_server(directory) as index:
        cluster = Cluster(directory, index)
        cluster.say(f"two SGLang servers start, with the index at {index}")
        session = Session(WORKLOAD)
        where = []
        with cluster.server("a") as a, cluster.server("b") as b:
            for number in range(turns):
                # Half on the first, then the second, and from then on each in turn.
                moves = max(0, number - turns // 2 + 1)
                name, server = ("b", b) if moves % 2 else ("a", a)
                where.append(name)
                turn = session.step(Endpoint(f"{server.url}/v1"))
                cluster.say(
                    f"  turn {turn.number} on {name}: {turn.prompt_tokens} prompt tokens, "
                    f"{turn.storage_tokens} of them from storage"
                )
                time.sleep(TOOL_SECONDS)
        cluster.say("the same session on a server without any cache")
        reference = Session(WORKLOAD)
        with cluster.plain() as plain:
            for _ in range(turns):
                reference.step(Endpoint(f"{plain.url}/v1"))
    print()
    print(f"{session_heading()}   server  same answer")
    for turn, other, name in zip(session.turns, reference.turns, where, strict=True):
        same = "yes" if turn.answer == other.answer else "NO"
        print(f"{row(turn)} {name:>8}  {same:>11}")
    print()
    for i, (turn, other) in enumerate(zip(session.turns, reference.turns, strict=True)):
        if turn.answer != other.answer:
            raise DemoError(f"Turn {turn.number} was answered otherwise without a cache")
        if i and where[i] != where[i - 1]:
            before = session.turns[i - 1].prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
            if (turn.cached_tokens or 0) < before or not turn.storage_tokens:
                raise DemoError(
                    f"Turn {turn.number} moved to another server, where {turn.cached_tokens} "
                    f"tokens were cached, {turn.storage_tokens} of them in storage; the "
                    f"{before} of the prompt before should be there"
                )
    print("Every answer is right, and each move of the session went on from storage.")


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """A redis-server on a free port of this machine: its address.

    Raises:
        DemoError: it does not start.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise DemoError("This needs redis-server: apt-get install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise DemoError(f"redis-server does not start: see {directory / 'redis.log'}")
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="demo-cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=6, help="of the session (default 6)")
    parser.add_argument("--keep", type=Path, help="new directory to leave store and logs in")
    options = parser.parse_args(arguments)
    if options.turns < 2:
        parser.error("a session that moves has at least 2 turns")

    def show() -> None:
        with working_directory(options.keep) as directory:
            run(directory, options.turns)

    return shown(show, keeps=options.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
