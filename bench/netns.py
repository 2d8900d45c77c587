"""Several hosts on one machine: network namespaces, joined by bridges, with shaped links.

    with Network("demo") as net:
        for number, name in enumerate(("p0", "d0"), 1):
            net.host(name)
            net.join(name, "storage", f"10.81.0.{number}/24", rate="200mbit")
        server = net.popen("d0", [sys.executable, "-m", "http.server"])
        net.link_down("d0", "storage")

Names carry the process that made them. Leaving the ``with`` kills what still runs in the hosts and
removes them; what a killed run left behind goes when the next one of that prefix starts. A process
that SIGTERM is to end in order calls :func:`end_on_sigterm` first.

A shaped link sends at most its rate in either direction, and no packets larger than it carries in
0.1 ms (or one MTU): the kernel would otherwise hand over 64 KiB at a time, which no wire does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dualpath_sglang.qos.rates import parse_rate

MTU = 1500
_TOOLS = ("ip", "tc", "nsenter")
_SWITCH = "switch"
_STEP_S = 20.0
_KILL_S = 10.0
_BURST_S = 0.001
_QUEUE_S = 0.01
_PACKET_S = 0.0001
_MOST_SEGMENTS = 43
"""In 64 KiB, the most that the kernel puts into one."""


class NetworkError(Exception):
    """The network cannot be had or changed as asked; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a cable."""

    namespace: str
    device: str


@dataclass(frozen=True, slots=True)
class Cable:
    """Between a host and a network; each end is shaped in the direction in which it sends."""

    host: Port
    switch: Port

    @property
    def ports(self) -> tuple[Port, Port]:
        return self.host, self.switch


class Network:
    """Hosts and the networks between them, for the length of a ``with``. One thread at a time.

    Args:
        prefix: of the namespaces' names; lower case letters and digits.

    Raises:
        NetworkError: not root, or the tools are missing.
    """

    def __init__(self, prefix: str) -> None:
        if re.fullmatch(r"[a-z][a-z0-9]{0,15}", prefix) is None:
            raise NetworkError(f"A prefix is a short word of letters and digits, unlike {prefix!r}")
        if os.geteuid() != 0:
            raise NetworkError("Network namespaces need root")
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NetworkError(f"Not installed here: {', '.join(missing)}")
        self._prefix = prefix
        me = os.getpid()
        self._base = f"{prefix}-{me}-{_started(me)}-{secrets.token_hex(3)}"
        self._hosts: list[str] = []
        self._bridges: list[str] = []
        self._cables: dict[tuple[str, str], Cable] = {}
        self._shaped: set[Port] = set()
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Network:
        remove_leftovers(self._prefix)
        try:
            self._add_namespace(_SWITCH)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the hosts and remove everything."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # hangs in the kernel
                process.wait(_KILL_S)
        for name in (*self._hosts, _SWITCH):
            _remove_namespace(self.namespace(name))
        self._processes.clear()
        self._hosts.clear()
        self._cables.clear()

    # -- shape ------------------------------------------------------------------------------

    def host(self, name: str) -> None:
        """Add a host that can reach itself alone.

        Raises:
            NetworkError: the name is none, or taken.
        """
        _check_name(name)
        if name == _SWITCH or name in self._hosts:
            raise NetworkError(f"There is a host {name} already")
        self._hosts.append(name)
        self._add_namespace(name)

    def join(self, host: str, network: str, address: str, rate: str | None = None) -> None:
        """Connect a host to a network, which is made when it is the first there.

        Args:
            network: also the name of the host's device.
            address: IPv4 or IPv6, with the length of the prefix.
            rate: such as ``200mbit``, in each direction; None for no limit.

        Raises:
            NetworkError: an argument makes no sense, or it has joined before.
        """
        _check_name(network)
        namespace = self._namespace_of(host)
        if (host, network) in self._cables:
            raise NetworkError(f"{host} has joined the network {network} already")
        switch = self.namespace(_SWITCH)
        if network not in self._bridges:
            _ip(switch, "link", "add", network, "type", "bridge")
            _ip(switch, "link", "set", network, "up")
            self._bridges.append(network)
        cable = Cable(Port(namespace, network), Port(switch, f"port{len(self._cables)}"))
        _ip(None, "link", "add", network, "netns", namespace, "mtu", str(MTU),
            "type", "veth", "peer", "name", cable.switch.device, "netns", switch)  # fmt: skip
        self._cables[host, network] = cable
        _ip(switch, "link", "set", cable.switch.device, "master", network, "up")
        self.add_address(host, network, address)
        _ip(namespace, "link", "set", network, "up")
        if rate is not None:
            self.set_rate(host, network, rate)

    def add_address(self, host: str, network: str, address: str) -> None:
        """One more address of a host there."""
        try:
            at = ipaddress.ip_interface(address)
        except ValueError as error:
            raise NetworkError(f"An address has a prefix, such as 10.0.0.1/24: {error}") from None
        port = self.cable(host, network).host
        # Nobody else can have it, and looking for them would take a second.
        extra = ["nodad"] if at.version == 6 else []
        _ip(port.namespace, "addr", "add", str(at), "dev", port.device, *extra)

    def set_rate(self, host: str, network: str, rate: str | None) -> None:
        """Change what a link carries, in each direction; None takes the limit away."""
        for port in self.cable(host, network).ports:
            if rate is None:
                self._shaped.discard(port)
                _unshape(port)
            else:
                _shape(port, rate, anew=port not in self._shaped)
                self._shaped.add(port)

    def link_down(self, host: str, network: str) -> None:
        """Pull the cable: what is sent is lost, at both ends, and nobody is told."""
        # At the switch's end, so that the host keeps its addresses and routes.
        self._set_link(host, network, "down")

    def link_up(self, host: str, network: str) -> None:
        """Plug it in again."""
        self._set_link(host, network, "up")

    def _set_link(self, host: str, network: str, state: str) -> None:
        port = self.cable(host, network).switch
        _ip(port.namespace, "link", "set", port.device, state)

    def cable(self, host: str, network: str) -> Cable:
        """The namespaces and devices at both ends, for what this class does not do.

        Raises:
            NetworkError: the host has not joined.
        """
        try:
            return self._cables[host, network]
        except KeyError:
            raise NetworkError(f"{host} is not on a network {network}") from None

    def namespace(self, host: str) -> str:
        """Name of a host's namespace."""
        return f"{self._base}-{host}"

    # -- processes --------------------------------------------------------------------------

    def popen(
        self, host: str | Port, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host; its number is the command's own, so that it can be killed.

        Args:
            host: or one end of a cable, which may be the switch's.
            options: of :class:`subprocess.Popen`.
        """
        command = [*_inside(self._namespace_of(host)), *map(str, argv)]
        process: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    def run(self, host: str | Port, argv: Sequence[str | Path], timeout_s: float = _STEP_S) -> str:
        """Run a command in a host to its end; what it printed.

        Args:
            host: or one end of a cable, which may be the switch's.

        Raises:
            NetworkError: it failed, or took too long.
        """
        return _run([*_inside(self._namespace_of(host)), *map(str, argv)], timeout_s)

    def _namespace_of(self, host: str | Port) -> str:
        if isinstance(host, Port):
            return host.namespace
        if host not in self._hosts:
            raise NetworkError(f"There is no host {host}")
        return self.namespace(host)

    def _add_namespace(self, host: str) -> None:
        namespace = self.namespace(host)
        _ip(None, "netns", "add", namespace)
        _ip(namespace, "link", "set", "lo", "up")


def remove_leftovers(prefix: str) -> list[str]:
    """Remove what killed runs left: their processes and namespaces, whose names come back."""
    gone = []
    for namespace in _namespaces():
        match = re.fullmatch(rf"{prefix}-([0-9]+)-([0-9]+)-[0-9a-f]+-[a-z0-9]+", namespace)
        if match is not None and _started(int(match.group(1))) != int(match.group(2)):
            _remove_namespace(namespace)
            gone.append(namespace)
    return gone


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: with all ``with`` blocks left in order.

    And Ctrl-C, too, in a job that a shell started in the background to ignore it.
    """

    def end(number: int, frame: object) -> NoReturn:
        del frame
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _shape(port: Port, rate: str, *, anew: bool) -> None:
    """Limit what a port sends; not anew, what waits there stays."""
    try:
        byte_s = parse_rate(rate) / 8
    except ValueError as error:
        raise NetworkError(str(error)) from None
    burst, queue = max(3 * MTU, byte_s * _BURST_S), max(1 << 18, byte_s * _QUEUE_S)
    segments = min(max(1, int(byte_s * _PACKET_S) // MTU), _MOST_SEGMENTS)
    _ip(port.namespace, "link", "set", port.device, "gso_max_segs", str(segments))
    at, how = ("dev", port.device), "change"
    if anew:
        how = "add"
        _unshape(port)
        _tc(port, "qdisc", "add", *at, "root", "handle", "1:", "htb", "default", "1")
    _tc(port, "class", how, *at, "parent", "1:", "classid", "1:1", "htb", "quantum", "20000",
        "rate", rate, "burst", f"{burst:.0f}", "cburst", f"{burst:.0f}")  # fmt: skip
    _tc(port, "qdisc", how, *at, "parent", "1:1", "handle", "10:", "bfifo",
        "limit", f"{queue:.0f}")  # fmt: skip


def _unshape(port: Port) -> None:
    with contextlib.suppress(NetworkError):  # there was none
        _tc(port, "qdisc", "del", "dev", port.device, "root")


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine started; None when none runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip(None, "netns", "list").splitlines() if line.strip()]


def _remove_namespace(namespace: str) -> None:
    """With the processes in it. Nothing happens when there is none."""
    if namespace not in _namespaces():
        return
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        pids = [int(pid) for pid in _ip(None, "netns", "pids", namespace).split()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(NetworkError):  # another start removes leftovers as well
        _ip(None, "netns", "del", namespace)


def _check_name(name: str) -> None:
    if re.fullmatch(r"[a-z][a-z0-9]{0,14}", name) is None:
        raise NetworkError(f"A name has up to 15 letters and digits, unlike {name!r}")


def _inside(namespace: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}", "--"]


def _ip(namespace: str | None, *args: str) -> str:
    return _run(["ip", *(["-n", namespace] if namespace else []), *args], _STEP_S)


def _tc(port: Port, *args: str) -> str:
    return _run([*_inside(port.namespace), "tc", *args], _STEP_S)


def _run(command: Sequence[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{' '.join(command)} did not end in {timeout_s:.0f} s") from None
    except OSError as error:
        raise NetworkError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NetworkError(f"{' '.join(command)} failed: {said[-1] if said else done.returncode}")
    return done.stdout
