"""Walks an index file in a process of its own: a damaged memory map may kill the walker.

``python -m dualpath_sglang.index.check PATH`` ends 0 when the file is sound.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dualpath_sglang.index.base import IndexUnavailableError
from dualpath_sglang.index.embedded import EmbeddedIndex, IndexDamagedError


def sound(path: Path, timeout_s: float) -> bool:
    """Whether a child process could read the whole file. A walk that is only slow is sound."""
    command = [sys.executable, "-m", "dualpath_sglang.index.check", str(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return True
    return done.returncode == 0


def main(path: Path) -> int:
    """Exit status for the walk of ``path``."""
    try:
        index = EmbeddedIndex(path, read_only=True)
        index.check()
        index.close()
    except IndexDamagedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except IndexUnavailableError as error:
        sys.stderr.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
