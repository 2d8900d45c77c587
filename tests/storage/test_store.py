"""Blocks in segment files: the same bytes back, or a reason; never other bytes."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from dualpath_storage import (
    NO_PARENT,
    Placement,
    ReadItem,
    ReadStatus,
    Slot,
    WriteItem,
    WriteStatus,
)
from dualpath_storage import header as headers
from dualpath_storage.backends import PosixBackend
from dualpath_storage.backends.posix import PosixFile
from tests.storage.conftest import MIB, Open
from tests.support import blocks
from tests.support.blocks import chain, geometry, key

KINDS = ["mha", "mla", "large", "scattered"]
OK, WRITTEN = ReadStatus.OK, WriteStatus.OK


class Faulty(PosixBackend):
    """A backend whose files do what a test tells them to.

    ``before(what, offset, sizes)`` is called ahead of each transfer, and may raise.
    """

    def __init__(self, directory: Path, direct_io: Literal["auto", "off"] = "auto") -> None:
        super().__init__(directory, direct_io, writable=True)
        self.calls: list[tuple[str, int, list[int]]] = []
        self.before: Any = lambda what, offset, sizes: None

    def _wrap(self, file: PosixFile | None) -> Any:
        return None if file is None else FaultyFile(file, self)

    def create(self, path: Path, size: int) -> Any:
        return self._wrap(super().create(path, size))

    def lock(self, path: Path) -> Any:
        return self._wrap(super().lock(path))

    def open(self, path: Path) -> Any:
        return self._wrap(super().open(path))


class FaultyFile:
    def __init__(self, file: PosixFile, backend: Faulty) -> None:
        self._file = file
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _note(self, what: str, buffers: Sequence[memoryview], offset: int) -> None:
        sizes = [len(buffer) for buffer in buffers]
        self._backend.calls.append((what, offset, sizes))
        self._backend.before(what, offset, sizes)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._note("read", buffers, offset)
        return self._file.read(buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._note("write", buffers, offset)
        return self._file.write(buffers, offset)

    def sync(self) -> None:
        self._note("sync", [], 0)
        self._file.sync()


@pytest.fixture
def faulty(root: Path) -> Faulty:
    return Faulty(root)


# -- the same bytes back ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(open_store: Open, kind: str) -> None:
    of = geometry(kind)
    stored = open_store(of, capacity_bytes=256 * MIB)
    keys = chain("a", 17 if kind in ("mha", "mla") else 3)
    assert stored.write(keys) == [WRITTEN] * len(keys)
    assert stored.read(keys) == [OK] * len(keys)
    random.Random(1).shuffle(keys)
    assert stored.read(keys) == [OK] * len(keys)
    assert stored.store.io.read_bytes == 2 * len(keys) * of.block_bytes
    assert stored.store.io.written_bytes == len(keys) * of.block_bytes


def test_the_large_block_is_larger_than_what_peers_can_take() -> None:
    assert geometry("large").block_bytes > 4 * MIB
    of = geometry("scattered")
    assert of.layers * blocks.pieces_a_layer(of) > os.sysconf("SC_IOV_MAX")


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_every_range_of_layers_can_be_read_alone(open_store: Open, kind: str) -> None:
    of = geometry(kind)
    stored = open_store(of)
    keys = chain("a", 4)
    stored.write(keys)
    for first in range(of.layers):
        for end in range(first + 1, of.layers + 1):
            assert stored.read(keys, (first, end)) == [OK] * 4, (first, end)


@pytest.mark.parametrize("window", [(0, 1), (60, 61), (17, 40)])
def test_layers_of_large_blocks_can_be_read_alone(
    open_store: Open, window: tuple[int, int]
) -> None:
    stored = open_store(geometry("large"), capacity_bytes=64 * MIB)
    stored.write(chain("a", 2))
    assert stored.read(chain("a", 2), window) == [OK] * 2


@pytest.mark.parametrize("layer_bytes", [1, 7, 511, 512, 4095, 4096, 4097, 12_288])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_any_size_can_be_stored(open_store: Open, layers: int, layer_bytes: int) -> None:
    stored = open_store(geometry("odd", layers=layers, layer_bytes=layer_bytes, form="odd"))
    keys = chain("a", 5)
    assert stored.write(keys) == [WRITTEN] * 5
    assert stored.read(keys) == [OK] * 5
    for layer in range(layers):
        assert stored.read(keys, (layer, layer + 1)) == [OK] * 5


@pytest.fixture(autouse=True)
def _odd_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks._KINDS, "odd", {"layers": 1, "layer_bytes": 1, "form": "odd"})


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("misaligned", [1, 64, 512])
def test_memory_at_odd_addresses_is_copied(open_store: Open, kind: str, misaligned: int) -> None:
    stored = open_store(geometry(kind))
    keys = chain("a", 6)
    assert stored.write(keys, misaligned=misaligned) == [WRITTEN] * 6
    assert stored.read(keys, misaligned=misaligned) == [OK] * 6
    assert stored.read(keys) == [OK] * 6


def test_one_odd_piece_among_many_is_found(open_store: Open) -> None:
    """The sizes of all pieces decide, not the first one's."""
    of = geometry("odd", layers=2, layer_bytes=8192)
    stored = open_store(of)
    keys = chain("a", 3)
    stored.write(keys)
    for key_ in keys:
        area = memoryview(bytearray(of.block_bytes))
        pieces = [area[:4096], area[4096:8192], area[8192:8200], area[8200:]]
        item = ReadItem(key_, stored.places[key_], pieces)
        assert stored.store.read([item], time.monotonic() + 30) == [OK]
        assert area == blocks.content(of, key_)


