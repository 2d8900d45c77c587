"""Which processes hold the locks of segments, as far as the kernel tells. Takes no lock itself."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_LOCKS = Path("/proc/locks")


def owners(paths: Iterable[Path]) -> dict[Path, int]:
    """The process that holds the exclusive lock of each file, without those that nobody holds.

    Incomplete where the kernel does not say: other machines, other containers, other systems.
    """
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return {}
    held: dict[tuple[int, int, int], int] = {}
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF"
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "WRITE":
            try:
                major, minor, inode = fields[5].split(":")
                held[int(major, 16), int(minor, 16), int(inode)] = int(fields[4])
            except ValueError:
                continue
    found = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        pid = held.get((os.major(stat.st_dev), os.minor(stat.st_dev), stat.st_ino), 0)
        if pid > 0:
            found[path] = pid
    return found
