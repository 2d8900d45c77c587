"""What a process that uses a store tells all others about itself."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time
from dataclasses import dataclass, field

from dualpath_sglang.index import Report

EVERY_S = 2.0
TTL_S = 10.0
"""A node that has not reported for so long is gone."""


@dataclass(frozen=True, slots=True)
class Node:
    """This process.

    Args:
        role: what it uses the store for: streaming, hicache.
        rank: of its tensor-parallel group.
    """

    role: str
    rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Unique among all that use a store."""
        return f"{self.host}:{self.pid}:{self.role}:{self.rank}"

    def report(self, **figures: int) -> Report:
        """What is told: who it is, and what the caller measured."""
        return {
            "role": self.role,
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "up_s": round(time.time() - self.began, 1),
            "version": version(),
            **figures,
        }


def version() -> str:
    """Of this package; empty where it is not installed."""
    try:
        return importlib.metadata.version("dualpath-sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""
