"""Where the index of a store is: opened, filled from the store when it must, made anew."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dualpath_sglang.index.base import Index, IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.owners import Owner, machine_id
from dualpath_sglang.index.recovery import INDEX_FILE, Stores, fill, open_index, rebuild
from dualpath_storage.locks import file_lock

if TYPE_CHECKING:
    from dualpath_sglang.index.redis.index import RedisIndex
    from dualpath_sglang.index.redis.settings import RedisSettings

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 0.2
_FILL_LEASE_S = 30.0
_CONNECT_S = 5.0


class IndexSource(Protocol):
    """One kind of index, for any store."""

    @property
    def trusted_s(self) -> float:
        """How long a segment is certainly ours after others were told, or could be."""
        ...

    def open(self, root: Path, stores: Stores, *, read_only: bool, timeout_s: float) -> Index:
        """The index of the store at ``root``, with all that the store has.

        Args:
            stores: all geometries of the root, to be scanned when the index must be filled.
            timeout_s: how long to wait for others who are opening or filling it.

        Raises:
            IndexUnavailableError: it cannot be opened now.
        """
        ...

    def rebuild(self, root: Path, stores: Stores, *, timeout_s: float) -> int:
        """Make the index anew from the store, while servers run; the number of blocks found.

        Raises:
            IndexUnavailableError: it cannot be written, or another process is at it.
        """
        ...

    def exists(self, root: Path) -> bool:
        """Whether something at ``root`` itself tells that it is a store with such an index."""
        ...


class EmbeddedSource:
    """A file beside the store."""

    trusted_s = math.inf

    def open(self, root: Path, stores: Stores, *, read_only: bool, timeout_s: float) -> Index:
        return open_index(root, stores, read_only=read_only, timeout_s=timeout_s)

    def rebuild(self, root: Path, stores: Stores, *, timeout_s: float) -> int:
        with file_lock(root / ".open", timeout_s) as held:
            if not held:
                raise IndexUnavailableError("Another process is opening the index; try again")
            return rebuild(root, stores())

    def exists(self, root: Path) -> bool:
        return (root / INDEX_FILE).exists()


class RedisSource:
    """Redis, for all machines that have the store mounted.

    Args:
        lookup_timeout_s: how long a lookup may take, for each 1024 keys of it.
    """

    def __init__(self, settings: RedisSettings, lookup_timeout_s: float = 0.005) -> None:
        self.settings = settings
        self.owner: Owner | None = None
        """This process, as an owner of segments; made when a store is opened."""
        self._lookup_timeout_s = lookup_timeout_s

    def open(self, root: Path, stores: Stores, *, read_only: bool, timeout_s: float) -> Index:
        end = time.monotonic() + timeout_s
        index = self._open(root, read_only=read_only)
        try:
            if not read_only:
                self._fill(index, stores, end)
        except BaseException:
            index.close()
            raise
        return index

    @property
    def trusted_s(self) -> float:
        return Owner(b"").trusted_s if self.owner is None else self.owner.trusted_s

    def rebuild(self, root: Path, stores: Stores, *, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        index = self._open(root, read_only=False)
        try:
            index.start_over()
        finally:
            index.close()
        # Whoever has it open finds it damaged now, and may be the one who fills it.
        index = self._open(root, read_only=False)
        try:
            self._fill(index, stores, end)
            return sum(index.counts().values())
        finally:
            index.close()

    def exists(self, root: Path) -> bool:
        from dualpath_sglang.index.redis.store_id import STORE_ID_FILE

        return (root / STORE_ID_FILE).exists()

    def _open(self, root: Path, *, read_only: bool) -> RedisIndex:
        from dualpath_sglang.index.redis import open_redis_index, store_id

        store = store_id(root, create=not read_only)
        if self.owner is None:
            self.owner = Owner(machine_id(root))

        def watch() -> None:
            try:
                now = store_id(root, create=False)
            except IndexUnavailableError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise IndexDamagedError(f"The store at {root} was removed") from error
                raise
            if now != store:
                raise IndexDamagedError(f"The store at {root} was replaced by another")

        return open_redis_index(
            self.settings,
            store,
            lookup_timeout_s=self._lookup_timeout_s,
            read_only=read_only,
            timeout_s=_CONNECT_S,
            watch=watch,
            owner=self.owner,
        )

    def _fill(self, index: RedisIndex, stores: Stores, end: float) -> None:
        """Have the index filled, by one of all who found it empty."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

        def mine() -> bool:
            return index.cluster.lease("fill", owner, _FILL_LEASE_S) is not None

        def go_on() -> None:
            if not mine():
                raise IndexUnavailableError("Another process is filling the index by now")

        while not index.filled():
            if mine():
                began = time.monotonic()
                try:
                    total = fill(index, stores(), go_on)
                    index.set_filled()
                finally:
                    with contextlib.suppress(IndexUnavailableError):  # it expires
                        index.cluster.end_lease("fill", owner)
                if total:
                    seconds = time.monotonic() - began
                    logger.info("Filled the index: %d blocks in %.1f s", total, seconds)
                return
            if time.monotonic() > end:
                raise IndexUnavailableError("Another process is filling the index")
            time.sleep(_ASK_EVERY_S)
