"""A real server with the index in Redis: its machine has an agent, which reads what it stored."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.machine import MachineDir
from dualpath_sglang.transport.base import End, FetchRequest, StridedDestination
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_storage import pieces_of
from tests.support.redis_server import RedisServer
from tests.support.server import Server, hicache_flags, random_tokens
from tests.support.stores import geometries, keys_of
from tests.support.streaming import PAGE_TOKENS, SETTINGS, StreamingServer, wait_for
from tests.transport.peers import Fetched

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
PAGES = len(PROMPT) // PAGE_TOKENS
SOON_S = 60.0


def settings(folder: Path, redis: RedisServer) -> dict[str, object]:
    return {
        "index": redis.url,
        "index_timeout_s": 2.0,
        "node": "auto",
        "node_dir": str(folder / "machine"),
        "node_memory": "64MiB",
    }


def ask(config: DualPathConfig, machine: MachineDir) -> bool:
    """Whether the agent has all pages of the prompt; each must be what the store holds."""
    info = machine.info()
    assert info is not None
    root = config.store_options().root
    of = geometries(root)["kv"]
    keys = keys_of(PROMPT, PAGE_TOKENS)
    with KVCache(config.store_options(), index=config.index_source()) as cache:
        secret = cache.index.secret()
        stored = memoryview(bytearray(len(keys) * of.block_bytes))
        size = of.block_bytes
        views = [pieces_of(stored[i * size : (i + 1) * size], of) for i in range(len(keys))]
        if not all(cache.read(cache.attach(of, writer=False), keys, views)):
            return False
    connection = Connection(PeerAddress(info.host, info.port, secret), time.monotonic() + SOON_S)
    memory = memoryview(bytearray(len(stored)))
    place = StridedDestination.of_blocks(memory, of.layer_bytes, of.layers)
    request = FetchRequest(of.id_bytes, keys, 0, of.layers, SOON_S)
    fetched = Fetched(request, place)
    fetch = connection.fetch(request, place, fetched)
    assert fetch.wait(SOON_S)
    connection.close()
    assert fetched.ends == [End.OK]
    if fetched.lacking:
        return False
    assert memory == stored
    return True


@pytest.mark.parametrize("mode", ["streaming", pytest.param("hicache", marks=pytest.mark.slow)])
def test_a_server_has_an_agent_that_reads_what_it_stored(
    mode: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    with RedisServer() as redis:
        own = settings(tmp_path, redis)
        root = tmp_path / "store"
        server: Server
        if mode == "streaming":
            server = StreamingServer(model("qwen3"), tmp_path, settings=own)
        else:
            extra = {**SETTINGS, **own, "root": str(root), "prefetch_threshold": PAGE_TOKENS}
            flags = hicache_flags("dualpath", extra)
            server = Server(model("qwen3"), flags, log=tmp_path / "server.log")
        with server:
            config = DualPathConfig.load({**SETTINGS, **own, "root": str(root), "read_only": True})
            options = config.node_options()
            assert options is not None
            machine = MachineDir(options.base, options.store)
            server.generate(PROMPT, 1)
            wait_for(lambda: machine.info() is not None, SOON_S)
            wait_for(lambda: ask(config, machine), SOON_S)
            first = machine.info()
            assert first is not None
            os.kill(first.pid, signal.SIGKILL)
            wait_for(lambda: not psutil.pid_exists(first.pid), SOON_S)
            wait_for(lambda: machine.info() is not None, SOON_S)
            wait_for(lambda: ask(config, machine), SOON_S)
            second = machine.info()
            assert second is not None
            assert server.alive
        os.kill(second.pid, signal.SIGKILL)
