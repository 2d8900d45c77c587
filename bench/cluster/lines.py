"""JSON lines between the driver and the processes in its hosts: requests by number, and answers.

A process says ``{"ready": {...}}`` first, and ends when its input does: with the driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import IO, Any, TypeAlias

from bench.measure import BenchError

logger = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
Answer: TypeAlias = Callable[[Message], None]


class Peer:
    """A process in a host, as the driver sees it. Thread-safe.

    Args:
        name: for messages.
        process: with pipes for input and output, as text.
    """

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.name = name
        self.process = process
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Future[Message]] = {}
        self._ready: Future[Message] = Future()
        self._over = False
        threading.Thread(target=self._read, name=f"peer-{name}", daemon=True).start()

    def ready(self, timeout_s: float) -> Message:
        """What it says when it is up.

        Raises:
            BenchError: it is not, by then.
        """
        return self.result(self._ready, timeout_s)

    def send(self, what: str, **fields: Any) -> Future[Message]:
        """Ask for something; the answer comes some time."""
        answer: Future[Message] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            if self._over:
                answer.set_exception(self._gone())
                return answer
            self._waiting[number] = answer
            line = json.dumps({"number": number, "do": what, **fields})
            with contextlib.suppress(OSError, ValueError):  # the reader sees the end as well
                self._stdin.write(line + "\n")
                self._stdin.flush()
        return answer

    def ask(self, what: str, timeout_s: float, **fields: Any) -> Message:
        """Ask, and wait for the answer.

        Raises:
            BenchError: none comes by then, or it failed.
        """
        return self.result(self.send(what, **fields), timeout_s)

    def result(self, answer: Future[Message], timeout_s: float) -> Message:
        """Wait for an answer.

        Raises:
            BenchError: none comes by then, or it failed.
        """
        try:
            message = answer.result(timeout_s)
        except LateError:
            raise BenchError(f"{self.name} does not answer within {timeout_s:.0f} s") from None
        if "error" in message:
            raise BenchError(f"{self.name}: {message['error']}")
        return message

    def _read(self) -> None:
        for line in self._stdout:
            message: Message = json.loads(line)
            if "ready" in message:
                self._ready.set_result(message["ready"])
                continue
            with self._lock:
                answer = self._waiting.pop(message.pop("number"))
            answer.set_result(message)
        with self._lock:
            self._over = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            answer.set_exception(self._gone())
        with contextlib.suppress(Exception):  # it had been ready
            self._ready.set_exception(self._gone())

    def _gone(self) -> BenchError:
        return BenchError(f"{self.name} has ended")

    def hang_up(self) -> None:
        """Tell it that nothing more comes: it ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self, timeout_s: float = 20.0) -> None:
        """Let it end, or kill it."""
        self.hang_up()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Driver:
    """The driver, as a process in a host sees it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def ready(self, **fields: Any) -> None:
        """Requests may come."""
        self._say({"ready": fields})

    def serve(self, handlers: dict[str, Callable[[Message, Answer], None]]) -> None:
        """Answer requests until the driver is gone.

        Args:
            handlers: by what is asked for; one that takes long must not do it in this thread.
        """
        for line in sys.stdin:
            request: Message = json.loads(line)
            answer = self._answer(request.pop("number"))
            try:
                handlers[request.pop("do")](request, answer)
            except Exception as error:
                logger.exception("A request failed")
                answer({"error": repr(error)})

    def _answer(self, number: int) -> Answer:
        return lambda message: self._say({"number": number, **message})

    def _say(self, message: Message) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
