"""How much each namespace may take: ``<root>/quotas.json``, for all who use the root."""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from dualpath_storage.errors import StoreError
from dualpath_storage.locks import file_lock
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

QUOTAS_FILE = "quotas.json"
_LOOK_EVERY_S = 1.0
_LOCK_S = 10.0
_MOST_BYTES = 1 << 20


def read_quotas(root: Path) -> dict[str, int]:
    """Bytes that each namespace may take; one that is left out is limited by the store alone.

    Raises:
        StoreError: the file cannot be read, or is none of ours.
    """
    path = root / QUOTAS_FILE
    try:
        found = json.loads(_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"The quotas in {path} cannot be read: {error}.") from error
    if not isinstance(found, dict) or not all(type(n) is int and n >= 0 for n in found.values()):
        raise StoreError(f"The quotas in {path} must be numbers of bytes by namespace.")
    return found


def _text(path: Path) -> str:
    """A file's text; nothing else is opened, for that might never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd) as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MOST_BYTES:
            raise ValueError("it is no file of a sensible size")
        return file.read()


def set_quota(root: Path, namespace: str, size: int | None) -> None:
    """Change the quota of one namespace; None for no limit. Servers obey within a second or two.

    Raises:
        StoreError: the file cannot be read, or another process keeps it locked.
        OSError: it cannot be written.
    """
    with file_lock(root / ".quotas", _LOCK_S) as held:
        if not held:
            raise StoreError(f"Another process is changing the quotas of {root}.")
        if not namespace:
            raise StoreError("A namespace has a name.")
        quotas = read_quotas(root)
        quotas.pop(namespace, None)
        if size is not None:
            quotas[namespace] = size
        draft = root / f".{QUOTAS_FILE}.{secrets.token_hex(4)}"
        try:
            with draft.open("w") as file:
                file.write(json.dumps(quotas, indent=1, sort_keys=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(root / QUOTAS_FILE)
        finally:
            draft.unlink(missing_ok=True)


class Quotas:
    """The quotas of a root, read again when they change. Thread-safe.

    A file that cannot be read changes nothing: what was read before still counts.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._notices = Notices(logger)
        self._looked_at = float("-inf")
        self._seen: tuple[int, int] | None = None
        self._known = False
        self._quotas: dict[str, int] = {}

    def all(self) -> Mapping[str, int]:
        """Bytes by namespace."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = time.monotonic()
                self._look()
            return self._quotas

    def _look(self) -> None:
        try:
            facts = (self._root / QUOTAS_FILE).stat()
            seen = (facts.st_ino, facts.st_mtime_ns)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        try:
            self._quotas = read_quotas(self._root)
            self._seen = seen
            self._known = True
        except StoreError as error:
            what = "what was read before counts" if self._known else "NO quota counts"
            self._notices.warn("%s Until they can, %s", error, what)
