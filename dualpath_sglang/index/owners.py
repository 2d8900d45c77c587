"""Who may write to a segment: whoever has the lock of its file, if others can see that lock.

Some shared mounts, 3FS among them, keep ``flock`` to the machine that asked for it. So an index
that several machines share notes who owns each segment as well; an owner renews its lease as long
as it lives, and writes no more when it could not for too long.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LEASE_S = 600.0
"""An owner that was not heard of for so long is gone."""
MARGIN_S = 60.0
"""It stops writing so long before; no single write takes longer."""


@functools.cache
def machine_id() -> bytes:
    """16 bytes that name this boot of this machine, whose processes see each other's locks.

    Random, so like no other's, where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        boot = secrets.token_bytes(16)
    return hashlib.sha256(boot).digest()[:16]


class Owner:
    """This process, as an owner of segments.

    Args:
        machine: see :func:`machine_id`.
        lease_s: how long others wait for a word from it.
    """

    def __init__(self, machine: bytes | None = None, lease_s: float = LEASE_S) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.machine = machine_id() if machine is None else machine
        self.lease_s = lease_s
        self._renewed_at: float | None = None

    def renewed(self, at: float) -> None:
        """The lease was renewed by a call that began ``at`` (monotonic seconds)."""
        self._renewed_at = at

    @property
    def sure(self) -> bool:
        """Whether nobody can have taken over what this process owns. True without any lease."""
        if self._renewed_at is None:
            return True
        margin_s = min(MARGIN_S, self.lease_s / 2)
        return time.monotonic() - self._renewed_at < self.lease_s - margin_s


@dataclass(frozen=True, slots=True)
class SegmentOwner:
    """Whom the index names as the owner of a segment.

    Args:
        name: host, process and a random word; empty when it gave the segment up.
        silent_s: seconds since it was heard of last.
    """

    name: str
    silent_s: float

    @property
    def node(self) -> str:
        """Host and process."""
        return self.name.rpartition(":")[0]


class Ownership(Protocol):
    """What an index knows of owners. All methods may raise :class:`IndexUnavailableError`."""

    def keep(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        """Say that this process lives and owns these; False for what others have taken over."""
        ...

    def take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        """Own segments whose lock this process has; False where the owner may be alive."""
        ...

    def may_take(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        """What :meth:`take` would say."""
        ...

    def give_up(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        """Let anybody own these from now on."""
        ...

    def forget(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        """Their files are gone."""
        ...

    def owners(self, timeout_s: float) -> Mapping[tuple[bytes, int], SegmentOwner]:
        """Whom each segment belongs to, by geometry id and number; without those not noted."""
        ...

    def vacate(self, name: str, timeout_s: float) -> int:
        """Have an owner that is gone for good own nothing; how many segments it had."""
        ...


class FileLocks:
    """Ownership on one machine: the lock of a segment's file says it all."""

    def keep(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> list[bool]:
        del geometry_id, timeout_s
        return [True] * len(segments)

    take = may_take = keep

    def give_up(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        """The kernel does so when the file is closed."""

    def forget(self, geometry_id: bytes, segments: Sequence[int], timeout_s: float) -> None:
        """Nothing was noted."""

    def owners(self, timeout_s: float) -> Mapping[tuple[bytes, int], SegmentOwner]:
        del timeout_s
        return {}

    def vacate(self, name: str, timeout_s: float) -> int:
        del name, timeout_s
        return 0
