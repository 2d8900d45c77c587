"""Walks an index file in a process of its own: a damaged memory map may kill the walker.

``python -m dualpath_sglang.index.check PATH`` ends 3, or by a signal, when the file is damaged.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from dualpath_sglang.index.base import IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.embedded import EmbeddedIndex

_DAMAGED = 3  # a status that an interpreter in trouble of its own does not end with
_CRASHED = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL)


def sound(path: Path, timeout_s: float) -> bool:
    """Whether a child process could read the whole file.

    A walk that is only slow, or cannot be made, says nothing against it.
    """
    command = [sys.executable, "-m", "dualpath_sglang.index.check", str(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return True
    return done.returncode != _DAMAGED and done.returncode not in _CRASHED


def main(path: Path) -> int:
    """Exit status for the walk of ``path``."""
    try:
        index = EmbeddedIndex(path, read_only=True)
        index.check()
        index.close()
    except IndexDamagedError as error:
        sys.stderr.write(f"{error}\n")
        return _DAMAGED
    except IndexUnavailableError as error:
        sys.stderr.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