def test_padding_on_disk_is_zero(open_store: Open) -> None:
    """Whatever the writer's scratch memory held before."""
    stored = open_store(geometry("mla"))
    stored.write(chain("many", 20))
    keys = chain("few", 2)
    stored.write(keys)
    of = stored.geometry
    pad = of.slot_bytes - 4096 - of.block_bytes
    assert pad > 0
    for key_ in [*keys, *chain("many", 20)]:
        assert stored.bytes_at(key_, 4096 + of.block_bytes, pad) == bytes(pad)
        assert stored.bytes_at(key_, 4096, of.block_bytes) == blocks.content(of, key_)


# -- few, large transfers ---------------------------------------------------------------------


def test_neighbours_are_one_transfer(open_store: Open, faulty: Faulty) -> None:
    stored = open_store(
        geometry("mha"), backend=faulty, max_io_bytes=2 * MIB, segment_bytes=2 * MIB
    )
    keys = chain("a", 9)
    stored.write(keys)
    assert [what for what, _, _ in faulty.calls] == ["write"]
    faulty.calls.clear()
    shuffled = random.Random(1).sample(keys, 9)
    assert stored.read(shuffled) == [OK] * 9
    assert len(faulty.calls) == 1
    assert sum(faulty.calls[0][2]) == 9 * stored.geometry.slot_bytes


def test_a_batch_is_parted_so_that_every_worker_has_a_share(
    open_store: Open, faulty: Faulty
) -> None:
    of = geometry("large", layers=8)
    stored = open_store(
        of, backend=faulty, threads=2, max_io_bytes=64 * MIB, segment_bytes=32 * MIB
    )
    keys = chain("a", 24)
    stored.write(keys)
    assert stored.read(keys) == [OK] * 24
    assert {sum(sizes) for _, _, sizes in faulty.calls} == {12 * of.slot_bytes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_direct_io_never_sees_the_callers_memory(
    open_store: Open, root: Path, kind: str, direct_io: Literal["auto", "off"]
) -> None:
    """Through the page cache the kernel copies; direct I/O is given aligned memory only."""
    backend = Faulty(root, direct_io)
    stored = open_store(geometry(kind), backend=backend)
    keys = chain("a", 3)
    assert stored.write(keys) == [WRITTEN] * 3
    assert stored.read(keys) == [OK] * 3
    alone = {len(sizes) for _, _, sizes in backend.calls} == {1}
    assert alone == (backend.direct or kind == "scattered")


def test_a_transfer_is_no_larger_than_asked(open_store: Open, faulty: Faulty) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, max_io_bytes=4 * of.slot_bytes, segment_bytes=2 * MIB)
    stored.write(chain("a", 20))
    assert stored.read(chain("a", 20)) == [OK] * 20
    assert {sum(sizes) for _, _, sizes in faulty.calls} == {4 * of.slot_bytes}


