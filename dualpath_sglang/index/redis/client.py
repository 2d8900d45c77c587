"""Runs scripts and commands where the keys are, within a deadline."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeAlias

from redis.exceptions import MovedError, NoScriptError

from dualpath_sglang.index.base import IndexUnavailableError
from dualpath_sglang.index.redis.faults import UnansweredError, code_of, explained
from dualpath_sglang.index.redis.link import Command
from dualpath_sglang.index.redis.topology import Topology

ROUND_TRIP_S = 5.0
"""Longest wait for replies, whatever the deadline: a connection may be dead and not say so."""
_ELSEWHERE = ("READONLY", "CLUSTERDOWN", "MASTERDOWN", "MOVED")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, joined from files of this package's ``lua`` folder."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)

    @classmethod
    def of(cls, *names: str) -> Script:
        """The script of these files, one after the other."""
        folder = resources.files(__package__).joinpath("lua")
        return cls("\n".join(folder.joinpath(f"{n}.lua").read_text() for n in names))


@dataclass(frozen=True, slots=True)
class Run:
    """A script to be run."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[bytes | str | int]

    def command(self, *, whole: bool) -> Command:
        """As Redis takes it: by name, or as a whole when Redis does not know it."""
        head = ("EVAL", self.script.source) if whole else ("EVALSHA", self.script.sha)
        return (*head, len(self.keys), *self.keys, *self.arguments)


Call: TypeAlias = "Run | Command"


class Client:
    """Thread-safe.

    Args:
        topology: finds the server; closed with the client.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def call(self, tag: str, calls: Sequence[Call], deadline: float) -> list[Any]:
        """Replies to calls on keys of one hash tag, made in order and in one round trip.

        Args:
            tag: the hash tag, without its braces.
            deadline: monotonic seconds.

        Raises:
            UnansweredError: no reply came; the calls may have been made or not.
            IndexUnavailableError: they were not made, or Redis refused one.
        """
        node = self._topology.node(tag, deadline)
        replies: list[Any] = [None] * len(calls)
        wanted = list(range(len(calls)))
        whole = redirected = False
        while wanted:
            commands = [_command(calls[i], whole) for i in wanted]
            try:
                answers = node.exchange(commands, min(deadline, time.monotonic() + ROUND_TRIP_S))
            except IndexUnavailableError:
                self._topology.doubt(node)
                raise
            for i, answer in zip(wanted, answers, strict=True):
                replies[i] = answer
            refused = {i: replies[i] for i in wanted if isinstance(replies[i], Exception)}
            wanted = []
            for i, error in refused.items():
                tried = {NoScriptError: whole, MovedError: redirected}.get(type(error), True)
                if not tried:
                    wanted.append(i)
                    continue
                if code_of(error) in _ELSEWHERE:
                    node.drop_links()
                    self._topology.doubt(node)
                failure = explained(error, node.name, sent=False)
                # What was refused was not done, but others of the same trip may have been.
                raise UnansweredError(str(failure)) if len(calls) > 1 else failure
            first = refused.get(wanted[0]) if wanted else None
            if isinstance(first, MovedError):
                redirected = True
                node = self._topology.moved(tag, (first.host, first.port))
            elif first is not None:
                whole = True
        return replies

    def close(self) -> None:
        """End all connections."""
        self._topology.close()


def _command(call: Call, whole: bool) -> Command:
    return call.command(whole=whole) if isinstance(call, Run) else call
