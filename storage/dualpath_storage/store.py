"""Full Blocks of one geometry in segment files: read, write, invalidate, scan."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpath_storage import header as headers
from dualpath_storage.backends import Backend, SegmentFile
from dualpath_storage.blocks import (
    Placement,
    ReadItem,
    ReadStatus,
    WriteItem,
    WriteStatus,
    pieces_of,
)
from dualpath_storage.geometry import Geometry
from dualpath_storage.header import HEADER_BYTES, Header
from dualpath_storage.memory import Arena, aligned
from dualpath_storage.ranges import RangeItem, RangeRead, RangeReader, RangeShape, check_header
from dualpath_storage.slots import Slot, SlotTable
from dualpath_storage.space import (
    GEOMETRY_FILE,
    Space,
    segment_number,
    segment_path,
    segment_paths,
)
from dualpath_storage.workers import Task, Workers

logger = logging.getLogger(__name__)

_MAX_BUFFERS = 1000  # the kernel takes 1024 a call
_SCAN_BATCH = 256
_CLOSE_GRACE_S = 120.0


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
        self.slots = SlotTable()
        self.io = IoCounters()
        self._backend = backend
        self._space = space
        self._readers = readers
        self._writers = writers
        self._max_blocks = max(1, max_io_bytes // geometry.slot_bytes)
        self._pad_bytes = geometry.slot_bytes - HEADER_BYTES - geometry.block_bytes
        self._own: dict[int, SegmentFile] = {}
        self._foreign: dict[int, SegmentFile] = {}
        self._retired: list[tuple[float, SegmentFile]] = []
        self._lock = threading.Lock()
        self._ranges = RangeReader(geometry, self._file, self._failed_read, max_io_bytes)
        self._in_place = True  # until the kernel refuses a caller's buffers

    # -- segments ---------------------------------------------------------------------------

    def create_directory(self) -> None:
        """Make the geometry's directory and write down what is in it.

        Raises:
            OSError: the file system refuses.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / GEOMETRY_FILE
        if not path.exists():
            temporary = path.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_text(self.geometry.to_json())
            temporary.replace(path)

    def add_segment(self, timeout_s: float) -> bool:
        """Create one more segment if capacity and file system allow it; says whether it did."""
        size = self._space.segment_bytes(self.geometry)
        try:
            with self._space.reserved(timeout_s) as held:
                if not held or not self._space.fits(size):
                    return False
                self.create_directory()
                number = secrets.randbits(32)
                file = self._backend.create(segment_path(self.directory, number), size)
        except OSError as error:
            logger.warning("Cannot create a segment in %s: %s", self.directory, error)
            return False
        if file is None:
            return False
        self._own_segment(number, file, {})
        return True

    def lock_orphans(self) -> list[int]:
        """Take the segments whose writer is gone. Their slots are in nobody's table yet."""
        locked = []
        for path in segment_paths(self.directory):
            number = segment_number(path)
            if number is None or number in self._own:
                continue
            try:
                file = self._backend.lock(path)
            except OSError as error:
                logger.warning("Cannot open segment %s: %s", path, error)
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
            file.close()

    def own(self, segment: int, taken: dict[int, int]) -> None:
        """Begin to use a locked segment in which ``taken`` slots hold blocks (slot: generation)."""
        self._own_segment(segment, self._own[segment], taken)

    def _own_segment(self, number: int, file: SegmentFile, taken: dict[int, int]) -> None:
        with self._lock:
            self._own[number] = file
        self.slots.add(number, file.size_bytes // self.geometry.slot_bytes, taken)

    def drop_segment(self, number: int, *, unlink: bool) -> None:
        """Own a segment no more, and remove its file when asked.

        Its descriptor closes only after a grace: a reader may still be at work with it, and the
        number of a closed descriptor could already name another file.
        """
        self.slots.drop(number)
        now = time.monotonic()
        with self._lock:
            file = self._own.pop(number, None)
            closing = [f for since, f in self._retired if now - since > _CLOSE_GRACE_S]
            self._retired = [r for r in self._retired if now - r[0] <= _CLOSE_GRACE_S]
            if file is not None:
                self._retired.append((now, file))
        if unlink:
            segment_path(self.directory, number).unlink(missing_ok=True)
            if file is not None:
                file.discard()
        for old in closing:
            old.close()

    def unlinked_segments(self) -> list[int]:
        """Owned segments whose file somebody removed: what is written there is lost."""
        with self._lock:
            return [n for n, file in self._own.items() if not file.linked]

    def forget_unlinked(self) -> None:
        """Close, after the grace, what was read from segments that are gone by now."""
        now = time.monotonic()
        with self._lock:
            for number in [n for n, file in self._foreign.items() if not file.linked]:
                self._retired.append((now, self._foreign.pop(number)))

    def segment_slots(self, number: int) -> int:
        """Slots in a segment, 0 when it cannot be opened."""
        file = self._file(number)
        return 0 if file is None else file.size_bytes // self.geometry.slot_bytes

    def segments(self) -> list[int]:
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

    def _file(self, number: int) -> SegmentFile | None:
        file = self._own.get(number) or self._foreign.get(number)
        if file is not None:
            return file
        with self._lock:
            if number not in self._foreign:
                try:
                    self._foreign[number] = self._backend.open(segment_path(self.directory, number))
                except OSError:
                    return None
            return self._foreign[number]

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
            return lambda arena: self._read_group(arena, items, group, window, statuses)

        order = sorted(
            range(len(items)), key=lambda i: (items[i].placement.segment, items[i].placement.slot)
        )
        groups = self._groups([items[i].placement for i in order], items)
        self._readers.run([task([order[i] for i in group]) for group in groups], deadline)
        return statuses

    def _groups(
        self, placements: Sequence[Placement], items: Sequence[ReadItem] | Sequence[WriteItem]
    ) -> list[list[int]]:
        """Runs of neighbouring slots, each short enough for one vectored I/O."""
        buffers = len(items[0].pieces) + 2 if items else 1
        most = max(1, min(self._max_blocks, _MAX_BUFFERS // buffers))
        groups: list[list[int]] = []
        segment, following = -1, -1
        for i, place in enumerate(placements):
            if place.segment == segment and place.slot == following and len(groups[-1]) < most:
                groups[-1].append(i)
            else:
                groups.append([i])
            segment, following = place.segment, place.slot + 1
        return groups

    def _read_group(
        self,
        arena: Arena,
        items: Sequence[ReadItem],
        group: list[int],
        window: tuple[int, int],
        statuses: list[ReadStatus],
    ) -> None:
        chosen = [items[i] for i in group]
        file = self._file(chosen[0].placement.segment)
        if file is None:
            for i in group:
                statuses[i] = ReadStatus.MISSING
            return
        began = time.perf_counter()
        try:
            if window == (0, self.geometry.layers):
                results = self._read_whole(arena, file, chosen)
            else:
                results = self._read_window(arena, chosen, window)
        except OSError as error:
            results = [self._failed_read(error)] * len(group)
        for i, status in zip(group, results, strict=True):
            statuses[i] = status
        good = sum(status is ReadStatus.OK for status in results)
        self._count_read(
            good * (window[1] - window[0]) * self.geometry.layer_bytes, time.perf_counter() - began
        )

    def _count_read(self, size: int, seconds: float) -> None:
        with self._lock:
            self.io.read_bytes += size
            self.io.read_s += seconds

    def _read_whole(
        self, arena: Arena, file: SegmentFile, items: Sequence[ReadItem]
    ) -> list[ReadStatus]:
        size = self.geometry.slot_bytes
        offset = items[0].placement.slot * size
        if self._fits_in_place(items[0].pieces):
            pages, buffers = self._buffers(arena, items)
            try:
                got = file.read(buffers, offset)
            except OSError as error:
                if not self._refused(error):
                    raise
            else:
                return [self._check(pages[i], item, got - i * size) for i, item in enumerate(items)]
        area = arena.bounce(len(items) * size)[: len(items) * size]
        got = file.read([area], offset)
        results = []
        for i, item in enumerate(items):
            slot = area[i * size : (i + 1) * size]
            copy = ReadItem(item.key, item.placement, pieces_of(slot[HEADER_BYTES:], self.geometry))
            status = self._check(slot[:HEADER_BYTES], copy, got - i * size)
            if status is ReadStatus.OK:
                _scatter(slot[HEADER_BYTES:], item.pieces)
            results.append(status)
        return results

    def _read_window(
        self, arena: Arena, items: Sequence[ReadItem], window: tuple[int, int]
    ) -> list[ReadStatus]:
        """The layers of the window, which rarely lie on page borders: by way of the arena."""
        shape = RangeShape(self.geometry, *window, header=True)
        area = arena.bounce(len(items) * shape.stride)
        reads = self._ranges.read([RangeItem(i.key, i.placement) for i in items], shape, area)
        per_layer = len(items[0].pieces) // self.geometry.layers
        for i, read in enumerate(reads):
            if read.status is ReadStatus.OK:
                begin = i * shape.stride + shape.lead
                pieces = items[i].pieces[window[0] * per_layer : window[1] * per_layer]
                _scatter(area[begin : begin + shape.payload_bytes], pieces)
        return [read.status for read in reads]

    def _check(self, page: memoryview, item: ReadItem, got: int) -> ReadStatus:
        if got < HEADER_BYTES + self.geometry.block_bytes:
            return ReadStatus.SHORT
        found = check_header(page, self.geometry, item.key, item.placement)
        if isinstance(found, ReadStatus):
            return found
        sums = headers.layer_checksums(item.pieces, self.geometry.layers)
        return ReadStatus.OK if tuple(sums) == found.checksums else ReadStatus.CHECKSUM

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

    def _failed_read(self, error: OSError) -> ReadStatus:
        logger.warning("Reading %s failed: %s", self.directory, error)
        return ReadStatus.IO_ERROR

    # -- writing ----------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], deadline: float) -> list[WriteStatus]:
        """Write whole blocks into taken slots of owned segments. Durable only after :meth:`sync`.

        Writes not begun by ``deadline`` (monotonic seconds) are TIMEOUT; begun ones are waited for.
        """
        statuses = [WriteStatus.TIMEOUT] * len(items)

        def task(group: list[int]) -> Task:
            return lambda arena: self._write_group(arena, items, group, statuses)

        groups = self._groups([item.placement for item in items], items)
        self._writers.run([task(group) for group in groups], deadline)
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
            if self._write_blocks(arena, chosen):
                status = WriteStatus.OK
        except OSError as error:
            status = _write_error(error)
            logger.warning("Writing to %s failed: %s", self.directory, error)
        for i in group:
            statuses[i] = status
        size = len(group) * self.geometry.block_bytes if status is WriteStatus.OK else 0
        with self._lock:
            self.io.written_bytes += size
            self.io.write_s += time.perf_counter() - began

    def _write_blocks(self, arena: Arena, items: Sequence[WriteItem]) -> bool:
        size = self.geometry.slot_bytes
        file = self._own[items[0].placement.segment]
        offset = items[0].placement.slot * size
        pages, buffers = self._buffers(arena, items)
        for page, item in zip(pages, items, strict=True):
            sums = headers.layer_checksums(item.pieces, self.geometry.layers)
            headers.encode_into(
                page, self.geometry, item.key, item.parent, item.placement.generation, sums
            )
        if self._fits_in_place(items[0].pieces):
            try:
                return file.write(buffers, offset) == len(items) * size
            except OSError as error:
                if not self._refused(error):
                    raise
        area = arena.bounce(len(items) * size)[: len(items) * size]
        for i, item in enumerate(items):
            slot = area[i * size : (i + 1) * size]
            slot[:HEADER_BYTES] = pages[i]
            _gather(item.pieces, slot[HEADER_BYTES:])
        return file.write([area], offset) == len(items) * size

    def sync(self, segments: Sequence[int], deadline: float) -> bool:
        """Make the writes to these owned segments durable; False when one could not be."""
        done: list[int] = []

        def task(number: int) -> Task:
            def sync(_: Arena) -> None:
                try:
                    self._own[number].sync()
                    done.append(number)
                except OSError as error:
                    logger.warning("Syncing %s failed: %s", self.directory, error)

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
                    if self._own[slot.segment].write([blank], offset) == HEADER_BYTES:
                        done.append(slot)
                except (OSError, KeyError) as error:
                    logger.warning("Blanking a slot in %s failed: %s", self.directory, error)

            return write

        self._writers.run([task(slot) for slot in slots], deadline)
        return done

    # -- scanning ---------------------------------------------------------------------------

    def scan(
        self,
        segments: Sequence[int] | None = None,
        *,
        skip: Callable[[int, int], bool] | None = None,
        timeout_s: float = 60.0,
    ) -> Iterator[tuple[Slot, Header]]:
        """Every slot with a valid header of this geometry, from the files alone.

        Args:
            segments: which ones; all on disk by default.
            skip: slots that need not be looked at.
            timeout_s: deadline of each batch of headers; what is late is left out.
        """
        for number in self.segments() if segments is None else segments:
            wanted = list(range(self.segment_slots(number)))
            if skip is not None:
                wanted = [slot for slot in wanted if not skip(number, slot)]
            for first in range(0, len(wanted), _SCAN_BATCH):
                batch = wanted[first : first + _SCAN_BATCH]
                yield from self._scan_batch(number, batch, time.monotonic() + timeout_s)

    def _scan_batch(
        self, number: int, wanted: Sequence[int], deadline: float
    ) -> Iterator[tuple[Slot, Header]]:
        found: dict[int, Header] = {}
        file = self._file(number)
        if file is None:
            return

        def task(part: Sequence[int]) -> Task:
            def read(arena: Arena) -> None:
                page = arena.headers(HEADER_BYTES)[:HEADER_BYTES]
                for slot in part:
                    try:
                        got = file.read([page], slot * self.geometry.slot_bytes)
                    except OSError as error:
                        logger.warning("Scanning %s failed: %s", self.directory, error)
                        continue
                    header = headers.decode(page) if got == HEADER_BYTES else None
                    if header is not None and header.geometry_id == self.geometry.id_bytes:
                        found[slot] = header

            return read

        parts = [wanted[i : i + 32] for i in range(0, len(wanted), 32)]
        self._readers.run([task(part) for part in parts], deadline)
        for slot in sorted(found):
            yield Slot(number, slot), found[slot]

    # -- shared -----------------------------------------------------------------------------

    def _buffers(
        self, arena: Arena, items: Sequence[ReadItem] | Sequence[WriteItem]
    ) -> tuple[list[memoryview], list[memoryview]]:
        """Header pages, and the whole vector: header, pieces, padding, block after block."""
        area = arena.headers((len(items) + 1) * HEADER_BYTES)
        pages = [area[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(items))]
        pad = area[len(items) * HEADER_BYTES :][: self._pad_bytes]
        buffers: list[memoryview] = []
        for i, page in enumerate(pages):
            buffers.append(page)
            buffers.extend(items[i].pieces)
            if self._pad_bytes:
                buffers.append(pad)
        return pages, buffers

    def _fits_in_place(self, pieces: Sequence[memoryview]) -> bool:
        return (
            self._in_place
            and len(pieces) + 2 <= _MAX_BUFFERS
            and len(pieces[0]) % self._backend.alignment == 0
            and self._pad_bytes % self._backend.alignment == 0
        )

    def _refused(self, error: OSError) -> bool:
        """Whether the kernel only refuses the caller's buffers; from then on they are copied."""
        if error.errno not in (errno.EINVAL, errno.EFAULT) or self._backend.alignment == 1:
            return False
        if self._in_place:
            self._in_place = False
            logger.info("Direct I/O refuses the pool's memory (%s): copying instead", error)
        return True


def _write_error(error: OSError) -> WriteStatus:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteStatus.NO_SPACE
    if error.errno == errno.EROFS:
        return WriteStatus.READ_ONLY
    return WriteStatus.IO_ERROR


def _scatter(data: memoryview, pieces: Sequence[memoryview]) -> None:
    offset = 0
    for piece in pieces:
        piece[:] = data[offset : offset + len(piece)]
        offset += len(piece)


def _gather(pieces: Sequence[memoryview], data: memoryview) -> None:
    offset = 0
    for piece in pieces:
        data[offset : offset + len(piece)] = piece
        offset += len(piece)
    data[offset:] = bytes(len(data) - offset)