def test_a_transfer_has_no_more_pieces_than_the_kernel_takes(
    open_store: Open, faulty: Faulty
) -> None:
    of = geometry("odd", layers=100, layer_bytes=512)
    stored = open_store(of, backend=faulty, max_io_bytes=256 * MIB)
    stored.write(chain("a", 40))
    assert stored.read(chain("a", 40)) == [OK] * 40
    assert all(len(sizes) <= os.sysconf("SC_IOV_MAX") for _, _, sizes in faulty.calls)
    assert len(faulty.calls) < 40


def test_gaps_and_segments_part_transfers(open_store: Open, faulty: Faulty) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, segment_bytes=4 * of.slot_bytes)
    keys = chain("a", 8)
    stored.write(keys)
    faulty.calls.clear()
    assert stored.read([keys[0], keys[1], keys[3], keys[4]]) == [OK] * 4
    assert len(faulty.calls) == 3


def test_the_same_block_twice_in_a_call_is_read_twice(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    stored.write(chain("a", 2))
    twice = [*chain("a", 2), *chain("a", 2)]
    assert stored.read(twice) == [OK] * 4


def test_nothing_asked_is_nothing_done(open_store: Open) -> None:
    stored = open_store(geometry())
    assert stored.store.read([], time.monotonic() + 1) == []
    assert stored.store.write([], time.monotonic() + 1) == []
    assert stored.store.invalidate([], time.monotonic() + 1) == []
    assert stored.store.sync([], time.monotonic() + 1)
    assert list(stored.store.scan()) == []


# -- never other bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_flipped_byte_anywhere_in_a_slot_is_never_read(open_store: Open, kind: str) -> None:
    of = geometry(kind)
    stored = open_store(of)
    victim, *others = chain("a", 3)
    stored.write([victim, *others])
    used = 4096 + of.block_bytes
    chosen = {*range(0, 4096, 37), *random.Random(kind).sample(range(used), 80), 4096, used - 1}
    for at in sorted(chosen):
        right = stored.bytes_at(victim, at, 1)
        stored.damage(victim, at, bytes([right[0] ^ 0x10]))
        status, *rest = stored.read([victim, *others])
        assert status is (ReadStatus.HEADER if at < 4096 else ReadStatus.CHECKSUM), at
        assert rest == [OK] * 2, "neighbours in the same transfer are right"
        stored.damage(victim, at, right)
    assert stored.read([victim, *others]) == [OK] * 3


def test_a_flipped_byte_harms_the_reads_of_its_own_layer_only(open_store: Open) -> None:
    of = geometry("mha")
    stored = open_store(of)
    stored.write([key("k")])
    stored.damage(key("k"), 4096 + 2 * of.layer_bytes + 5, b"\x00\x00\x00\x00\x00\x00\x00\x00")
    for layer in range(of.layers):
        wanted = ReadStatus.CHECKSUM if layer == 2 else OK
        assert stored.read([key("k")], (layer, layer + 1)) == [wanted]
    assert stored.read([key("k")], (1, 4)) == [ReadStatus.CHECKSUM]


def test_without_the_checksum_a_flipped_byte_would_be_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: it is the check that keeps wrong bytes out, not the way the test damages them."""
    stored = open_store(geometry("mha"))
    stored.write([key("k")])
    stored.damage(key("k"), 5000, bytes([stored.bytes_at(key("k"), 5000, 1)[0] ^ 1]))
    item = stored.item(key("k"))
    assert stored.store.read([item], time.monotonic() + 30) == [ReadStatus.CHECKSUM]
    header = headers.decode(memoryview(stored.bytes_at(key("k"), 0, 4096)))
    assert header is not None
    monkeypatch.setattr(headers, "layer_checksums", lambda *_: list(header.checksums))
    assert stored.store.read([item], time.monotonic() + 30) == [OK]
    assert not blocks.holds(stored.geometry, key("k"), item.pieces)


def test_a_reused_slot_is_never_taken_for_the_old_block(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    stored.write([key("old")])
    place = stored.places[key("old")]
    assert stored.store.slots.free(Slot(place.segment, place.slot), place.generation, dirty=True)
    stored.write([key("new")])
    assert stored.places[key("new")].slot == place.slot
    assert stored.read([key("old")]) == [ReadStatus.GENERATION]
    assert stored.read([key("old")], (0, 1)) == [ReadStatus.GENERATION]
    assert stored.read([key("new")]) == [OK]


def test_the_same_block_of_another_generation_is_not_taken(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    stored.write([key("k")])
    place = stored.places[key("k")]
    stored.places[key("k")] = Placement(place.segment, place.slot, place.generation + 1)
    assert stored.read([key("k")]) == [ReadStatus.GENERATION]


def test_without_its_key_in_the_header_another_block_would_be_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the two above: place and checksums are right, only the key is another one."""
    stored = open_store(geometry("mha"))
    stored.write([key("b")])
    item = ReadItem(key("a"), stored.places[key("b")], blocks.blank(stored.geometry))
    assert stored.store.read([item], time.monotonic() + 30) == [ReadStatus.GENERATION]
    real = headers.decode

    def forgetful(page: memoryview) -> Any:
        found = real(page)
        return (
            None
            if found is None
            else headers.Header(
                found.geometry_id,
                key("a"),
                found.parent,
                found.generation,
                found.payload_bytes,
                found.checksums,
            )
        )

    monkeypatch.setattr(headers, "decode", forgetful)
    assert stored.store.read([item], time.monotonic() + 30) == [OK]
    assert blocks.holds(stored.geometry, key("b"), item.pieces)


def test_a_block_of_another_geometry_is_never_read(open_store: Open) -> None:
    ours, theirs = geometry("mha"), geometry("mha", weights="other")
    a, b = open_store(ours), open_store(theirs)
    a.write([key("k")])
    b.write([key("k")])
    shutil.copyfile(b.path(key("k")), a.path(key("k")))
    assert a.read([key("k")]) == [ReadStatus.HEADER]
    assert a.read([key("k")], (0, 1)) == [ReadStatus.HEADER]
    assert list(a.store.scan()) == []


def test_a_truncated_segment_is_short_where_it_is_cut(open_store: Open) -> None:
    of = geometry("mha")
    stored = open_store(of, segment_bytes=16 * of.slot_bytes)
    keys = chain("a", 8)
    stored.write(keys)
    for cut in (of.slot_bytes - 1, of.slot_bytes // 2, 4096 + of.layer_bytes, 4096, 100, 0):
        os.truncate(stored.path(keys[5]), stored.offset(keys[5]) + cut)
        assert stored.read(keys) == [OK] * 5 + [ReadStatus.SHORT] * 3, cut
        if cut == 4096 + of.layer_bytes:
            assert stored.read(keys[5:6], (0, 1)) == [OK], "what is there can be used"
            assert stored.read(keys[5:6], (0, 2)) == [ReadStatus.SHORT]
    os.truncate(stored.path(keys[5]), 0)
    assert stored.read(keys) == [ReadStatus.SHORT] * 8


def test_a_zeroed_segment_holds_no_block(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    keys = chain("a", 8)
    stored.write(keys)
    path = stored.path(keys[0])
    path.write_bytes(bytes(path.stat().st_size))
    assert stored.read(keys) == [ReadStatus.HEADER] * 8
    assert stored.read(keys, (0, 1)) == [ReadStatus.HEADER] * 8
    assert list(stored.store.scan()) == []


def test_a_removed_segment_is_missing_to_those_who_had_not_opened_it(open_store: Open) -> None:
    writer, reader = open_store(geometry("mha")), open_store(geometry("mha"))
    keys = chain("a", 4)
    writer.write(keys)
    reader.places = writer.places
    writer.path(keys[0]).unlink()
    assert reader.read(keys) == [ReadStatus.MISSING] * 4
    assert writer.read(keys) == [OK] * 4, "its bytes are there as long as it is open"


# -- errors of the system ---------------------------------------------------------------------


def test_a_bad_place_on_the_device_does_not_fail_its_neighbours(
    open_store: Open, faulty: Faulty
) -> None:
    stored = open_store(geometry("mha"), backend=faulty)
    keys = chain("a", 8)
    stored.write(keys)
    bad = stored.offset(keys[3])

    def fail(what: str, offset: int, sizes: list[int]) -> None:
        if what == "read" and offset <= bad < offset + sum(sizes):
            raise OSError(errno.EIO, "bad sector")

    faulty.before = fail
    statuses = stored.read(keys)
    assert statuses == [OK] * 3 + [ReadStatus.IO_ERROR] + [OK] * 4
    assert stored.read(keys, (0, 1)) == statuses
    assert ReadStatus.IO_ERROR.damaged


def test_a_device_that_fails_for_a_moment_is_asked_again(open_store: Open, faulty: Faulty) -> None:
    stored = open_store(geometry("mha"), backend=faulty)
    keys = chain("a", 8)
    stored.write(keys)
    left = [1]

    def fail_once(what: str, offset: int, sizes: list[int]) -> None:
        if left.pop() if left else False:
            raise OSError(errno.EIO, "link reset")

    faulty.before = fail_once
    assert stored.read(keys) == [OK] * 8
    assert not left


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR])
def test_a_refusal_of_the_system_says_nothing_against_a_block(
    open_store: Open, faulty: Faulty, error: int
) -> None:
    stored = open_store(geometry("mha"), backend=faulty)
    stored.write(chain("a", 4))

    def refuse(what: str, offset: int, sizes: list[int]) -> None:
        raise OSError(error, "not now")

    faulty.before = refuse
    assert stored.read(chain("a", 4)) == [ReadStatus.UNAVAILABLE] * 4
    assert not ReadStatus.UNAVAILABLE.damaged
    assert stored.write(chain("b", 4)) == [WriteStatus.UNAVAILABLE] * 4


def test_too_many_open_files_is_no_missing_segment(open_store: Open) -> None:
    writer, reader = open_store(geometry("mha")), open_store(geometry("mha"))
    writer.write([key("k")])
    reader.places = writer.places
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        statuses = reader.read([key("k")])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert statuses == [ReadStatus.UNAVAILABLE]
    assert reader.read([key("k")]) == [OK]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errno.ENOSPC, WriteStatus.NO_SPACE),
        (errno.EDQUOT, WriteStatus.NO_SPACE),
        (errno.EROFS, WriteStatus.READ_ONLY),
        (errno.EIO, WriteStatus.IO_ERROR),
        (errno.ENOMEM, WriteStatus.UNAVAILABLE),
    ],
)
def test_a_failed_write_says_why(
    open_store: Open, faulty: Faulty, error: int, status: WriteStatus
) -> None:
    def fail(what: str, offset: int, sizes: list[int]) -> None:
        raise OSError(error, "no")

    faulty.before = fail
    stored = open_store(geometry("mha"), backend=faulty)
    assert stored.write(chain("a", 3)) == [status] * 3


