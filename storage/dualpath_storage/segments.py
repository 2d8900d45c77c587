"""The segment files of one geometry: which this process owns, which it only reads.

| state | lock | who uses it |
|---|---|---|
| owned | held by us | our writes, all our reads |
| foreign | held by another process, or nobody | our reads |
| retired | released or of no use any more | reads that had begun; closed after a grace |

A descriptor is never closed while a read may be at work with it: the number of a closed one could
already name another file.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from dualpath_storage.backends import Backend, SegmentFile
from dualpath_storage.geometry import Geometry
from dualpath_storage.notices import Notices
from dualpath_storage.paths import GEOMETRY_FILE, segment_number, segment_path, segment_paths
from dualpath_storage.slots import SlotTable
from dualpath_storage.space import Space

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 120.0


def new_number() -> int:
    """A number that no other segment has."""
    return secrets.randbits(32)


class Segments:
    """Segments are written by the process that holds their lock and read by anyone. Thread-safe.

    Args:
        directory: where they lie.
        geometry: what the blocks in them are.
        backend: how to reach the files.
        space: the root's capacity.
    """

    def __init__(self, directory: Path, geometry: Geometry, backend: Backend, space: Space) -> None:
        self.directory = directory
        self.slots = SlotTable()
        self.geometry = geometry
        self._backend = backend
        self._space = space
        self._own: dict[int, SegmentFile] = {}
        self._foreign: dict[int, SegmentFile] = {}
        self._retired: list[tuple[float, SegmentFile]] = []
        self._lock = threading.Lock()
        self._notices = Notices(logger)

    def create_directory(self) -> None:
        """Make the geometry's directory and write down what is in it.

        Raises:
            OSError: the file system refuses.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / GEOMETRY_FILE
        text = self.geometry.to_json()
        if not path.exists() or path.read_text(errors="replace") != text:
            temporary = path.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_text(text)
            temporary.replace(path)

    def may_add(self) -> bool:
        """Whether capacity and file system allow one more segment, as far as is known now."""
        try:
            size = self._space.segment_bytes(self.geometry)
            return self._space.fits(size, self.geometry.namespace)
        except OSError:
            return False

    def add(self, timeout_s: float, number: int | None = None) -> bool:
        """Create one more segment if capacity and file system allow it; says whether it did.

        Args:
            number: its number; random by default.
        """
        number = new_number() if number is None else number
        try:
            size = self._space.segment_bytes(self.geometry)
            with self._space.reserved(timeout_s) as held:
                if not held or not self._space.fits(size, self.geometry.namespace):
                    return False
                self.create_directory()
                file = self._backend.create(segment_path(self.directory, number), size)
        except OSError as error:
            self._notices.warn("Cannot create a segment in %s: %s", self.directory, error)
            return False
        if file is None:
            return False
        with self._lock:
            self._own[number] = file
        self.own(number, {})
        return True

    def strangers(self) -> list[int]:
        """Segments on disk that this process does not own."""
        return [number for number in self.numbers() if number not in self._own]

    def lock_orphans(self, numbers: Iterable[int]) -> list[int]:
        """Take those segments whose writer is gone. Their slots are in nobody's table yet."""
        locked = []
        for number in numbers:
            path = segment_path(self.directory, number)
            try:
                file = self._backend.lock(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._notices.warn("Cannot open segment %s: %s", path, error)
                continue
            if file is None:
                continue
            with self._lock:
                self._own[number] = file
            locked.append(number)
        return locked

    def unlock(self, number: int) -> None:
        """Give a segment of :meth:`lock_orphans` back unused."""
        with self._lock:
            file = self._own.pop(number, None)
            if file is not None:
                file.unlock()
                if self._foreign.setdefault(number, file) is not file:
                    self._retired.append((time.monotonic(), file))

    def own(self, number: int, taken: dict[int, int], dirty: Iterable[int] = ()) -> None:
        """Begin to use the slots of a locked segment, see :meth:`SlotTable.add`."""
        slots = self._own[number].size_bytes // self.geometry.slot_bytes
        self.slots.add(number, slots, taken, dirty)

    def drop(self, number: int, *, unlink: bool) -> None:
        """Own a segment no more, and remove its file when asked."""
        self.slots.drop(number)
        with self._lock:
            file = self._own.pop(number, None)
        self._retire([] if file is None else [file])
        if not unlink:
            return
        try:
            segment_path(self.directory, number).unlink(missing_ok=True)
            if file is not None:
                file.discard()
        except OSError as error:
            self._notices.warn("Cannot remove a segment of %s: %s", self.directory, error)

    def drop_lost(self) -> list[int]:
        """Own segments no more that somebody removed or cut short; their numbers.

        What is written to a removed one is lost, and one that was cut short would grow back
        without having reserved the room.
        """
        with self._lock:
            lost = {n: f.linked for n, f in self._own.items() if not (f.linked and f.whole)}
        for number, linked in lost.items():
            self.drop(number, unlink=linked)
        return list(lost)

    def forget_unlinked(self) -> None:
        """Close, after the grace, what was read from segments that are gone by now."""
        with self._lock:
            gone = [n for n, file in self._foreign.items() if not file.linked]
            files = [self._foreign.pop(number) for number in gone]
        self._retire(files)

    def _retire(self, files: Iterable[SegmentFile]) -> None:
        now = time.monotonic()
        with self._lock:
            closing = [f for since, f in self._retired if now - since > _CLOSE_GRACE_S]
            self._retired = [r for r in self._retired if now - r[0] <= _CLOSE_GRACE_S]
            self._retired += [(now, file) for file in files]
        for old in closing:
            old.close()

    def get(self, number: int) -> SegmentFile:
        """A segment to read from.

        Raises:
            OSError: it cannot be opened; FileNotFoundError when it is gone.
        """
        file = self._own.get(number) or self._foreign.get(number)
        if file is not None:
            return file
        with self._lock:
            if number not in self._foreign:
                self._foreign[number] = self._backend.open(segment_path(self.directory, number))
            return self._foreign[number]

    def owned(self, number: int) -> SegmentFile:
        """A segment to write to.

        Raises:
            FileNotFoundError: this process owns it no more.
        """
        file = self._own.get(number)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "the segment was removed")
        return file

    def slot_count(self, number: int) -> int:
        """Slots in a segment, 0 when it cannot be opened."""
        try:
            return self.get(number).size_bytes // self.geometry.slot_bytes
        except OSError:
            return 0

    def numbers(self) -> list[int]:
        """Numbers of all segments on disk, whoever owns them."""
        numbers = (segment_number(path) for path in segment_paths(self.directory))
        return [n for n in numbers if n is not None]

    def close(self) -> None:
        """Close every file and so give up every lock. No I/O may be running."""
        with self._lock:
            files = [*self._own.values(), *self._foreign.values(), *(f for _, f in self._retired)]
            self._own, self._foreign, self._retired = {}, {}, []
        for file in files:
            file.close()
