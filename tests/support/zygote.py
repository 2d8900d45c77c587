"""Child processes that start in a millisecond: forked from a small process that has imported.

A child may be killed at any moment, or kill itself; the test process, full of threads, never forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Child:
    """A forked process; what it writes to descriptor 1 can be read from ``output``."""

    def __init__(self, zygote: Zygote, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self._zygote = zygote
        self._fd = os.pidfd_open(pid)
        self._status: int | None = None

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> int:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
        return self.wait()

    def ended(self, timeout_s: float = 0.0) -> bool:
        return self._status is not None or bool(select.select([self._fd], [], [], timeout_s)[0])

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit status, negative when a signal ended it."""
        if self._status is None:
            assert self.ended(timeout_s), f"process {self.pid} does not end: {self.text()}"
            self._status = int(self._zygote.ask({"wait": self.pid}))
            os.close(self._fd)
        return self._status

    def text(self) -> str:
        return self.output.read_text()

    def until(self, word: str, timeout_s: float = 60.0) -> None:
        """Wait until it has written a word."""
        for _ in range(int(timeout_s / 0.005)):
            if word in self.text():
                return
            assert not self.ended(0.005), f"ended before {word!r}: {self.text()}"
        raise AssertionError(f"no {word!r} within {timeout_s} s: {self.text()}")


class Zygote:
    """Forks children that call functions of a module.

    Args:
        module: its name; it and all that it imports is imported once.
        directory: for the children's output.
    """

    def __init__(self, module: str, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.ask({"hello": 1}) == "hello"

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(self, function: str, *args: Any) -> Child:
        """A child that calls ``function(*args)`` and ends 0, or 1 after an exception."""
        self._count += 1
        output = self._directory / f"child-{self._count}.out"
        output.touch()
        pid = self.ask({"call": function, "args": [_plain(a) for a in args], "out": str(output)})
        return Child(self, int(pid), output)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30.0)


@contextlib.contextmanager
def zygote(module: str, directory: Path) -> Iterator[Zygote]:
    """A zygote for a while."""
    parent = Zygote(module, directory)
    try:
        yield parent
    finally:
        parent.close()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _child(module: Any, request: dict[str, Any]) -> None:
    status = 1
    try:
        fd = os.open(request["out"], os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.set_inheritable(1, True)
        with contextlib.suppress(OSError):
            os.close(0)
        getattr(module, request["call"])(*request["args"])
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _serve(name: str) -> None:
    module = importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = "hello"
        if "call" in request:
            answer = os.fork()
            if answer == 0:
                _child(module, request)
        elif "wait" in request:
            status = os.waitpid(request["wait"], 0)[1]
            answer = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
