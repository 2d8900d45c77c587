"""The hosts of one run: their networks, the store, Redis, the processes; all gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster.lines import Peer
from bench.cluster.spec import HostSpec, Peering
from bench.measure import BenchError
from bench.netns import Network

STORAGE, COMPUTE, CONTROL = "storage", "compute", "control"
_STORE_HOST = "s0"
_NET = {STORAGE: "10.81.0", COMPUTE: "10.82.0", CONTROL: "10.83.0"}
_BLOCKS_PORT, _REDIS_PORT = 9000, 6379
_START_S = 60.0
_ENGINE_S = 300.0
"""A real server takes its time to begin."""
_MTU = 9000
_PREFIX = ".bench-cluster-"
_HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a bed is made of.

    Args:
        prefill, decode: hosts of each kind.
        storage_bit_s: rate of a storage NIC; a compute NIC has ``compute_ratio`` times that.
        loads: hits that a PE loads at a time.
        engine: the module of the PE's process.
    """

    prefill: int
    decode: int
    storage_bit_s: float = 200e6
    compute_ratio: float = 8.0
    loads: int = 4
    engine: str = "engine"

    @property
    def name(self) -> str:
        """Such as ``2P4D``."""
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True)
class Bed:
    """What runs.

    Args:
        root: of the store.
        store: on the storage host; writes what a run finds in the store.
        prefill, decode: the processes of the hosts.
    """

    net: Network
    root: Path
    store: Peer
    prefill: Sequence[Peer]
    decode: Sequence[Peer]

    @property
    def hosts(self) -> list[Peer]:
        """Those with a shaped storage NIC."""
        return [*self.prefill, *self.decode]


@contextlib.contextmanager
def bed(shape: Shape, model: str, system: str, directory: Path, agent_bytes: int) -> Iterator[Bed]:
    """Hosts that have nothing in their store yet.

    Args:
        agent_bytes: memory for blocks of each DE's agent.
        directory: where the store is put for the time.

    Raises:
        BenchError: something does not come up.
        NetworkError: there can be no network.
    """
    if shutil.which("redis-server") is None:
        raise BenchError("redis-server is not installed")
    with contextlib.ExitStack() as stack:
        net = Network("cluster")
        root = Path(stack.enter_context(_directory(directory)))
        stack.enter_context(net)
        _connect(net, shape)
        redis = _redis(net)
        blocks = _blocks(net, root)
        peers: list[Peer] = []
        stack.callback(_close, peers)

        def start(module: str, host: str, spec: HostSpec) -> Peer:
            argv = [sys.executable, "-m", f"bench.cluster.{module}", spec.to_json()]
            pipe = subprocess.PIPE
            process = net.popen(host, argv, stdin=pipe, stdout=pipe, text=True, cwd=_HERE)
            peers.append(Peer(host, process))
            return peers[-1]

        there = HostSpec(_STORE_HOST, model, str(root), redis, agent_bytes=agent_bytes)
        spec = replace(there, blocks=blocks, system=system, loads=shape.loads)
        store = start("decode", _STORE_HOST, there)
        store.ready(_START_S)  # it makes the store
        decode = [
            start("decode", name, replace(spec, name=name, address=_address(name, COMPUTE, shape)))
            for name in _names("d", shape.decode)
        ]
        ports = [int(peer.ready(_START_S)["port"]) for peer in decode]
        agents = [
            Peering(peer.name, _address(peer.name, COMPUTE, shape), port)
            for peer, port in zip(decode, ports, strict=True)
        ]
        prefill = [
            start(shape.engine, name, replace(spec, name=name, peers=agents,
                                          address=_address(name, COMPUTE, shape)))
            for name in _names("p", shape.prefill)
        ]  # fmt: skip
        for peer in prefill:
            peer.ready(_ENGINE_S)
        yield Bed(net, root, store, prefill, decode)


def _close(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.hang_up()  # all of them end at the same time
    for peer in peers:
        peer.close()


@contextlib.contextmanager
def _directory(where: Path) -> Iterator[str]:
    """A directory that goes, even while something in it still does; and those of killed runs."""
    for left in where.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}{i}" for i in range(count)]


def _address(host: str, network: str, shape: Shape) -> str:
    hosts = [_STORE_HOST, *_names("p", shape.prefill), *_names("d", shape.decode)]
    return f"{_NET[network]}.{hosts.index(host) + 1}"


def _connect(net: Network, shape: Shape) -> None:
    storage, compute = shape.storage_bit_s, shape.storage_bit_s * shape.compute_ratio
    for name in [_STORE_HOST, *_names("p", shape.prefill), *_names("d", shape.decode)]:
        net.host(name)
        net.join(name, CONTROL, f"{_address(name, CONTROL, shape)}/24")
        if name == _STORE_HOST:
            net.join(name, STORAGE, f"{_address(name, STORAGE, shape)}/24")
            continue
        net.join(name, STORAGE, f"{_address(name, STORAGE, shape)}/24", f"{storage:.0f}bit")
        net.join(name, COMPUTE, f"{_address(name, COMPUTE, shape)}/24", f"{compute:.0f}bit")
    _jumbo(net, shape)


def _jumbo(net: Network, shape: Shape) -> None:
    """Large packets, as such networks have: each costs the processors as much as a small one."""
    for name in [_STORE_HOST, *_names("p", shape.prefill), *_names("d", shape.decode)]:
        for network in (STORAGE,) if name == _STORE_HOST else (STORAGE, COMPUTE):
            for port in net.cable(name, network).ports:
                argv = ["ip", "-n", port.namespace, "link", "set", port.device, "mtu", str(_MTU)]
                subprocess.run(argv, check=True, capture_output=True, timeout=_START_S)


def _redis(net: Network) -> str:
    """Start the index; its address."""
    host = f"{_NET[CONTROL]}.1"
    options = ["--bind", host, "--port", str(_REDIS_PORT), "--save", "", "--appendonly", "no"]
    # Nothing else is in its namespace.
    argv = ["setpriv", "--pdeathsig", "KILL", "redis-server", *options, "--protected-mode", "no"]
    null = subprocess.DEVNULL
    process = net.popen(_STORE_HOST, argv, stdout=null, stderr=null, cwd="/")
    end = time.monotonic() + _START_S
    ping = ["redis-cli", "-h", host, "-p", str(_REDIS_PORT), "ping"]
    while "PONG" not in net.run(_STORE_HOST, ["sh", "-c", f"{' '.join(ping)} 2>&1 || true"]):
        if process.poll() is not None or time.monotonic() > end:
            raise BenchError("Redis does not come up")
        time.sleep(0.05)
    return f"redis://{host}:{_REDIS_PORT}"


def _blocks(net: Network, root: Path) -> tuple[str, int]:
    """Start the block server; where it listens."""
    host = f"{_NET[STORAGE]}.1"
    argv = [sys.executable, "-m", "bench.cluster.block_server", str(root), host, str(_BLOCKS_PORT)]
    pipe = subprocess.PIPE
    process = net.popen(_STORE_HOST, argv, stdin=pipe, stdout=pipe, text=True, cwd=_HERE)
    if process.stdout is None or not process.stdout.readline():
        raise BenchError("The block server does not come up")
    return host, _BLOCKS_PORT
