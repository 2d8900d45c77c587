"""The process that starts SGLang servers for the tests, warm or cold.

Importing SGLang takes about 5 s of CPU, and each of a server's three processes does it: half a
minute of CPU a start. This process imports SGLang once and forks it into every server (warm).
A server does everything else itself, in the same order as a cold one: it loads the plugins, parses
its flags, and spawns its scheduler and detokenizer, which unpickle their arguments and load the
plugins again. Only the interpreter they spawn into is a fork of this one instead of a new one:

    tests ──requests──> launcher (SGLang imported, one thread, no plugin, nothing configured)
                          └─fork─> server ──multiprocessing "spawn"──> spare (forked at start)

Variables that SGLang reads while it is imported, PYTHONPATH, and patched sources need a cold start,
which executes `python -m sglang.launch_server` and nothing else.

Protocol: a JSON line {"warm", "flags", "env", "log"} on stdin gives a JSON line {"pid"} on stdout.
Servers die with this process, and it ends when its stdin does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from typing import IO, Any

import sglang_cpu.boot

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

SPARES = 6  # spawned processes a server may have before it falls back to real spawning
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "torch.utils.cpp_extension",
)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no reply
    # Servers, and what a killed server leaves behind, vanish when they end: nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    serve = take_requests(sys.stdin, replies)
    serve()


def take_requests(requests: IO[str], replies: IO[str]) -> Callable[[], None]:
    """Fork a process a request; returns in each of them with what it is to do."""
    warm = False
    for line in requests:
        request = json.loads(line)
        if request["warm"] and not warm:
            import_sglang()
            warm = True
        pid = os.fork()
        if pid == 0:
            return lambda: become_server(request)
        replies.write(json.dumps({"pid": pid}) + "\n")
        replies.flush()
    return lambda: None


def import_sglang() -> None:
    logging.disable(logging.WARNING)  # pages of remarks about what a CPU does not have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    if threading.active_count() > 1:
        raise RuntimeError(f"importing SGLang left threads behind: {threading.enumerate()}")


def become_server(request: dict[str, Any]) -> None:
    """In the forked process: run the launcher module of SGLang with the requested flags."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not request["warm"]:
        command = [sys.executable, "-m", "sglang.launch_server", *request["flags"]]
        os.execve(sys.executable, command, request["env"])
    set_environment(request["env"])
    hand_out_spares([Spare() for _ in range(SPARES)])
    sys.argv = ["sglang.launch_server", *request["flags"]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def hand_out_spares(spares: list[Spare]) -> None:
    """Let multiprocessing's "spawn" take a spare where it would start an interpreter."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_warm(path: Any, args: list[Any], passfds: list[int]) -> int:
        # Anything else that multiprocessing spawns is its resource tracker.
        if "--multiprocessing-fork" not in args or not spares:
            return spawn(path, args, passfds)
        return spares.pop(0).run([os.fsdecode(arg) for arg in args], sorted(passfds))

    multiprocessing.util.spawnv_passfds = spawn_warm  # type: ignore[assignment]


class Spare:
    """A child that waits to be told what to run, as a freshly spawned interpreter would be.

    It gets the command line and environment of the spawn and its file descriptors, under the same
    numbers, because they are named by number in the pickled arguments.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            sys.exit(self._wait(theirs))
        theirs.close()

    def run(self, args: list[str], passfds: list[int]) -> int:
        order = json.dumps({"args": args, "fds": passfds, "env": dict(os.environ)}).encode()
        socket.send_fds(self._ours, [len(order).to_bytes(8, "little")], passfds)
        self._ours.sendall(order)
        self._ours.close()
        return self.pid

    def _wait(self, theirs: socket.socket) -> Any:
        size, received, _, _ = socket.recv_fds(theirs, 8, 64)
        if not size:  # the server ended without needing this one
            os._exit(0)
        with theirs, theirs.makefile("rb") as stream:
            order = json.loads(stream.read(int.from_bytes(size, "little")))
        place_descriptors(received, order["fds"])
        set_environment(order["env"])
        sys.argv = order["args"]
        # Python's own command line: ... -c "from multiprocessing.spawn import spawn_main;
        # spawn_main(tracker_fd=5, pipe_handle=7)" --multiprocessing-fork
        tracker, pipe = re.findall(r"(?:tracker_fd|pipe_handle)=(\d+)", " ".join(sys.argv))
        sys.argv = ["-c", *sys.argv[sys.argv.index("--multiprocessing-fork") :]]
        return multiprocessing.spawn.spawn_main(tracker_fd=int(tracker), pipe_handle=int(pipe))


def place_descriptors(received: list[int], wanted: list[int]) -> None:
    """Give each received descriptor the number it had in the sender."""
    above = max(*received, *wanted) + 1
    # First out of the way, so that none is overwritten before it has moved.
    parked = []
    for i, descriptor in enumerate(received):
        parked.append(os.dup2(descriptor, above + i))
        os.close(descriptor)
    for descriptor, number in zip(parked, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sglang_cpu.boot.install()  # as at the start of an interpreter, for its environment defaults


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main()
