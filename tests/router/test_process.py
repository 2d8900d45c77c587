"""``dualpath router`` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dualpath_sglang.cli import app
from tests.router.bed import StubProcess, stub_process
from tests.support.processes import REPOSITORY


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "dualpath_sglang.cli", "router", *args]


class Running:
    """A router over two stubs."""

    def __init__(self, prefill: StubProcess, decode: StubProcess, log: Path) -> None:
        self.port = free_port()
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command(
                    *("--port", str(self.port), "--poll-interval", "0.05", "--dead-after", "3"),
                    *("--prefill", f"{prefill.url},bootstrap_port={prefill.port},node=p"),
                    *("--decode", f"{decode.url},node=d"),
                ),
                cwd=REPOSITORY,
                stderr=file,
            )
        end = time.monotonic() + 60
        while True:
            try:
                if self.get("/health")["status"] == "ok":
                    return
            except (OSError, ValueError):
                pass
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def generate(self, tokens: int) -> Any:
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": tokens}}).encode()
        url = f"http://127.0.0.1:{self.port}/generate"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with stub_process("prefill") as prefill, stub_process("decode", token_s=0.1) as decode:
        router = Running(prefill, decode, tmp_path / "log")
        yield router
        router.process.kill()
        router.process.wait()


def test_it_serves_and_on_sigterm_lets_requests_end(running: Running) -> None:
    async def both() -> Any:
        asked = asyncio.create_task(asyncio.to_thread(running.generate, 10))
        while running.get("/health")["active"] == 0:
            await asyncio.sleep(0.02)
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(running.generate, 1)
        return await asked

    assert asyncio.run(both())["text"].endswith("w9")
    assert running.process.wait(20) == 0
    log = running.log.read_text()
    assert "lets 1 requests end" in log
    assert "Traceback" not in log


def test_time_in_which_it_was_stopped_itself_is_nobodys_silence(running: Running) -> None:
    async def stopped() -> Any:
        asked = asyncio.create_task(asyncio.to_thread(running.generate, 50))
        while running.get("/health")["active"] == 0:
            await asyncio.sleep(0.02)
        running.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(4.0)  # an engine that were silent for so long would be dead
        running.process.send_signal(signal.SIGCONT)
        return await asked

    assert asyncio.run(stopped())["text"].endswith("w49")
    assert running.get("/health")["status"] == "ok"
    assert "dead" not in running.log.read_text()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--prefill", "nonsense"], "The url of an engine"),
        (["--decode", "http://a:1,what=2"], "An engine is URL"),
        (["--decode", "http://a:1", "--prefill", "http://a:1"], "named twice"),
        (["--index", "mysql://x"], "redis://host:port"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(args: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["router", *args])
    assert done.exit_code == 2
    assert sentence in done.output
