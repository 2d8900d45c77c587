"""The directory of a store as the system gives it: can it be used, and does it answer?"""

from __future__ import annotations

import logging
from dataclasses import replace

from dualpath_storage import StoreError, StoreOptions
from dualpath_storage.backends import Backend, PosixBackend
from dualpath_storage.paths import on_read_only_mount
from dualpath_storage.workers import Workers

logger = logging.getLogger(__name__)


def open_root(options: StoreOptions, backend: Backend | None) -> tuple[StoreOptions, Backend]:
    """The options, for reading only on a mount that takes no more, and how to reach the files.

    Args:
        backend: when it is not as the options say.

    Raises:
        StoreError: the root cannot be used as asked.
    """
    root = options.root
    try:
        if not options.read_only and on_read_only_mount(root):
            logger.warning("%s cannot be written: its blocks are read, none is stored", root)
            options = replace(options, read_only=True)
        if not options.read_only:
            root.mkdir(parents=True, exist_ok=True)
        if not root.is_dir():
            raise StoreError(f"The store's root {root} is not a directory.")
        return options, backend or PosixBackend(
            root, options.direct_io, writable=not options.read_only
        )
    except OSError as error:
        raise StoreError(f"The store's root {root} cannot be used: {error}.") from error


class StallWatch:
    """Whether an I/O has not come back for longer than any deadline; logged as it changes."""

    def __init__(self, options: StoreOptions, *workers: Workers) -> None:
        self._root = options.root
        self._limit_s = max(options.read_timeout_s, options.write_timeout_s)
        self._workers = workers
        self.stalled = False
        """What the last look has shown."""

    def look(self) -> bool:
        """Look again."""
        stalled = max(workers.oldest_s() for workers in self._workers) > self._limit_s
        if stalled != self.stalled:
            self.stalled = stalled
            if stalled:
                logger.error("%s does not answer: every lookup misses until it does", self._root)
            else:
                logger.info("%s answers again", self._root)
        return stalled
