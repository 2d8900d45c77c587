"""Keeps the index of a root in use: opens it, lets go of it when it is damaged, opens it again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from dualpath_sglang.index.base import (
    Index,
    IndexDamagedError,
    IndexMisconfiguredError,
    IndexUnavailableError,
)
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 600.0
_RETRY_S = (1.0, 20.0)
"""The first pause and the longest: a Redis that is back is to be in use within half a minute."""
_AGREE_EVERY_S = 60.0


class IndexKeeper:
    """The index, as long as there is one. Thread-safe.

    Args:
        root: the store's root, for messages.
        open_index: opens the index, and rebuilds it when it must.
        opened: told of a freshly opened index before anybody else uses it, and of one that did
            not answer for a while: a change may be lost, or have gone unnoticed.
    """

    def __init__(
        self, root: object, open_index: Callable[[], Index], opened: Callable[[Index], None]
    ) -> None:
        self._root = root
        self._open_index = open_index
        self._opened = opened
        self._index: Index | None = None
        self._lost: list[tuple[float, Index]] = []
        self._lock = threading.Lock()
        self._notices = Notices(logger)
        self._retry_at = float("-inf")
        self._doubted = False
        self._agree_at = float("-inf")
        self._retry_s = _RETRY_S[0]

    @property
    def index(self) -> Index | None:
        """The index, or None while there is none."""
        return self._index

    def begin(self) -> None:
        """Open the index for the first time.

        Raises:
            IndexMisconfiguredError: it must not be used as it is set up.
        """
        self._open(first=True)

    def ensure(self) -> None:
        """Open the index if there is none; after a failure, not again for a while."""
        self._close_lost()
        if self._index is not None:
            self._agree(self._index)
        elif time.monotonic() >= self._retry_at:
            self._open(first=False)

    def _agree(self, index: Index) -> None:
        if not self._doubted or time.monotonic() < self._agree_at:
            return
        self._doubted = False  # before the look: what fails from now on counts again
        with self.guarded(index):
            self._opened(index)
            self._agree_at = time.monotonic() + _AGREE_EVERY_S

    def _open(self, *, first: bool) -> None:
        try:
            index = self._open_index()
        except (IndexUnavailableError, OSError) as error:
            if first and isinstance(error, IndexMisconfiguredError):
                raise
            logger.error("No index, so everything misses for now: %s", error)
        else:
            with self.guarded(index):
                self._opened(index)
            self._index = index
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_S[1])

    @contextlib.contextmanager
    def guarded(self, index: Index | None) -> Iterator[Index | None]:
        """Swallow the failures of an index in the body, and let go of one that is damaged."""
        try:
            yield index
        except IndexDamagedError as error:
            with self._lock:
                if self._index is index and index is not None:
                    logger.error("The index is lost and will be rebuilt: %s", error)
                    self._index = None
                    # Other threads may still be reading it.
                    self._lost.append((time.monotonic(), index))
        except (IndexUnavailableError, OSError) as error:
            self._doubted = True
            self._notices.warn("%s does not answer for now: %s", self._root, error)
        else:
            if index is not None and index is self._index:
                self._retry_s = _RETRY_S[0]

    def _close_lost(self) -> None:
        now = time.monotonic()
        with self._lock:
            closing = [index for since, index in self._lost if now - since > _CLOSE_GRACE_S]
            self._lost = [row for row in self._lost if now - row[0] <= _CLOSE_GRACE_S]
        for index in closing:
            index.close()

    def close(self) -> None:
        """Release everything; nobody may be using it."""
        for index in [*(index for _, index in self._lost), *filter(None, [self._index])]:
            index.close()
        self._index, self._lost = None, []
