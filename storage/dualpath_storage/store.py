"""Full Blocks of one geometry in segment files: read, write, invalidate, scan."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpath_storage.backends import Backend
from dualpath_storage.block_io import BlockIo
from dualpath_storage.blocks import (
    Placement,
    ReadItem,
    ReadStatus,
    WriteItem,
    WriteStatus,
)
from dualpath_storage.geometry import Geometry
from dualpath_storage.header import HEADER_BYTES, Header
from dualpath_storage.images import ImageItem, ImageReader
from dualpath_storage.memory import Arena, aligned
from dualpath_storage.notices import Notices
from dualpath_storage.ranges import RangeItem, RangeRead, RangeReader, RangeShape
from dualpath_storage.scanner import Scanner
from dualpath_storage.segments import Segments
from dualpath_storage.slots import Slot
from dualpath_storage.space import Space
from dualpath_storage.workers import Task, Workers

logger = logging.getLogger(__name__)

_COPYING_THREADS = 4
_MIN_IO_BYTES = 512 << 10  # neighbours merge up to this size even when workers stay idle

_DEVICE_ERRORS = frozenset(
    (errno.EIO, errno.ENXIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO)
)
"""The device or file system could not do it here; any other error is the system's, for now."""

_WORTH_ANOTHER_TRY = (ReadStatus.IO_ERROR, ReadStatus.UNAVAILABLE)


@dataclass(slots=True)
class IoCounters:
    """Bytes and seconds of I/O since the store was opened (seconds are summed over threads)."""

    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    write_s: float = 0.0


