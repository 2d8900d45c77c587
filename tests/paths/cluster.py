"""A prefill node that reads, and decode nodes that read for it: caches of their own on one store.

All in one process, on one Redis, with real sockets between them; agents as processes are tested
with `dualpath node`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.throttle import HookedBackend
from dualpath_sglang.index import Report
from dualpath_sglang.index.redis.settings import RedisSettings
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.paths.peers import Nearby, PathOptions, Peers, Policy
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.transport.base import End, FetchRequest, Missing
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.server import Server, ServerOptions
from dualpath_storage import Geometry, StoreOptions
from tests.streaming.bed import MIB, Bed, Reads, eventually

SECRET = b"of the cluster"


def source(url: str) -> RedisSource:
    return RedisSource(RedisSettings.parse(url), lookup_timeout_s=2.0)


class DecodeNode:
    """A cache, an agent and a server."""

    def __init__(self, name: str, root: Path, url: str, memory_bytes: int) -> None:
        self.name = name
        self.reads = Reads()
        self.cache = KVCache(
            StoreOptions(root, 256 * MIB, read_only=True, direct_io="off"),
            HookedBackend(root, self.reads),
            index=source(url),
        )
        self.agent = Agent(self.cache, memory_bytes, StreamOptions(8 * MIB, 4, probe_s=0))
        self.server = Server(self.agent, ServerOptions(secret=SECRET))
        self.wire = Wire(self.server.port)
        self.told = 0

    def report(self) -> Report:
        """What its process would tell."""
        self.told += 1
        load = self.agent.load()
        return {
            "role": "node",
            "node_id": self.name,
            "host": self.name,
            "address": f"127.0.0.1:{self.wire.port}",
            "protocol": VERSION,
            "read_queue_bytes": load.bytes,
            "read_queue_tokens": load.tokens,
            "cached_bytes": self.agent.blocks.used_bytes,
            "up_s": self.told,
        }

    def warm(self, of: Geometry, keys: Sequence[bytes]) -> None:
        """Have blocks in memory, as after a fetch of another node."""
        served = self.agent.serve(FetchRequest(of.id_bytes, keys, 0, of.layers, 20.0))
        assert not isinstance(served, End)
        with served as answer:
            assert not [part for part in answer if isinstance(part, Missing)]
        self.reads.seen.clear()

    def close(self) -> None:
        self.reads.also = None
        self.wire.close()
        self.server.close()
        self.agent.close()
        self.cache.close()


class Wire:
    """What lies between two nodes, and may be bad: it passes bytes on, through a hook."""

    def __init__(self, target: int) -> None:
        self.hook: Callable[[bytes], bytes] = lambda data: data
        """Of what the agent sends; may block, may raise OSError to cut the connection."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._socks += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, hooked: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self.hook(data) if hooked else data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()
        for sock in self._socks:
            sock.close()


class Cluster:
    """See the module. Use as a context.

    Args:
        decode: how many decode nodes.
        own: whether the prefill node has an agent of its own, whose memory it can read.
        policy: of the prefill node.
    """

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        decode: int = 1,
        own: bool = False,
        policy: Policy = "split",
        memory_bytes: int = 64 * MIB,
        staging_bytes: int = 4 * MIB,
        hedge_after: float = 0.25,
        floor_bytes: int = 0,
    ) -> None:
        self.present = True
        """Whether the decode nodes are reported."""
        self.peers: Peers
        self.own: DecodeNode | None = None
        options = PathOptions(
            policy, floor_bytes, secret=lambda _: SECRET, own=self._own_agent, machine="own"
        )

        def paths(cache: KVCache) -> Peers:
            del cache
            self.peers = Peers(self._reports, options)
            return self.peers

        self._stack = contextlib.ExitStack()
        self.nodes: list[DecodeNode] = []
        stream = StreamOptions(staging_bytes, 4, probe_s=0, hedge_after=hedge_after)
        self.prefill = self._stack.enter_context(Bed(root, stream, index=source(url), paths=paths))
        self._stack.callback(self._close_nodes)
        for i in range(decode):
            self.nodes.append(DecodeNode(f"d{i}", root, url, memory_bytes))
        if own:
            self.own = DecodeNode("own", root, url, memory_bytes)
            self._stack.callback(self.own.close)
            self.local = LocalServer(self.own.agent, root.parent / "own.sock")
            self._stack.callback(self.local.close)
        self.connected(decode)

    def _own_agent(self) -> Nearby | None:
        return None if self.own is None else Nearby(self.own.name, self.local.path)

    def _reports(self) -> dict[str, Report]:
        nodes = [*self.nodes, *([self.own] if self.own is not None else [])]
        return {node.name: node.report() for node in nodes if self.present}

    def connected(self, count: int) -> None:
        """Until that many nodes can be asked."""
        eventually(lambda: len(self.peers._usable(None)) == count, f"{count} nodes are connected")

    def _close_nodes(self) -> None:
        self.peers.close()
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def stats(self) -> Any:
        """Of the prefill node's streamer."""
        return self.prefill.streamer.stats()

    def idle(self) -> None:
        """Until nothing is queued anywhere, which also says that nothing was counted twice."""
        nodes = [*self.nodes, *([self.own] if self.own is not None else [])]
        queues = [self.prefill.cache.read_queue, *(n.cache.read_queue for n in nodes)]
        eventually(
            lambda: all((q.bytes, q.tokens) == (0, 0) for q in queues), "read queues are empty"
        )
        eventually(lambda: self.stats.staging_used_bytes == 0, "staging memory is given back")


def flip_one_bit_after(size: int) -> Callable[[bytes], bytes]:
    """A hook that hurts one byte, once so many have passed."""
    passed = 0

    def hook(data: bytes) -> bytes:
        nonlocal passed
        at, passed = size - passed, passed + len(data)
        if 0 <= at < len(data):
            hurt = bytearray(data)
            hurt[at] ^= 0x10
            return bytes(hurt)
        return data

    return hook


def stop_after(size: int, go_on: threading.Event) -> Callable[[bytes], bytes]:
    """A hook that lets nothing pass after so many bytes until it may go on."""
    passed = 0

    def hook(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        if passed >= size:
            go_on.wait(60.0)
        return data

    return hook


def soon() -> float:
    return time.monotonic() + 20.0
