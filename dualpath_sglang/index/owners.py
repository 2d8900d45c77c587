"""Who may write to a segment: whoever has the lock of its file, if others can see that lock.

Some shared mounts, 3FS among them, keep ``flock`` to the machine that asked for it. So an index
that several machines share notes who owns each segment as well; an owner renews its lease as long
as it lives, and writes no more when it could not for too long.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dualpath_storage import Geometry

LEASE_S = 600.0
"""An owner that was not heard of for so long is gone."""
MARGIN_S = 60.0
"""It stops writing so long before; no single write takes longer."""


def machine_id(root: Path) -> bytes:
    """16 bytes for this boot of this machine and this mount, whose users see each other's locks.

    Random, so like no other's, where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        mount = str(root.stat().st_dev).encode()
    except OSError:
        return secrets.token_bytes(16)
    return hashlib.sha256(boot + b" " + mount).digest()[:16]


@dataclass(frozen=True, slots=True)
class Owner:
    """This process, as an owner of segments.

    Args:
        machine: see :func:`machine_id`.
        name: host, process and a random word.
        lease_s: how long others wait for a word from it.
    """

    machine: bytes
    name: str = field(default_factory=lambda: _new_name())
    lease_s: float = LEASE_S

    @property
    def trusted_s(self) -> float:
        """For so long after it was renewed the lease is certainly this process's."""
        return self.lease_s - min(MARGIN_S, self.lease_s / 2)


def _new_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


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

    def forget_lost(self, geometry: Geometry, there: set[int], timeout_s: float) -> None:
        """Forget segments of a geometry whose files are not there, of owners who are gone."""
        ...

    def owners(self, timeout_s: float) -> Mapping[tuple[bytes, int], SegmentOwner]:
        """Whom each segment belongs to, by geometry id and number; without those not noted."""
        ...

    def inherit(
        self, name: str, silent_s: float, timeout_s: float
    ) -> list[tuple[bytes, int]] | None:
        """Own all that an owner has who is gone for good.

        Returns:
            Those segments; None when it was heard of within the last ``silent_s`` seconds.
        """
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

    def forget_lost(self, geometry: Geometry, there: set[int], timeout_s: float) -> None:
        """Nothing was noted."""

    def owners(self, timeout_s: float) -> Mapping[tuple[bytes, int], SegmentOwner]:
        del timeout_s
        return {}

    def inherit(
        self, name: str, silent_s: float, timeout_s: float
    ) -> list[tuple[bytes, int]] | None:
        del name, silent_s, timeout_s
        return []
