"""Opening the embedded index of a store: check it, and rebuild it from the store when it is bad."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dualpath_sglang.index.base import Index, IndexDamagedError, IndexUnavailableError, Record
from dualpath_sglang.index.check import sound
from dualpath_sglang.index.embedded import EmbeddedIndex
from dualpath_storage import BlockStore, Header, Placement, Slot
from dualpath_storage.locks import file_lock

logger = logging.getLogger(__name__)

INDEX_FILE = "index.lmdb"
_PUBLISH_BATCH = 4096
_PROGRESS_S = 5.0

Stores = Callable[[], Iterable[BlockStore]]
"""All geometries of a root, each as a store to scan."""


def open_index(root: Path, stores: Stores, *, read_only: bool, timeout_s: float) -> EmbeddedIndex:
    """The index of ``root``, checked by a child process and rebuilt when it is not sound.

    Raises:
        IndexUnavailableError: another process is at it for longer than ``timeout_s``, or the
            root cannot be written and has no sound index.
    """
    path = root / INDEX_FILE
    # Outside of the lock, so that the ranks of an engine do not check one after the other.
    judged = _inode(path)
    fine = judged is not None and sound(path, timeout_s)
    if read_only:
        if judged is not None and not fine:
            raise IndexDamagedError(f"{path} is damaged")
        return EmbeddedIndex(path, read_only=True)
    try:
        with file_lock(root / ".open", timeout_s) as held:
            if not held:
                raise IndexUnavailableError(f"{path} is being opened by another process")
            now = _inode(path)
            if now is not None and (fine or now != judged):  # another may have rebuilt it
                try:
                    return EmbeddedIndex(path)
                except IndexDamagedError as error:
                    logger.warning("%s: rebuilding the index from the store", error)
            elif now is not None:
                logger.warning("%s is damaged: rebuilding the index from the store", path)
            rebuild(root, stores())
            return EmbeddedIndex(path)
    except OSError as error:
        raise IndexUnavailableError(f"{path} cannot be opened: {error}") from error


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def rebuild(root: Path, stores: Iterable[BlockStore]) -> int:
    """Replace the index by what stands in the segments; the number of blocks found.

    Goes by headers alone: payloads are verified when they are read. The caller holds the lock
    of :func:`open_index`.
    """
    path = root / INDEX_FILE
    temporary = root / f"{INDEX_FILE}.new"
    _remove(temporary)
    index = EmbeddedIndex(temporary)
    began = time.monotonic()
    try:
        total = fill(index, stores)
    finally:
        index.close()
    # Whoever still has the old files open notices that they were replaced, and opens these.
    _remove(path)
    Path(f"{temporary}-writer").replace(f"{path}-writer")
    temporary.replace(path)
    _remove(temporary)
    if total:
        logger.info("Rebuilt the index: %d blocks in %.1f s", total, time.monotonic() - began)
    return total


def fill(
    index: Index, stores: Iterable[BlockStore], go_on: Callable[[], None] = lambda: None
) -> int:
    """Publish every block whose header stands in the segments; the number of them.

    Args:
        go_on: called now and then; may raise.

    Raises:
        IndexUnavailableError: the index cannot be written.
    """
    total = 0
    shown = time.monotonic()
    for store in stores:
        newest: dict[bytes, tuple[Slot, Header]] = {}
        for slot, header in store.scan():
            best = newest.get(header.key)
            if best is None or header.generation > best[1].generation:
                newest[header.key] = (slot, header)
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                go_on()
                logger.info("Rebuilding the index: %d blocks so far", total + len(newest))
        for batch in _batches(newest.values()):
            go_on()
            index.publish(store.geometry, batch, timeout_s=60.0)
        total += len(newest)
    return total


def _batches(found: Iterable[tuple[Slot, Header]]) -> Iterator[list[Record]]:
    ordered = sorted(found, key=lambda item: item[1].generation, reverse=True)
    records = [
        Record(h.key, h.parent, Placement(s.segment, s.slot, h.generation)) for s, h in ordered
    ]
    # Oldest batch first; within one, publish() takes the first as the most recently used.
    for end in range(len(records), 0, -_PUBLISH_BATCH):
        yield records[max(0, end - _PUBLISH_BATCH) : end]


def _remove(path: Path) -> None:
    for suffix in ("", "-lock", "-writer"):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").unlink()