def test_writing_to_a_segment_that_was_given_up_fails_cleanly(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    slots = stored.take(2)
    stored.store.files.drop(slots[0].segment, unlink=True)
    items = [
        WriteItem(
            key(i),
            NO_PARENT,
            Placement(s.segment, s.slot, 1),
            blocks.filled(stored.geometry, key(i)),
        )
        for i, s in enumerate(slots)
    ]
    deadline = time.monotonic() + 30
    assert stored.store.write(items, deadline) == [WriteStatus.UNAVAILABLE] * 2
    assert not stored.store.sync([slots[0].segment], deadline)
    assert stored.store.invalidate(slots, deadline) == []


def test_a_write_that_ends_early_is_no_success(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = open_store(geometry("mha"))
    monkeypatch.setattr(PosixFile, "write", lambda self, buffers, offset: 4096)
    assert stored.write(chain("a", 2)) == [WriteStatus.IO_ERROR] * 2


# -- deadlines --------------------------------------------------------------------------------


def test_what_is_late_is_not_begun_and_what_was_begun_is_waited_for(
    open_store: Open, faulty: Faulty
) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, max_io_bytes=of.slot_bytes, threads=2)
    keys = chain("a", 10)
    stored.write(keys)
    running = set()
    lock = threading.Lock()

    def slow(what: str, offset: int, sizes: list[int]) -> None:
        with lock:
            running.add(offset)
        time.sleep(0.3)
        with lock:
            running.discard(offset)

    faulty.before = slow
    items = [stored.item(key_) for key_ in keys]
    statuses = stored.store.read(items, time.monotonic() + 0.1)
    assert not running, "nothing writes to the memory after the return"
    assert statuses.count(OK) == 2
    assert statuses.count(ReadStatus.TIMEOUT) == 8
    before = [blocks.dump(item.pieces) for item in items]
    faulty.before = lambda *_: None
    stored.read(keys)
    assert [blocks.dump(item.pieces) for item in items] == before
    for item, status in zip(items, statuses, strict=True):
        assert blocks.holds(of, item.key, item.pieces) == (status is OK)


def test_a_late_write_is_told(open_store: Open, faulty: Faulty) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, max_io_bytes=of.slot_bytes, threads=1)
    faulty.before = lambda *_: time.sleep(0.2)
    statuses = stored.write(chain("a", 4), timeout_s=0.05)
    assert statuses == [WRITTEN, *[WriteStatus.TIMEOUT] * 3]


