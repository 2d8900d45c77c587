"""Real Redis servers: a free port, a folder of their own, nothing kept, SIGKILL at the end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

REDIS_SERVER = shutil.which("redis-server")
START_S = 20.0
_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def free_port() -> int:
    """A port that nobody listens on, also 10000 above, where a cluster has its bus."""
    while True:
        with contextlib.ExitStack() as stack:
            ports = []
            for port in (0, None):
                sock = stack.enter_context(socket.socket())
                try:
                    sock.bind(("127.0.0.1", ports[0] + 10000 if port is None else port))
                except (OSError, OverflowError):
                    break
                ports.append(sock.getsockname()[1])
            if len(ports) == 2:
                return ports[0]


def tls_options(ca: Path, cert: Path, key: Path) -> list[str]:
    """Options of a server that speaks TLS alone, with others of its kind too, and asks everybody
    for a certificate."""
    return [
        "tls-port 1",
        f"tls-cert-file {cert}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {ca}",
        "tls-auth-clients yes",
        "tls-replication yes",
        "tls-cluster yes",
    ]


class RedisServer:
    """A redis-server, or a Sentinel.

    Args:
        options: of the configuration file, each "name value"; see :func:`tls_options` for TLS.
        sentinel: whether it is one.
        port: where it listens; a free one by default.
    """

    def __init__(
        self, options: Sequence[str] = (), *, sentinel: bool = False, port: int | None = None
    ) -> None:
        assert REDIS_SERVER is not None, "redis-server is not installed"
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="dualpath-redis-"))
        self._tls = dict(o.split(" ", 1) for o in options if o.startswith("tls-"))
        self._sentinel = sentinel
        lines = [f"port {0 if self._tls else self.port}", "bind 127.0.0.1", f"dir {self.folder}"]
        if self._tls:
            lines.append(f"tls-port {self.port}")
        if not sentinel:
            lines += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        lines += [o for o in options if not o.startswith("tls-port")]
        self._config = self.folder / "redis.conf"
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is, as DualPath's ``index`` setting has it."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        """Start it, or start it anew with nothing in it; it takes connections when this returns."""
        # Ended by the kernel should this process be killed.
        command = [*_WITH_PARENT, REDIS_SERVER, str(self._config)]
        command += ["--sentinel"] if self._sentinel else []
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return self
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"Redis does not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    def admin(self, **options: Any) -> redis.Redis:
        """A client without deadlines."""
        if self._tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": self._tls["tls-ca-cert-file"],
                "ssl_certfile": self._tls["tls-cert-file"],
                "ssl_keyfile": self._tls["tls-key-file"],
            }
        return redis.Redis("127.0.0.1", self.port, **options)

    def stop(self) -> None:
        """Have it hang, until :meth:`cont`."""
        self._send(signal.SIGSTOP)

    def cont(self) -> None:
        """Have it go on."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Kill it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def wait_for(true: Any, timeout_s: float = 30.0, what: str = "it") -> None:
    """Wait until a call returns something true; errors of Redis count as false."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if true():
                return
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.05)


@contextlib.contextmanager
def cluster(masters: int = 3, options: Sequence[str] = ()) -> Iterator[list[RedisServer]]:
    """A Redis Cluster: masters, and then a replica of each."""
    options = [
        "cluster-enabled yes",
        "cluster-node-timeout 1000",
        "cluster-replica-validity-factor 0",
        *options,
    ]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(options)) for _ in range(2 * masters)]
        clients = [stack.enter_context(server.admin(decode_responses=True)) for server in servers]
        ids = [str(c.execute_command("CLUSTER MYID")) for c in clients]
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
            if i < masters:
                first, end = i * 16384 // masters, (i + 1) * 16384 // masters
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)

        def everybody_known() -> bool:
            return all(len(c.execute_command("CLUSTER NODES")) == len(servers) for c in clients)

        wait_for(everybody_known, what="the cluster's first meeting")
        for i in range(masters):
            clients[masters + i].execute_command("CLUSTER REPLICATE", ids[i])

        def ready() -> bool:
            states = [c.execute_command("CLUSTER INFO")["cluster_state"] for c in clients]
            links = [c.info("replication")["master_link_status"] for c in clients[masters:]]
            return set(states) == {"ok"} and set(links) == {"up"}

        wait_for(ready, what="the cluster")
        yield servers


@contextlib.contextmanager
def sentinels(
    service: str = "main", options: Sequence[str] = (), watching: Sequence[str] = ()
) -> Iterator[tuple[list[RedisServer], list[RedisServer]]]:
    """A master and its replica, and three Sentinels that watch them.

    Args:
        options: of the master and its replica.
        watching: of the Sentinels.
    """
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(RedisServer(options))
        replica = stack.enter_context(RedisServer([f"replicaof 127.0.0.1 {master.port}", *options]))
        watch = [
            f"sentinel monitor {service} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {service} 1000",
            f"sentinel failover-timeout {service} 3000",
            *watching,
        ]
        watchers = [stack.enter_context(RedisServer(watch, sentinel=True)) for _ in range(3)]
        clients = [stack.enter_context(w.admin(decode_responses=True)) for w in watchers]

        def ready() -> bool:
            facts = [c.execute_command("SENTINEL MASTER", service) for c in clients]
            return all(f["num-slaves"] == 1 and f["num-other-sentinels"] == 2 for f in facts)

        wait_for(ready, what="the Sentinels' meeting")
        yield [master, replica], watchers