class BlockStore:
    """The segments of one geometry under ``<root>/<geometry id>``.

    Segments are written by the process that holds their lock and read by anyone. The store knows
    no index: callers say where a block should lie, and the header there says whether it does.

    Args:
        root: the store's directory.
        geometry: what the blocks are.
        backend: how to reach the files.
        space: the root's capacity.
        readers: threads for reads.
        writers: threads for writes.
        max_io_bytes: neighbouring blocks merge into one I/O up to this size.
    """

    def __init__(
        self,
        root: Path,
        geometry: Geometry,
        backend: Backend,
        space: Space,
        readers: Workers,
        writers: Workers,
        max_io_bytes: int,
    ) -> None:
        self.geometry = geometry
        self.directory = root / geometry.id
        self.files = Segments(self.directory, geometry, backend, space)
        self.slots = self.files.slots
        self.io = IoCounters()
        self._readers = readers
        self._writers = writers
        self._max_blocks = max(1, max_io_bytes // geometry.slot_bytes)
        self._min_blocks = max(1, _MIN_IO_BYTES // geometry.slot_bytes)
        self._lock = threading.Lock()
        self._notices = Notices(logger)
        self._scanner = Scanner(self.files, readers, self._notices)
        self._ranges = RangeReader(geometry, self.files.get, self._failed_read, max_io_bytes)
        self._images = ImageReader(geometry, self.files.get, self._failed_read, max_io_bytes)
        self._blocks = BlockIo(geometry, self._ranges, direct=backend.alignment > 1)

    def close(self) -> None:
        """Close every file and so give up every lock. No I/O may be running."""
        self.files.close()

    # -- reading ----------------------------------------------------------------------------

    def read(
        self,
        items: Sequence[ReadItem],
        deadline: float,
        layers: tuple[int, int] | None = None,
    ) -> list[ReadStatus]:
        """Read blocks, or the Layer Blocks ``[first, end)`` of them, straight into their pieces.

        Args:
            items: pieces cover the whole block; only those of the asked layers are written.
            deadline: monotonic seconds. Reads not begun by then are TIMEOUT; begun ones are
                waited for, so that nothing writes to the pieces after the return.

        Returns:
            A status per item. The pieces of an item that is not OK hold garbage.
        """
        statuses = [ReadStatus.TIMEOUT] * len(items)
        window = layers or (0, self.geometry.layers)

        def task(group: list[int]) -> Task:
            return lambda arena: self._read_group(arena, items, group, window, statuses, deadline)

        order = sorted(
            range(len(items)), key=lambda i: (items[i].placement.segment, items[i].placement.slot)
        )
        groups = self._groups([items[i].placement for i in order], items, self._readers)
        tasks = [task([order[i] for i in group]) for group in groups]
        self._readers.run(self._lanes(tasks, items, deadline), deadline)
        return statuses

    def _groups(
        self,
        placements: Sequence[Placement],
        items: Sequence[ReadItem] | Sequence[WriteItem],
        workers: Workers,
    ) -> list[list[int]]:
        """Runs of neighbouring slots: each is one I/O, and every worker has a share."""
        if not items:
            return []
        share = -(-len(items) // workers.count)
        most = min(max(share, self._min_blocks), self._max_blocks)
        most = min(most, self._blocks.most(items[0].pieces))
        groups: list[list[int]] = []
        segment, following = -1, -1
        for i, place in enumerate(placements):
            if place.segment == segment and place.slot == following and len(groups[-1]) < most:
                groups[-1].append(i)
            else:
                groups.append([i])
            segment, following = place.segment, place.slot + 1
        return groups

    def _lanes(
        self, tasks: list[Task], items: Sequence[ReadItem] | Sequence[WriteItem], deadline: float
    ) -> list[Task]:
        """The tasks as they are, or several in one, for few threads, where they copy.

        Copying needs the interpreter, and threads that wait for it only pass it around.
        """
        if len(tasks) <= _COPYING_THREADS or self._blocks.in_place(items[0].pieces):
            return tasks

        def lane(mine: Sequence[Task]) -> Task:
            def run(arena: Arena) -> None:
                for task in mine:
                    if time.monotonic() < deadline:
                        task(arena)

            return run

        return [lane(tasks[i::_COPYING_THREADS]) for i in range(_COPYING_THREADS)]

    def _read_group(
        self,
        arena: Arena,
        items: Sequence[ReadItem],
        group: list[int],
        window: tuple[int, int],
        statuses: list[ReadStatus],
        deadline: float,
    ) -> None:
        chosen = [items[i] for i in group]
        began = time.perf_counter()
        results = self._try_read(arena, chosen, window)
        if any(status in _WORTH_ANOTHER_TRY for status in results):
            # One block may have failed all of them, and a device may fail for a moment only.
            for i, item in enumerate(chosen):
                if time.monotonic() < deadline:
                    results[i : i + 1] = self._try_read(arena, [item], window)
        for i, status in zip(group, results, strict=True):
            statuses[i] = status
        good = sum(status is ReadStatus.OK for status in results)
        self._count_read(
            good * (window[1] - window[0]) * self.geometry.layer_bytes, time.perf_counter() - began
        )

    def _try_read(
        self, arena: Arena, items: Sequence[ReadItem], window: tuple[int, int]
    ) -> list[ReadStatus]:
        try:
            file = self.files.get(items[0].placement.segment)
            if window == (0, self.geometry.layers):
                return self._blocks.read(arena, file, items)
            return self._blocks.read_window(arena, items, window)
        except OSError as error:
            return [self._failed_read(error)] * len(items)

    def _failed_read(self, error: OSError) -> ReadStatus:
        if isinstance(error, FileNotFoundError):
            return ReadStatus.MISSING
        self._notices.warn("Reading %s failed: %s", self.directory, error)
        device = error.errno in _DEVICE_ERRORS
        return ReadStatus.IO_ERROR if device else ReadStatus.UNAVAILABLE

    def _count_read(self, size: int, seconds: float) -> None:
        with self._lock:
            self.io.read_bytes += size
            self.io.read_s += seconds

    def read_range(
        self, items: Sequence[RangeItem], shape: RangeShape, area: memoryview
    ) -> list[RangeRead]:
        """Read some layers of many blocks into staging memory, on the calling thread.

        For callers with threads and deadlines of their own: see :class:`RangeReader`.
        """
        began = time.perf_counter()
        reads = self._ranges.read(items, shape, area)
        good = sum(read.status is ReadStatus.OK for read in reads)
        self._count_read(good * shape.payload_bytes, time.perf_counter() - began)
        return reads

    def read_images(self, items: Sequence[ImageItem], first: int, end: int) -> list[RangeRead]:
        """Read the layers ``[first, end)`` into images of slots, on the calling thread.

        As :meth:`read_range`; see :class:`ImageReader`.
        """
        began = time.perf_counter()
        reads = self._images.read(items, first, end)
        good = sum(read.status is ReadStatus.OK for read in reads)
        size = good * (end - first) * self.geometry.layer_bytes
        self._count_read(size, time.perf_counter() - began)
        return reads

    # -- writing ----------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], deadline: float) -> list[WriteStatus]:
        """Write whole blocks into taken slots of owned segments. Durable only after :meth:`sync`.

        Writes not begun by ``deadline`` (monotonic seconds) are TIMEOUT; begun ones are waited for.
        """
        statuses = [WriteStatus.TIMEOUT] * len(items)

        def task(group: list[int]) -> Task:
            return lambda arena: self._write_group(arena, items, group, statuses)

        groups = self._groups([item.placement for item in items], items, self._writers)
        tasks = [task(group) for group in groups]
        self._writers.run(self._lanes(tasks, items, deadline), deadline)
        return statuses

    def _write_group(
        self,
        arena: Arena,
        items: Sequence[WriteItem],
        group: list[int],
        statuses: list[WriteStatus],
    ) -> None:
        chosen = [items[i] for i in group]
        began = time.perf_counter()
        status = WriteStatus.IO_ERROR
        try:
            if self._blocks.write(arena, self.files.owned(chosen[0].placement.segment), chosen):
                status = WriteStatus.OK
        except OSError as error:
            status = _write_error(error)
            self._notices.warn("Writing to %s failed: %s", self.directory, error)
        for i in group:
            statuses[i] = status
        size = len(group) * self.geometry.block_bytes if status is WriteStatus.OK else 0
        with self._lock:
            self.io.written_bytes += size
            self.io.write_s += time.perf_counter() - began

    def sync(self, segments: Sequence[int], deadline: float) -> bool:
        """Make the writes to these owned segments durable; False when one could not be."""
        done: list[int] = []

        def task(number: int) -> Task:
            def sync(_: Arena) -> None:
                try:
                    self.files.owned(number).sync()
                    done.append(number)
                except OSError as error:
                    self._notices.warn("Syncing %s failed: %s", self.directory, error)

            return sync

        self._writers.run([task(number) for number in segments], deadline)
        return len(done) == len(segments)

    def invalidate(self, slots: Sequence[Slot], deadline: float) -> list[Slot]:
        """Blank the headers of owned slots, so that a scan finds nothing; the blanked ones."""
        done: list[Slot] = []
        blank = aligned(HEADER_BYTES)

        def task(slot: Slot) -> Task:
            def write(_: Arena) -> None:
                try:
                    offset = slot.slot * self.geometry.slot_bytes
                    file = self.files.owned(slot.segment)
                    if file.write([blank], offset) == HEADER_BYTES:
                        done.append(slot)
                except OSError as error:
                    self._notices.warn("Blanking a slot in %s failed: %s", self.directory, error)

            return write

        self._writers.run([task(slot) for slot in slots], deadline)
        return done

    # -- scanning ---------------------------------------------------------------------------

    def scan(
        self,
        segments: Sequence[int] | None = None,
        *,
        skip: Callable[[int, int], bool] | None = None,
        unread: list[Slot] | None = None,
        timeout_s: float = 60.0,
    ) -> Iterator[tuple[Slot, Header]]:
        """Every slot with a valid header of this geometry, from the files alone.

        Args:
            segments: which ones; all on disk by default.
            skip: slots that need not be looked at.
            unread: takes the slots that could not be looked at.
            timeout_s: deadline of each batch of headers; what is late is left out.
        """
        numbers = self.files.numbers() if segments is None else segments
        return self._scanner.scan(numbers, skip=skip, unread=unread, timeout_s=timeout_s)


def _write_error(error: OSError) -> WriteStatus:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteStatus.NO_SPACE
    if error.errno == errno.EROFS:
        return WriteStatus.READ_ONLY
    return WriteStatus.IO_ERROR if error.errno in _DEVICE_ERRORS else WriteStatus.UNAVAILABLE
