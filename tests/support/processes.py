"""Server processes: started by the launcher process (launcher.py), held here by pidfds."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]

BASE_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Tests of agents start theirs; an agent for every server of the others would only cost time.
    "DUALPATH_NODE": "off",
    # DeepSeek-V3 routing is torch.compile code: 20 s of g++ that a tiny model does not repay.
    "TORCHDYNAMO_DISABLE": "1",
    # Freed slots are overwritten when the cache is flushed: a hit cannot pass on stale bytes.
    "SGLANG_CPU_JUNK_FREED": "1",
}


class ServerError(AssertionError):
    """A server that did not start, died, or refused a request; with the end of its log."""


class Process:
    """A process that is not our child (the launcher's, or a server's), held by a pidfd."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def alive(self) -> bool:
        return not self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """True once it has ended."""
        if self._fd is None:
            return True
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def send(self, number: signal.Signals) -> None:
        if self._fd is not None and not self.wait(0.0):
            signal.pidfd_send_signal(self._fd, number)

    def tree(self) -> list[int]:
        """It and what it has started, also what outlived it in its session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid:
                    found.append(process.pid)
            except ProcessLookupError:
                continue
        return sorted(found, key=lambda pid: pid != self.pid)

    def kill_tree(self, timeout_s: float = 30.0) -> None:
        processes = [Process(pid) for pid in self.tree()]
        for process in processes:
            process.send(signal.SIGKILL)
        for process in processes:
            if not process.wait(timeout_s):
                raise ServerError(f"process {process.pid} survives SIGKILL for {timeout_s:.0f} s")
            process.close()
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Launcher:
    """The launcher process (tests/support/launcher.py); started once, ended with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **BASE_ENVIRONMENT},
        )
        atexit.register(self.close)

    def launch(self, **request: Any) -> Process:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        if not reply:
            raise ServerError(f"the launcher ended with status {self._process.wait()}")
        return Process(json.loads(reply)["pid"])

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@functools.cache
def _launcher() -> Launcher:
    return Launcher()


def launch(*, warm: bool, flags: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start a server; its output goes to the end of `log`."""
    return _launcher().launch(warm=warm, flags=flags, env=env, log=str(log))
