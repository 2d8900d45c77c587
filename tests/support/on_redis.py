"""Runs pytest with a redis-server as the index of every store: ``make test-redis``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.redis_server import RedisServer

SUITES = (
    "tests/kvcache",
    "tests/e2e/test_roundtrip.py",
    "tests/e2e/test_store_faults.py",
    "tests/e2e/test_full_disk.py",
    "tests/e2e/test_streaming_restarts.py",
    "tests/e2e/test_streaming.py",
    "tests/e2e/test_streaming_faults.py",
    "tests/e2e/test_streaming_ranks.py",
    "tests/e2e/test_streaming_hybrid.py",
    "tests/e2e/test_streaming_modes.py",
    "tests/e2e/test_streaming_store_faults.py",
)
"""What is about the store and who uses it. ``tests/index`` runs on both indexes as it is."""


def main(arguments: Sequence[str]) -> int:
    """The status of pytest."""
    with RedisServer() as server:
        # Servers under test keep all cores busy: it is not the deadline that is tested here.
        environment = {
            **os.environ,
            "DUALPATH_INDEX": server.url,
            "DUALPATH_INDEX_TIMEOUT_S": "2",
        }
        command = [sys.executable, "-m", "pytest", "-m", "not embedded and not slow"]
        return subprocess.run(
            [*command, *SUITES, *arguments], env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
