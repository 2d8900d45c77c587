"""Block stores on a disk and in memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dualpath_storage import (
    NO_PARENT,
    BlockStore,
    Geometry,
    Placement,
    ReadItem,
    ReadStatus,
    Slot,
    Space,
    StoreOptions,
    WriteItem,
    WriteStatus,
)
from dualpath_storage.backends import Backend, PosixBackend
from dualpath_storage.workers import Workers
from tests.support import blocks

MIB = 1 << 20


class Stored:
    """A block store with what a cache would keep for it: where each block lies."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.geometry = store.geometry
        self.places: dict[bytes, Placement] = {}
        self._generation = 0

    def take(self, count: int) -> list[Slot]:
        """Taken slots, of new segments where they are needed."""
        self._generation += 1
        slots = self.store.slots.take(count, self._generation)
        while len(slots) < count and self.store.files.add(1.0):
            slots += self.store.slots.take(count - len(slots), self._generation)
        return slots

    def write(
        self, keys: Sequence[bytes], *, misaligned: int = 0, timeout_s: float = 30.0
    ) -> list[WriteStatus]:
        """Write the right contents of blocks into new slots."""
        slots = self.take(len(keys))
        assert len(slots) == len(keys)
        items = [
            WriteItem(
                key,
                parent,
                Placement(slot.segment, slot.slot, self._generation),
                blocks.filled(self.geometry, key, misaligned=misaligned),
            )
            for key, parent, slot in zip(keys, [NO_PARENT, *keys[:-1]], slots, strict=True)
        ]
        statuses = self.store.write(items, time.monotonic() + timeout_s)
        self.places.update({item.key: item.placement for item in items})
        return statuses

    def item(self, key: bytes, *, misaligned: int = 0) -> ReadItem:
        """What to read a block with."""
        return ReadItem(key, self.places[key], blocks.blank(self.geometry, misaligned=misaligned))

    def read(
        self,
        keys: Sequence[bytes],
        layers: tuple[int, int] | None = None,
        *,
        misaligned: int = 0,
        timeout_s: float = 30.0,
    ) -> list[ReadStatus]:
        """Read blocks; what is OK is checked byte by byte, nothing but its layers has changed."""
        items = [self.item(key, misaligned=misaligned) for key in keys]
        statuses = self.store.read(items, time.monotonic() + timeout_s, layers)
        first, end = layers or (0, self.geometry.layers)
        size = self.geometry.layer_bytes
        for item, status in zip(items, statuses, strict=True):
            if status is ReadStatus.OK:
                got, right = blocks.dump(item.pieces), blocks.content(self.geometry, item.key)
                assert got[first * size : end * size] == right[first * size : end * size]
                rest = got[: first * size] + got[end * size :]
                assert rest == bytes([blocks.CANARY]) * len(rest)
        return statuses

    def path(self, key: bytes) -> Path:
        """The segment file of a block."""
        return self.store.directory / f"seg-{self.places[key].segment:08x}"

    def offset(self, key: bytes) -> int:
        """Where the slot of a block begins in its file."""
        return self.places[key].slot * self.geometry.slot_bytes

    def damage(self, key: bytes, at: int, data: bytes) -> None:
        """Overwrite bytes of a block's slot behind the store's back."""
        with self.path(key).open("r+b") as file:
            file.seek(self.offset(key) + at)
            file.write(data)

    def bytes_at(self, key: bytes, at: int, size: int) -> bytes:
        """Bytes of a block's slot as they stand in the file."""
        with self.path(key).open("rb") as file:
            file.seek(self.offset(key) + at)
            return file.read(size)


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with direct I/O, then one without."""
    if request.param == "disk":
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dualpath-test-"))
    yield directory
    shutil.rmtree(directory)


Open = Callable[..., Stored]


@pytest.fixture
def open_store(root: Path) -> Iterator[Open]:
    """`open_store(geometry, capacity_bytes=..., backend=...)`: a store, closed after the test."""
    opened: list[tuple[BlockStore, Workers, Workers]] = []

    def make(
        geometry: Geometry,
        *,
        capacity_bytes: int = 64 * MIB,
        segment_bytes: int | None = None,
        max_io_bytes: int = 2 * MIB,
        backend: Backend | None = None,
        threads: int = 4,
    ) -> Stored:
        options = StoreOptions(
            root, capacity_bytes, min_free_fraction=0, segment_bytes=segment_bytes
        )
        readers, writers = Workers(threads, "test-read"), Workers(threads, "test-write")
        store = BlockStore(
            root,
            geometry,
            backend or PosixBackend(root, "auto", writable=True),
            Space(options),
            readers,
            writers,
            max_io_bytes,
        )
        opened.append((store, readers, writers))
        return Stored(store)

    yield make
    for store, readers, writers in opened:
        readers.close()
        writers.close()
        store.close()
