"""Ways to move bytes between memory and a segment file."""

from __future__ import annotations

from dualpath_storage.backends.base import Backend, SegmentFile
from dualpath_storage.backends.posix import PosixBackend

__all__ = ["Backend", "PosixBackend", "SegmentFile"]
