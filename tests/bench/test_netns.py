"""Networks between namespaces: reachable, shaped, cut, and gone afterwards. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import netns
from bench.netns import Network, NetworkError

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "dptest"

ECHO = """
import socket, sys
six = ":" in sys.argv[1]
family = socket.AF_INET6 if six else socket.AF_INET
server = socket.create_server((sys.argv[1], 9000), family=family, dualstack_ipv6=six)
print("up", flush=True)
while True:
    sock, _ = server.accept()
    with sock:
        while data := sock.recv(1 << 16):
            sock.sendall(data[:1])
"""
SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 9000), timeout=20)
sock.sendall(b"x"); sock.recv(1)
begin, size = time.monotonic(), int(sys.argv[2])
sock.settimeout(60)
sock.sendall(bytes(size)); sock.shutdown(socket.SHUT_WR)
while sock.recv(1 << 16):
    pass
print(8e-6 * size / (time.monotonic() - begin))
"""
PING = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 9000), timeout=float(sys.argv[2]))
sock.sendall(b"x"); sock.recv(1)
"""


def namespaces() -> list[str]:
    out = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in out.stdout.splitlines() if line.startswith(f"{PREFIX}-")]


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(PREFIX) as network:
        for number, name in enumerate(("p0", "d0"), 1):
            network.host(name)
            network.join(name, "storage", f"10.81.0.{number}/24", rate="100mbit")
            network.join(name, "compute", f"fd81::{number}/64")
        yield network


def echo(net: Network, address: str) -> None:
    server = net.popen("d0", [sys.executable, "-c", ECHO, address], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"up\n"


def test_a_shaped_link_carries_no_more_than_its_rate(net: Network) -> None:
    echo(net, "10.81.0.2")
    argv = [sys.executable, "-c", SEND, "10.81.0.2", str(6 << 20)]
    assert float(net.run("p0", argv, 90)) < 101
    net.set_rate("d0", "storage", "20mbit")  # the receiver's link counts as well
    assert float(net.run("p0", argv, 90)) < 25
    net.set_rate("d0", "storage", None)
    assert "htb" not in net.run("d0", ["tc", "qdisc", "show", "dev", "storage"])


def test_networks_are_apart_and_carry_ipv6(net: Network) -> None:
    echo(net, "::")
    net.run("p0", [sys.executable, "-c", PING, "fd81::2", "20"])
    net.run("p0", [sys.executable, "-c", PING, "10.81.0.2", "20"])
    net.link_down("d0", "storage")
    net.run("p0", [sys.executable, "-c", PING, "fd81::2", "20"])


def test_a_cut_link_carries_nothing_until_it_is_up_again(net: Network) -> None:
    echo(net, "10.81.0.2")
    argv = [sys.executable, "-c", PING, "10.81.0.2"]
    net.run("p0", [*argv, "20"])
    net.link_down("d0", "storage")
    with pytest.raises(NetworkError, match=r"timed out|No route to host"):
        net.run("p0", [*argv, "1"])
    net.link_up("d0", "storage")
    net.run("p0", [*argv, "20"])


def test_processes_and_namespaces_are_gone_afterwards() -> None:
    with Network(PREFIX) as net:
        net.host("p0")
        inside = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('up', flush=1)"
        parent = net.popen("p0", [sys.executable, "-c", inside], stdout=subprocess.PIPE)
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        assert parent.wait(30) == 0
        child = int(netns._ip(None, "netns", "pids", net.namespace("p0")))
        mine = net.namespace("p0")
        assert mine in namespaces()
    assert mine not in namespaces()
    assert netns._started(child) is None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_a_run_that_is_ended_leaves_behind(how: signal.Signals) -> None:
    code = (
        "import time; from bench.netns import Network, end_on_sigterm; end_on_sigterm()\n"
        f"with Network('{PREFIX}') as net:\n"
        "  net.host('p0'); net.popen('p0', ['sleep', '600']); print('up', flush=True)\n"
        "  time.sleep(600)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'storage'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert run.stdout is not None and run.stdout.readline() == b"up\n"
    of_run = [name for name in namespaces() if name.startswith(f"{PREFIX}-{run.pid}-")]
    assert len(of_run) == 2
    sleeping = int(
        netns._ip(None, "netns", "pids", of_run[-1] if "p0" in of_run[-1] else of_run[0])
    )
    netns.remove_leftovers(PREFIX)  # of those that run, nothing
    assert set(of_run) <= set(namespaces())
    run.send_signal(how)
    run.wait(60)
    if how == signal.SIGKILL:
        assert set(netns.remove_leftovers(PREFIX)) >= set(of_run)
    assert not set(of_run) & set(namespaces())
    assert netns._started(sleeping) is None


def test_mistakes_are_told_in_a_sentence(net: Network) -> None:
    with pytest.raises(NetworkError, match="There is no host x9"):
        net.popen("x9", ["true"])
    with pytest.raises(NetworkError, match="p0 is not on a network lan"):
        net.link_down("p0", "lan")
    with pytest.raises(NetworkError, match="There is a host p0 already"):
        net.host("p0")
    with pytest.raises(NetworkError, match="has joined the network storage already"):
        net.join("p0", "storage", "10.81.0.9/24")
    with pytest.raises(NetworkError, match="A rate is a number and a unit"):
        net.set_rate("p0", "storage", "fast")
    with pytest.raises(NetworkError, match="false failed: 1"):
        net.run("p0", ["false"])
    with pytest.raises(NetworkError, match="A prefix is a short word"):
        Network("Not good")
