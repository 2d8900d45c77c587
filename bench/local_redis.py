"""A redis-server for a bench: nothing kept, ended with it."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from bench.measure import BenchError
from dualpath_sglang.index import Index
from dualpath_sglang.index.redis import RedisSettings, open_redis_index

_START_S = 20.0


class LocalRedis:
    """A server of this machine.

    Args:
        folder: where it may write; made, and removed at the end.

    Raises:
        BenchError: it does not start.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "dir": folder}
        command = ["redis-server", *(w for k, v in options.items() for w in (f"--{k}", str(v)))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    self.close()
                    raise BenchError("redis-server does not start") from None
                time.sleep(0.02)

    @staticmethod
    def installed() -> bool:
        """Whether there is a server, and a client."""
        found = shutil.which("redis-server") and importlib.util.find_spec("redis")
        return bool(found)

    def open_index(self, lookup_timeout_s: float) -> Index:
        """An index of a store that nobody else has."""
        settings = RedisSettings.parse(f"redis://127.0.0.1:{self._port}", environ={})
        store = secrets.token_hex(8)
        return open_redis_index(settings, store, lookup_timeout_s=lookup_timeout_s)

    def used_bytes(self) -> int:
        """What it has allocated for data and itself."""
        import redis

        with redis.Redis(port=self._port) as client:
            return int(client.info("memory")["used_memory"])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
