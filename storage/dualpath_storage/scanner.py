"""Reading the headers of many slots: what a store holds, from its files alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from dualpath_storage import header as headers
from dualpath_storage.header import HEADER_BYTES, Header
from dualpath_storage.memory import Arena
from dualpath_storage.notices import Notices
from dualpath_storage.segments import Segments
from dualpath_storage.slots import Slot
from dualpath_storage.workers import Task, Workers

_BATCH = 256
_PART = 32


class Scanner:
    """Scans the segments of one geometry.

    Args:
        files: the segments.
        readers: threads for reads.
        notices: told of what could not be read.
    """

    def __init__(self, files: Segments, readers: Workers, notices: Notices) -> None:
        self._files = files
        self._readers = readers
        self._notices = notices

    def scan(
        self,
        segments: Sequence[int],
        *,
        skip: Callable[[int, int], bool] | None,
        unread: list[Slot] | None,
        timeout_s: float,
    ) -> Iterator[tuple[Slot, Header]]:
        """See :meth:`dualpath_storage.store.BlockStore.scan`."""
        for number in segments:
            wanted = list(range(self._files.slot_count(number)))
            if skip is not None:
                wanted = [slot for slot in wanted if not skip(number, slot)]
            for first in range(0, len(wanted), _BATCH):
                batch = wanted[first : first + _BATCH]
                found = self._scan_batch(number, batch, time.monotonic() + timeout_s)
                for slot in batch:
                    if slot not in found and unread is not None:
                        unread.append(Slot(number, slot))
                    elif (header := found.get(slot)) is not None:
                        yield Slot(number, slot), header

    def _scan_batch(
        self, number: int, wanted: Sequence[int], deadline: float
    ) -> dict[int, Header | None]:
        """Headers of this geometry by slot, None where there is none; unread slots are left out."""
        geometry = self._files.geometry
        found: dict[int, Header | None] = {}

        def task(part: Sequence[int]) -> Task:
            def read(arena: Arena) -> None:
                page = arena.headers(HEADER_BYTES)[:HEADER_BYTES]
                for slot in part:
                    try:
                        got = self._files.get(number).read([page], slot * geometry.slot_bytes)
                    except OSError as error:
                        self._notices.warn("Scanning %s failed: %s", self._files.directory, error)
                        continue
                    header = headers.decode(page) if got == HEADER_BYTES else None
                    if header is not None and header.geometry_id != geometry.id_bytes:
                        header = None
                    found[slot] = header

            return read

        parts = [wanted[i : i + _PART] for i in range(0, len(wanted), _PART)]
        self._readers.run([task(part) for part in parts], deadline)
        return found
