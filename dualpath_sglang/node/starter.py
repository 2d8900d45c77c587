"""A server's part in its machine: its slot in the read queue, and an agent that always runs.

A small thread looks every two seconds. Where no agent runs it starts one, in a process that
inherits neither files nor settings by the way: they come over a pipe. Whatever fails here costs a
line in the log, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath_sglang.node.machine import MachineDir
from dualpath_sglang.node.machine_queue import MachineQueue
from dualpath_sglang.node.options import NodeError
from dualpath_storage.notices import Notices

if TYPE_CHECKING:
    from dualpath_sglang.config import DualPathConfig

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the next attempt, by how many have failed in a row."""
_CHILD_EVERY_S = 0.5
"""Whoever has started the agent notices sooner how it ends; others look in case he is gone."""
_GOOD_S = 10.0
"""An agent that has lived for so long had no trouble to begin with."""
_BEGIN_S = 60.0
"""Longest time that others wait for one that is being started."""
_ENV_PREFIX = "DUALPATH_"
_HEARD_BYTES = 4096


class Membership:
    """This process on its machine, until it is closed.

    Args:
        config: of the store. With an index of one machine alone nothing is done at all.

    Raises:
        ConfigError: the settings of the agent cannot be used.
    """

    def __init__(self, config: DualPathConfig) -> None:
        self.queue: MachineQueue | None = None
        """Of the machine; None where there is none."""
        self.machine: MachineDir | None = None
        """Where the agent of the machine is found; None where there is none."""
        self._upkeep: _Upkeep | None = None
        options = config.node_options()
        if options is None:
            return
        try:
            self.machine = MachineDir(options.base, options.store)
        except NodeError as error:
            logger.warning("This server reads without the other nodes: %s", error)
            return
        self.queue = MachineQueue(self.machine.queue_path)
        starter = _Starter(config, self.machine) if options.automatic else None
        self._upkeep = _Upkeep(self.machine, self.queue, starter)

    def close(self) -> None:
        """Leave. The agent ends by itself when nobody is left."""
        if self._upkeep is not None:
            self._upkeep.close()
        if self.queue is not None:
            self.queue.close()


class _Upkeep:
    """The thread."""

    def __init__(self, machine: MachineDir, queue: MachineQueue, starter: _Starter | None) -> None:
        self._machine = machine
        self._queue = queue
        self._starter = starter
        self._stop = threading.Event()
        self._notices = Notices(logger)
        self._thread = threading.Thread(target=self._run, name="dualpath-machine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            pause_s = LOOK_EVERY_S
            try:
                self._machine.make()
                self._queue.renew()
                if self._starter is not None:
                    pause_s = min(pause_s, self._starter.look())
            except NodeError as error:
                self._notices.warn("This server reads without the other nodes: %s", error)
            except Exception:
                logger.exception("Looking after the agent failed; it goes on")
        if self._starter is not None:
            self._starter.leave()

    def close(self) -> None:
        self._stop.set()


class _Starter:
    """Starts the agent, and notices how it ends. For one thread."""

    def __init__(self, config: DualPathConfig, machine: MachineDir) -> None:
        self._settings = json.dumps(config.handed_over()).encode()
        self._machine = machine
        self._child: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        self._next = float("-inf")
        self._failures = 0
        self._failing = False

    def look(self) -> float:
        """See that an agent runs; seconds until the next look is due at the latest."""
        now = time.monotonic()
        self._see_child(now)
        if self._machine.running():
            if self._failing and (self._child is None or now - self._since > _GOOD_S):
                self._failing = False
                logger.info("The agent of this machine runs again")
            return LOOK_EVERY_S if self._child is None else _CHILD_EVERY_S
        if self._child is not None:  # it begins, or it hangs
            return _CHILD_EVERY_S
        if now >= self._next:
            self._start(now)
        return max(0.1, self._next - now)

    def _see_child(self, now: float) -> None:
        child = self._child
        if child is None:
            return
        status = child.poll()
        if status is None:
            if now - self._since > _BEGIN_S and not self._machine.running():
                child.kill()  # it does not even get so far as to be seen; the next look reaps it
            return
        self._child = None
        if self._machine.running():  # another was faster
            return
        if now - self._since > _GOOD_S:
            self._failures = 0
        self._failed(f"ended with status {status}: {self._last_words()}", now)

    def _failed(self, how: str, now: float) -> None:
        self._next = now + _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        if not self._failing:
            self._failing = True
            logger.warning("The agent of this machine %s; it is started again", how)

    def _start(self, now: float) -> None:
        """Unless another process is at it."""
        try:
            starting = self._machine.starting()
        except NodeError as error:
            self._failed(f"cannot be started: {error}", now)
            return
        if starting is None:
            self._next = now + LOOK_EVERY_S
            return
        try:
            if not self._machine.running():
                self._spawn(now)
                self._wait_until_seen()
        except OSError as error:
            self._failed(f"cannot be started: {error}", now)
        finally:
            starting.close()

    def _spawn(self, now: float) -> None:
        command = [sys.executable, "-m", "dualpath_sglang.cli", "node", "--auto"]
        command += ["--settings-on-stdin", "--log-file", str(self._machine.path / "agent.log")]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        words = os.open(self._machine.path / "agent.err", flags, 0o600)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                env=_environment(),
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(words)
        self._child, self._since = child, now
        with contextlib.suppress(OSError):  # it has ended already, which the next look sees
            assert child.stdin is not None
            child.stdin.write(self._settings)  # a pipe takes 64 KiB without a reader
            child.stdin.close()

    def _wait_until_seen(self) -> None:
        """Keep others from starting one as well, until it has the lock or has ended."""
        assert self._child is not None
        end = time.monotonic() + _BEGIN_S
        while time.monotonic() < end:
            if self._machine.running():
                logger.info("An agent was started, process %d", self._child.pid)
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(0.1)
                return

    def _last_words(self) -> str:
        try:
            with open(self._machine.path / "agent.err", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _HEARD_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def leave(self) -> None:
        """Nobody looks any more; what was started here must not become a zombie when it ends."""
        if self._child is not None:
            self._child.wait()  # in a daemon thread, which has nothing else to do


def _environment() -> dict[str, str]:
    """Without settings, which come over the pipe, and without a sight of any GPU."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_ENV_PREFIX)}
    path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
