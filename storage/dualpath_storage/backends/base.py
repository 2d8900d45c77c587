"""The small interface between the store and a file system's fast path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class SegmentFile(Protocol):
    """One open segment. Calls block, release the GIL, and may come from many threads at once."""

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        ...

    @property
    def linked(self) -> bool:
        """False once somebody has removed the file behind our back."""
        ...

    @property
    def whole(self) -> bool:
        """False once it is shorter than it was when it was opened."""
        ...

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in turn from ``offset``; bytes read, fewer only at end of file.

        Raises:
            OSError: as the system says; EINVAL when a buffer's address or size does not suit.
        """
        ...

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers in turn at ``offset``; bytes written.

        Raises:
            OSError: as :meth:`read`.
        """
        ...

    def sync(self) -> None:
        """Make what was written durable."""
        ...

    def unlock(self) -> None:
        """Let others own it; reading goes on."""
        ...

    def discard(self) -> None:
        """Give the blocks of an unlinked file back to the file system before it is closed."""
        ...

    def close(self) -> None:
        """Release the file and its lock."""
        ...


class Backend(Protocol):
    """Opens segment files on one mount."""

    name: str
    alignment: int
    """Addresses and sizes of buffers should be multiples of this; 1 when anything goes."""

    def create(self, path: Path, size: int) -> SegmentFile | None:
        """A new, preallocated segment, locked for this process. None when the name is taken.

        Raises:
            OSError: no space, read-only, and so on; then no file is left behind.
        """
        ...

    def lock(self, path: Path) -> SegmentFile | None:
        """Open an existing segment for writing. None when a living process owns or makes it.

        Raises:
            OSError: it cannot be opened.
        """
        ...

    def open(self, path: Path) -> SegmentFile:
        """Open a segment for reading.

        Raises:
            OSError: it cannot be opened.
        """
        ...