def test_no_second_try_after_the_deadline(open_store: Open, faulty: Faulty) -> None:
    stored = open_store(geometry("mha"), backend=faulty, threads=1)
    stored.write(chain("a", 8))
    faulty.calls.clear()

    def hang(what: str, offset: int, sizes: list[int]) -> None:
        time.sleep(0.2)
        raise OSError(errno.EIO, "gone")

    faulty.before = hang
    assert stored.read(chain("a", 8), timeout_s=0.1) == [ReadStatus.IO_ERROR] * 8
    assert len(faulty.calls) == 1


# -- scanning and blanking --------------------------------------------------------------------


def test_a_scan_finds_what_was_written(open_store: Open) -> None:
    stored = open_store(geometry("mla"), segment_bytes=MIB // 4)
    keys = chain("a", 60)
    stored.write(keys)
    found = {header.key: (slot, header) for slot, header in stored.store.scan()}
    assert set(found) == set(keys)
    for parent, key_ in zip([NO_PARENT, *keys[:-1]], keys, strict=True):
        slot, header = found[key_]
        place = stored.places[key_]
        assert (slot.segment, slot.slot) == (place.segment, place.slot)
        assert (header.generation, header.parent) == (place.generation, parent)
    other = open_store(geometry("mla"))
    assert {header.key for _, header in other.store.scan()} == set(keys), "from the files alone"
    one = stored.places[keys[0]].segment
    some = {h.key for _, h in other.store.scan([one], skip=lambda _, slot: slot == 0)}
    assert some == {k for k in keys if stored.places[k].segment == one and stored.places[k].slot}


def test_a_blanked_block_is_gone(open_store: Open) -> None:
    stored = open_store(geometry("mha"))
    keys = chain("a", 6)
    stored.write(keys)
    slots = [Slot(p.segment, p.slot) for p in (stored.places[k] for k in keys[:2])]
    assert set(stored.store.invalidate(slots, time.monotonic() + 30)) == set(slots)
    assert {header.key for _, header in stored.store.scan()} == set(keys[2:])
    assert stored.read(keys) == [ReadStatus.HEADER] * 2 + [OK] * 4


def test_a_scan_says_what_it_could_not_read(open_store: Open, faulty: Faulty) -> None:
    stored = open_store(geometry("mha"), backend=faulty)
    keys = chain("a", 6)
    stored.write(keys)
    bad = stored.offset(keys[2])

    def fail(what: str, offset: int, sizes: list[int]) -> None:
        if offset == bad:
            raise OSError(errno.EIO, "bad sector")

    faulty.before = fail
    unread: list[Slot] = []
    found = {header.key for _, header in stored.store.scan(unread=unread)}
    assert found == set(keys) - {keys[2]}
    place = stored.places[keys[2]]
    assert unread == [Slot(place.segment, place.slot)]
    unread.clear()
    assert list(stored.store.scan(unread=unread, timeout_s=-1)) == []
    assert len(unread) == stored.store.files.slot_count(place.segment)


def test_a_scan_goes_on_after_a_segment_that_vanishes(open_store: Open) -> None:
    of = geometry("mha")
    writer, reader = open_store(of, segment_bytes=4 * of.slot_bytes), open_store(of)
    keys = chain("a", 12)
    writer.write(keys)
    gone = writer.places[keys[0]].segment
    numbers = reader.store.files.numbers()
    writer.path(keys[0]).unlink()
    left = {header.key for _, header in reader.store.scan(numbers)}
    assert left == {k for k in keys if writer.places[k].segment != gone}


def test_durable_means_synced(open_store: Open, faulty: Faulty) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, segment_bytes=4 * of.slot_bytes)
    stored.write(chain("a", 8))
    segments = sorted({place.segment for place in stored.places.values()})
    assert len(segments) == 2
    assert stored.store.sync(segments, time.monotonic() + 30)
    assert [what for what, _, _ in faulty.calls].count("sync") == 2

    def fail(what: str, offset: int, sizes: list[int]) -> None:
        if what == "sync":
            raise OSError(errno.EIO, "lost")

    faulty.before = fail
    assert not stored.store.sync(segments, time.monotonic() + 30)


