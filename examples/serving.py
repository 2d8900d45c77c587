"""Starts and kills a real SGLang server, as an operator's script would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # The CPU stand-ins overwrite what /flush_cache frees: no hit can pass on what is left there.
    "SGLANG_CPU_JUNK_FREED": "1",
}
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--mem-fraction-static", "0.3"),
)


class ServerError(Exception):
    """The server did not start or does not answer; the message ends with its log."""


class Server:
    """One SGLang server on this machine, on a free port, with a process group of its own.

    Args:
        model: directory of the model.
        flags: launch flags besides model and port.
        log: file that its output is appended to.
        environment: on top of this process's.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *flags,
        ]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, timeout_s: float = 300.0) -> float:
        """Launch, and wait until it answers; the seconds that took.

        Raises:
            ServerError: it did not.
        """
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise ServerError(f"The server ended while it was starting.\n{self._tail()}")
                if time.monotonic() - began > timeout_s:
                    raise ServerError(f"The server is not up in {timeout_s:.0f} s.\n{self._tail()}")
                time.sleep(0.2)
        except BaseException:
            self.kill()
            raise
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to all of its processes at once, and wait until they are gone."""
        if self._process is None:
            return
        group, process = self._process.pid, self._process
        self._process = None
        for _ in range(100):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                break
            process.poll()
            time.sleep(0.05)
        process.wait()

    def workers(self) -> list[int]:
        """Processes that it has started: all but the one that speaks HTTP."""
        if self._process is None:
            return []
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []
        return [child.pid for child in children]

    def flush(self) -> None:
        """Drop what is cached in device and host memory; storage stays.

        Raises:
            ServerError: it does not become idle.
        """
        for _ in range(200):
            request = urllib.request.Request(f"{self.url}/flush_cache", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=30):
                    return
            except urllib.error.HTTPError:
                time.sleep(0.1)  # requests, or writes to storage, are under way
            except OSError as error:
                raise ServerError(f"The server does not answer: {error}\n{self._tail()}") from error
        raise ServerError(f"The server does not become idle.\n{self._tail()}")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels; needs --enable-metrics.

        Raises:
            ServerError: the server does not answer.
        """
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
                text = reply.read().decode()
        except OSError as error:
            raise ServerError(f"The server does not answer: {error}\n{self._tail()}") from error
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"The end of its log, {self.log}:", *text[-lines:]])
