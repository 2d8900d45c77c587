"""Metadata index: one interface, an embedded implementation, and one in Redis (``.redis``)."""

from __future__ import annotations

from dualpath_sglang.index.base import (
    Entry,
    Freed,
    Index,
    IndexDamagedError,
    IndexMisconfiguredError,
    IndexUnavailableError,
    Record,
    Report,
)
from dualpath_sglang.index.embedded import EmbeddedIndex

__all__ = [
    "EmbeddedIndex",
    "Entry",
    "Freed",
    "Index",
    "IndexDamagedError",
    "IndexMisconfiguredError",
    "IndexUnavailableError",
    "Record",
    "Report",
]
