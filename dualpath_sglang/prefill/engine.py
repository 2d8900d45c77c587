"""An SGLang server of this machine, started to be measured, with the flags of the one that serves.

What would let it share work with others is left out of the flags: storage, for its prompts mean
nothing, and the roles of prefill/decode disaggregation, in which it would wait for a partner.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dualpath_sglang.prefill.trace import Header, read_header

_LEFT_OUT = ("--hicache-storage", "--disaggregation", "--host", "--port")
_NOT_HANDED_ON = ("DUALPATH_PREFILL_", "DUALPATH_CONFIG_FILE")


class EngineError(RuntimeError):
    """The server did not start; the message says why, with the end of its log."""


def flags_for_measuring(flags: Sequence[str]) -> list[str]:
    """The flags without those that are of no use here, with the page size that DualPath chooses."""
    from dualpath_sglang.launch_args import PAGE_TOKENS

    kept: list[str] = []
    dropping = False
    for flag in flags:
        if flag.startswith("--"):
            dropping = flag.startswith(_LEFT_OUT)
        if not dropping:
            kept.append(flag)
    stored = any("dualpath" in flag for flag in flags if flag not in kept)
    if stored and not any(flag.partition("=")[0] == "--page-size" for flag in kept):
        kept += ["--page-size", str(PAGE_TOKENS)]
    return kept


def environment_for_measuring(environment: Mapping[str, str], trace: Path) -> dict[str, str]:
    """This process's environment, with the trace and without a quota."""
    kept = {k: v for k, v in environment.items() if not k.upper().startswith(_NOT_HANDED_ON)}
    return {**kept, "DUALPATH_PREFILL_TRACE": str(trace), "DUALPATH_NODE": "off"}


@contextmanager
def engine(
    flags: Sequence[str], timeout_s: float, say: Callable[[str], None]
) -> Iterator[tuple[str, Path, Header]]:
    """A server that is ready: its address, its trace, and whose batches that holds.

    Raises:
        EngineError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="dualpath-profile-") as folder:
        trace, log = Path(folder) / "trace.jsonl", Path(folder) / "server.log"
        port = _free_port()
        command = [sys.executable, "-m", "sglang.launch_server", *flags_for_measuring(flags)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
        say(f"starting {' '.join(command[2:])}")
        with log.open("wb") as out:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment_for_measuring(os.environ, trace),
                start_new_session=True,
            )
        try:
            header = _ready(server, port, trace, log, timeout_s)
            yield f"http://127.0.0.1:{port}", trace, header
        finally:
            _end(server)


def _ready(
    server: subprocess.Popen[bytes], port: int, trace: Path, log: Path, timeout_s: float
) -> Header:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        header = read_header(trace)
        if header is not None and _listens(port):
            return header
        if server.poll() is not None:
            raise EngineError(f"The server ended while it was starting:\n{_tail(log)}")
        time.sleep(0.2)
    raise EngineError(
        f"The server was not ready within {timeout_s:.0f} s, see --start-timeout:\n{_tail(log)}"
    )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if "Ignore import error" not in line)[-4000:]


def _end(server: subprocess.Popen[bytes]) -> None:
    """End it and every process that it started, which are of its session."""
    for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    server.poll()
