"""A server's part in its machine: an agent runs, whatever becomes of the one before."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.node import starter
from dualpath_sglang.node.starter import Membership
from dualpath_sglang.transport.base import End
from tests.node.agents import AgentProcess, Place, fetch, wait_for
from tests.support.blocks import chain, geometry

KEYS = chain("a", 20)
SERVER = """
import json, sys
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.node.starter import Membership
membership = Membership(DualPathConfig.load(json.loads(sys.argv[1])))
print("member", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def join(place: Place) -> Iterator[Callable[..., Membership]]:
    """`join(**settings)`: a member of the place, and every agent gone after the test."""
    members: list[Membership] = []
    seen: set[int] = set()

    def make(**settings: str) -> Membership:
        members.append(Membership(DualPathConfig.load({**place.extra(), **settings})))
        return members[-1]

    yield make
    for member in members:
        member.close()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "node" in process.cmdline():
                seen.add(process.pid)
                process.kill()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in seen), "the end of the agents")


def started(place: Place) -> int:
    """The process of the agent that listens."""
    return place.info().pid


def test_an_agent_is_started_and_serves(
    place: Place, join: Callable[..., Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry()
    place.store(of, KEYS)
    monkeypatch.setenv("DUALPATH_NODE_NAME", "not-this-one")
    kept_open = socket.create_server(("127.0.0.1", 0))
    os.set_inheritable(kept_open.fileno(), True)
    join(node_secret="a secret of this test")
    pid = started(place)
    connection = place.connect(b"a secret of this test")
    fetched = fetch(connection, of, KEYS)
    assert fetched.ends == [End.OK]
    assert fetched.right(of) == set(range(20))
    connection.close()
    assert place.info().name == "here", "what the server was given counts, not the environment"
    process = psutil.Process(pid)
    told = " ".join(process.cmdline()) + " ".join(process.environ().values())
    assert "a secret of this test" not in told
    assert not any(c.laddr == kept_open.getsockname() for c in process.net_connections())
    assert os.getsid(pid) == pid, "no signal for the server's group reaches it"
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
    kept_open.close()


def test_an_agent_that_is_killed_is_started_again_and_leaves_no_zombie(
    place: Place, join: Callable[..., Membership], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place.store(geometry(), KEYS[:1])
    join()
    first = started(place)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(first), "the end of it, and of its zombie")
    wait_for(lambda: place.machine().info(), "another")
    second = started(place)
    assert second != first
    messages = [record.getMessage() for record in caplog.records]
    assert sum("ended with status -9" in message for message in messages) == 1
    # An agent that was told to end is reaped as well.
    os.kill(second, signal.SIGTERM)
    wait_for(lambda: not psutil.pid_exists(second), "the end of it, and of its zombie")
    wait_for(lambda: place.machine().info(), "a third")


@pytest.mark.slow
def test_of_many_servers_one_starts_the_agent(
    place: Place, join: Callable[..., Membership]
) -> None:
    place.store(geometry(), KEYS[:1])
    members = [join() for _ in range(5)]
    pid = started(place)
    time.sleep(2 * starter.LOOK_EVERY_S)
    agents = [p.pid for p in psutil.Process().children() if "node" in p.cmdline()]
    assert agents == [pid]
    for member in members[:4]:
        member.close()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: place.machine().info(), "one by whoever is left")


def test_an_agent_that_an_operator_started_is_left_alone(
    place: Place, join: Callable[..., Membership], start: Callable[..., AgentProcess]
) -> None:
    place.store(geometry(), KEYS[:1])
    agent = start(place)
    place.info()
    join()
    time.sleep(1.5 * starter.LOOK_EVERY_S)
    assert started(place) == agent.pid
    assert not [p for p in psutil.Process().children() if "--auto" in p.cmdline()]


def test_without_a_network_or_when_told_so_nothing_is_started(
    place: Place, join: Callable[..., Membership]
) -> None:
    off = join(node="off")
    assert off.queue is not None, "it counts in the queue of the machine nevertheless"
    alone = join(index="embedded")
    assert (alone.queue, alone.machine) == (None, None)
    time.sleep(1.5 * starter.LOOK_EVERY_S)
    assert not place.machine().running()
    assert not (place.machine().path / "agent.err").exists()


@pytest.mark.slow
def test_one_that_keeps_failing_is_tried_ever_more_rarely_with_one_line(
    place: Place,
    join: Callable[..., Membership],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    place.store(geometry(), KEYS[:1])
    spawned: list[float] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        spawned.append(time.monotonic())
        return real(*args, **kwargs)

    monkeypatch.setattr("dualpath_sglang.node.starter.subprocess.Popen", popen)
    join(node_listen="203.0.113.0/24")
    wait_for(lambda: len(spawned) >= 4, "four attempts")
    gaps = [later - earlier for earlier, later in itertools.pairwise(spawned)]
    assert gaps[1] >= 1.0
    assert gaps[2] >= 2.0
    told = [r.getMessage() for r in caplog.records if "status 2" in r.getMessage()]
    assert len(told) == 1
    assert "no address in the network 203.0.113.0/24" in told[0]


def test_a_directory_that_cannot_be_used_costs_a_line_and_no_more(
    place: Place, join: Callable[..., Membership], caplog: pytest.LogCaptureFixture
) -> None:
    open_to_all = place.folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    member = join(node_dir=str(open_to_all))
    assert (member.queue, member.machine) == (None, None)
    assert "Others may write to the directory" in caplog.text


def test_a_directory_that_was_removed_is_made_again(
    place: Place, join: Callable[..., Membership]
) -> None:
    place.store(geometry(), KEYS[:1])
    member = join()
    before = started(place)
    assert member.machine is not None
    path = member.machine.path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    wait_for(lambda: not psutil.pid_exists(before), "the end of an agent that nobody finds")
    wait_for(lambda: member.machine and member.machine.info(), "another")


@pytest.mark.slow
def test_the_agent_of_killed_servers_ends(place: Place, tmp_path: Path) -> None:
    """By itself, within half a minute or so, and only then."""
    place.store(geometry(), KEYS[:1])
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(place.extra())],
            env=place.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "member\n"
    agent = psutil.Process(started(place))
    for server in servers:
        server.kill()
        server.communicate()
    assert agent.is_running()
    wait_for(
        lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE,
        "the end of the agent",
        120.0,
    )
    log = (place.machine().path / "agent.log").read_text()
    assert re.search(r"Nobody on this machine uses the store any more", log)
