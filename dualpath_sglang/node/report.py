"""What a process that uses a store tells all others about itself."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dualpath_sglang.index import Index, Report

_EVERY_S = 2.0
_TTL_S = 10.0
"""A node that has not reported for so long is gone."""


@dataclass(frozen=True, slots=True)
class Node:
    """This process.

    Args:
        role: what it uses the store for: streaming, hicache.
        rank: of its tensor-parallel group.
        facts: what else is told, the same in every report.
    """

    role: str
    rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    address: str = field(default_factory=lambda: own_address())
    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=time.time)
    version: str = field(default_factory=lambda: installed_version())
    facts: Mapping[str, str | int] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Unique among all that use a store."""
        return f"{self.host}:{self.pid}:{self.role}:{self.rank}"

    def report(self, figures: Mapping[str, int]) -> Report:
        """What is told: who it is, and what was measured."""
        return {
            "role": self.role,
            "rank": self.rank,
            "host": self.host,
            "address": self.address,
            "pid": self.pid,
            "up_s": round(time.time() - self.began, 1),
            "version": self.version,
            **self.facts,
            **figures,
        }


class Reporter:
    """Tells the other nodes of an index about this one, now and then. For one thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told_at = float("-inf")

    def tell(self, index: Index, figures: Callable[[], Mapping[str, int]]) -> None:
        """Do so if it is time and anybody wants to know.

        Raises:
            IndexUnavailableError: the index does not answer.
        """
        now = time.monotonic()
        if not index.shared or now - self._told_at < _EVERY_S:
            return
        self._told_at = now
        index.report(self._node.name, self._node.report(figures()), _TTL_S)


def own_address() -> str:
    """The address that this host's name stands for; empty when it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def installed_version() -> str:
    """Of this package; empty where it is not installed."""
    try:
        return importlib.metadata.version("dualpath-sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""