def test_a_failing_device_is_not_logged_block_by_block(
    open_store: Open, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    of = geometry("mha")
    stored = open_store(of, backend=faulty, max_io_bytes=of.slot_bytes)
    stored.write(chain("a", 20))

    def fail(what: str, offset: int, sizes: list[int]) -> None:
        raise OSError(errno.EIO, "gone")

    faulty.before = fail
    assert stored.read(chain("a", 20)) == [ReadStatus.IO_ERROR] * 20
    assert caplog.text.count("failed") == 1


# -- many at once -----------------------------------------------------------------------------


def test_threads_read_and_write_beside_each_other(open_store: Open) -> None:
    stored = open_store(geometry("mla"), capacity_bytes=64 * MIB)
    shared = chain("shared", 40)
    stored.write(shared)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        of = stored.geometry
        try:
            for i in range(20):
                picked = rng.sample(shared, 10)
                wrong.extend(s for s in stored.read(picked) if s is not OK)
                mine = chain((seed, i), 5)
                table = stored.store.slots
                slots = table.take(5, generation := 10_000 + seed * 100 + i)
                while len(slots) < 5 and stored.store.files.add(30.0):
                    slots += table.take(5 - len(slots), generation)
                items = [
                    WriteItem(
                        k, NO_PARENT, Placement(s.segment, s.slot, generation), blocks.filled(of, k)
                    )
                    for k, s in zip(mine, slots, strict=True)
                ]
                assert stored.store.write(items, time.monotonic() + 60) == [WRITTEN] * 5
                reads = [ReadItem(item.key, item.placement, blocks.blank(of)) for item in items]
                assert stored.store.read(reads, time.monotonic() + 60) == [OK] * 5
                wrong.extend(r.key for r in reads if not blocks.holds(of, r.key, r.pieces))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_stores_of_a_root_see_each_others_blocks(open_store: Open) -> None:
    a, b = open_store(geometry("mha")), open_store(geometry("mha"))
    a.write(chain("a", 4))
    b.write(chain("b", 4))
    reader = open_store(geometry("mha"))
    reader.places = {**a.places, **b.places}
    assert reader.read([*chain("a", 4), *chain("b", 4)]) == [OK] * 8
    assert {p.segment for p in a.places.values()}.isdisjoint(p.segment for p in b.places.values())
