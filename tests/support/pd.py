"""Prefill and decode servers of one model over one store, each as if on a machine of its own.

    with PdCluster(model("qwen3"), tmp_path) as cluster:
        cold = cluster.generate(prompt)              # prefill computes, decode answers
        cluster.flush()                              # nothing is left but the store
        before = cluster.figures()
        assert cluster.generate(prompt).tokens == cold.tokens
        print(cluster.figures() - before)            # bytes read, written and sent

A real redis-server holds the index. Requests go to both servers at once, with SGLang's bootstrap
fields, as a router would send them; KV goes over Mooncake's TCP transport.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dualpath_sglang.index.base import Report
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry
from tests.node.agents import AgentProcess, Place, agents
from tests.support.pd_hooks import Transfers
from tests.support.redis_server import RedisServer
from tests.support.server import Answer, Server, free_port, hicache_flags
from tests.support.server_faults import Faults
from tests.support.stores import chain, corrupt, geometries
from tests.support.streaming import PAGE_TOKENS, SETTINGS, Background, wait_for

Mode = Literal["streaming", "hicache", "offload", "none"]
"""How a server uses DualPath; streaming: by the flag alone; offload: it stores what it decodes, and
restores nothing; none: not at all."""

ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
}
"""Where Mooncake listens."""

SHARED_FLAGS = (
    "--disaggregation-transfer-backend",
    "mooncake_tcp",
    # SGLang's overlapped schedule needs CUDA events here.
    "--disable-overlap-schedule",
    "--enable-metrics",
)


@dataclass(frozen=True, slots=True)
class PdAnswer:
    """What both servers said; the client of a router gets decode's."""

    decode: Answer
    prefill: Answer

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.decode.tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes, by the name of the machine; `after - before` is what happened in between.

    read, written: by the processes of a machine (its server's but the one that speaks HTTP, and its
    agent) through the kernel's file calls, as rchar and wchar of /proc/PID/io count them: Full
    Blocks with their 4 KiB headers, and some KiB of noise. Sockets are not part of it.
    sent: KV that prefill servers gave to Mooncake, without the 1600 bytes of metadata a request.
    """

    read: Mapping[str, int]
    written: Mapping[str, int]
    sent: int

    def __sub__(self, before: Figures) -> Figures:
        return Figures(
            {name: count - before.read.get(name, 0) for name, count in self.read.items()},
            {name: count - before.written.get(name, 0) for name, count in self.written.items()},
            self.sent - before.sent,
        )


@dataclass
class Engine:
    """A server in its role, on its machine.

    Args:
        name: of its machine: p0, p1, ... and d0, d1, ...
        place: settings of whoever is on that machine.
        bootstrap_port: of a prefill server.
        agent: of its machine, where the cluster has agents.
    """

    name: str
    role: Literal["prefill", "decode"]
    server: Server
    place: Place
    faults: Faults
    transfers: Transfers
    bootstrap_port: int | None = None
    agent: AgentProcess | None = None

    @property
    def workers(self) -> list[int]:
        """Processes of the server that read and write KV: all but the one that speaks HTTP."""
        return self.server.pids[1:]


@dataclass
class PdCluster:
    """See the module. A context manager.

    Args:
        model: directory of the model.
        folder: for logs, the store, and machines.
        prefill, decode: how many servers; each takes about 1 GB.
        prefill_mode: how prefill servers use DualPath.
        decode_mode: the same for decode servers, which restore prefixes with `hicache` and with
            `streaming`; else all KV comes from prefill.
        agents: whether each machine runs an agent. Servers never start one.
        settings: of DualPath, for all.
        flags: of servers, by role, beside those that are needed.
        env: of all servers.
        role_env: of the servers of a role, on top.
    """

    model: Path
    folder: Path
    prefill: int = 1
    decode: int = 1
    prefill_mode: Mode = "streaming"
    decode_mode: Mode = "hicache"
    agents: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    role_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.redis = RedisServer()
        self._stack = contextlib.ExitStack()
        self._room = random.SystemRandom()

    # ---- life

    def __enter__(self) -> PdCluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.redis)
            for role, count, mode in (
                ("prefill", self.prefill, self.prefill_mode),
                ("decode", self.decode, self.decode_mode),
            ):
                for number in range(count):
                    engine = self._engine(role, number, mode)
                    self.engines[engine.name] = engine
                    stack.callback(engine.server.kill9)
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda engine: engine.server.start(), self.engines.values()))
            if self.agents:
                for engine in self.engines.values():
                    stack.callback(lambda e=engine: e.agent and e.agent.kill())
                    self.start_agent(engine)
                self.agents_known(len(self.engines))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_agent(self, engine: Engine) -> None:
        """Start the agent of a machine; also again, after it was killed."""
        engine.agent = engine.place.start(log=f"agent-{engine.name}.txt")

    def agents_known(self, count: int) -> None:
        """Wait until the index reports so many agents."""
        with self.cache() as cache:
            wait_for(lambda: len(agents(cache)) == count, 90.0)

    def cache(self) -> KVCache:
        """The store, as another machine would open it. A context manager."""
        return next(iter(self.engines.values())).place.cache()

    @property
    def root(self) -> Path:
        return self.folder / "store"

    def of_role(self, role: str) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role == role]

    def __getitem__(self, name: str) -> Engine:
        """p0, d0, ..."""
        return self.engines[name]

    # ---- requests

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        prefill: str = "p0",
        decode: str = "d0",
        **fields: Any,
    ) -> PdAnswer:
        """Have one pair of servers answer. Raises ServerError when either does not."""
        fields = {**self.bootstrap(prefill), **fields}
        first = Background(self[prefill].server.generate, prompt, max_new_tokens, **fields)
        answer = self[decode].server.generate(prompt, max_new_tokens, **fields)
        return PdAnswer(answer, first.result())

    def bootstrap(self, prefill: str = "p0") -> dict[str, Any]:
        """The fields of a request's body by which the two servers find each other."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self[prefill].bootstrap_port,
            "bootstrap_room": self._room.randrange(1 << 63),
        }

    def store(self, *prompts: Sequence[int]) -> None:
        """Have the prompts' pages in the store and nowhere else."""
        for prompt in prompts:
            self.generate(prompt, 1)
        self.flush()

    def flush(self, *names: str) -> None:
        """Empty the device and host tiers of these servers, of all by default, once what they
        write is in the store. Freed slots are overwritten with junk."""
        for name in names or self.engines:
            self[name].server.flush()

    # ---- the store

    @property
    def geometry(self) -> Geometry:
        """Of the KV pool, once there is a page."""
        return geometries(self.root)["kv"]

    def corrupt(self, page: int, layer: int = 1) -> None:
        """Flip a byte of a page of the longest prompt that is stored."""
        key = chain(self.root, index_setting=self.redis.url)[page]
        corrupt(self.root, key, layer, index_setting=self.redis.url)

    def reports(self) -> list[Report]:
        """What servers and agents say about themselves in the index."""
        with self.cache() as cache:
            return list(cache.index.nodes().values())

    # ---- figures

    def figures(self) -> Figures:
        """Counts up to now. Counts of a process that was restarted begin anew."""
        read, written = {}, {}
        for engine in self.engines.values():
            pids = engine.workers + ([engine.agent.pid] if engine.agent else [])
            read[engine.name] = sum(_io(pid, "rchar") for pid in pids)
            written[engine.name] = sum(_io(pid, "wchar") for pid in pids)
        sent = sum(engine.transfers.sent_bytes for engine in self.of_role("prefill"))
        return Figures(read, written, sent)

    # ---- inside

    def _engine(self, role: Literal["prefill", "decode"], number: int, mode: Mode) -> Engine:
        name = f"{role[0]}{number}"
        machine = {
            "root": str(self.root),
            "node_dir": str(self.folder / f"machine-{name}"),
            "node_name": name,
            "capacity": SETTINGS["capacity"],
        }
        config = {
            **SETTINGS,
            "index": self.redis.url,
            "index_timeout_s": 5.0,
            "node": "off",
            "split_floor": 0,
            **machine,
            **self.settings,
        }
        faults = Faults(self.folder / f"faults-{name}")
        transfers = Transfers(self.folder / f"transfers-{name}")
        port = free_port() if role == "prefill" else None
        flags = ["--disaggregation-mode", role, *SHARED_FLAGS]
        flags += ["--disaggregation-bootstrap-port", str(port)] if port else []
        flags += _mode_flags(role, mode, config)
        server = Server(
            self.model,
            [*flags, *self.flags.get(role, ())],
            env={
                **ENVIRONMENT,
                **faults.env,
                **transfers.env,
                **self.env,
                **self.role_env.get(role, {}),
            },
            log=self.folder / f"server-{name}.log",
        )
        place = Place(
            self.folder,
            self.redis.url,
            {**machine, **{k: str(v) for k, v in self.settings.items()}},
        )
        return Engine(name, role, server, place, faults, transfers, port)


def _mode_flags(role: str, mode: Mode, config: Mapping[str, Any]) -> list[str]:
    if mode in ("streaming", "offload"):
        offload = ["--disaggregation-decode-enable-offload-kvcache"] if mode == "offload" else []
        # A decode server restores in HiCache mode, for which SGLang's default is 256 tokens.
        config = {**config, "prefetch_threshold": PAGE_TOKENS}
        extra = ["--hicache-storage-backend-extra-config", json.dumps(dict(config))]
        return ["--hicache-storage-backend", "dualpath", *extra, *offload]
    restores = ["--disaggregation-decode-enable-radix-cache"] if role == "decode" else []
    if mode == "hicache":
        return [
            *restores,
            *hicache_flags("dualpath", {**config, "prefetch_threshold": PAGE_TOKENS}),
        ]
    return []


def _io(pid: int, name: str) -> int:
    """A count of /proc/PID/io; 0 when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
