"""Memory that a device can take as it is: no copy, the same bytes, and a way back when refused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import pytest
import torch

from dualpath_sglang.page_memory import PageMemory
from dualpath_storage import NO_PARENT, Placement, ReadItem, ReadStatus, WriteItem, WriteStatus
from dualpath_storage.blocks import CopyingPieces
from dualpath_storage.memory import in_huge_pages, lies_in_huge_pages
from tests.storage.conftest import MIB, Open, Stored
from tests.storage.test_store import Faulty
from tests.support import blocks
from tests.support.blocks import chain, geometry

HUGE_BYTES = 2 * MIB
OF = geometry("mha", layer_bytes=64 << 10)


class InPlace(CopyingPieces):
    """Pieces that say of themselves that they need no copy."""

    suit_direct_io = True

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        return self._pieces[index]

    def copy_to(self, block: memoryview) -> None:
        raise AssertionError("a copy was made")

    def copy_from(self, block: memoryview) -> None:
        raise AssertionError("a copy was made")


class Refused(InPlace):
    """The same, of which copies are no failure."""

    copy_to = CopyingPieces.copy_to
    copy_from = CopyingPieces.copy_from


def write(stored: Stored, keys: Sequence[bytes], kind: type[InPlace]) -> list[WriteStatus]:
    items = []
    for i, (key, slot) in enumerate(zip(keys, stored.take(len(keys)), strict=True)):
        place = stored.places[key] = Placement(slot.segment, slot.slot, 1)
        items.append(
            WriteItem(key, keys[i - 1] if i else NO_PARENT, place, kind(blocks.filled(OF, key)))
        )
    return stored.store.write(items, time.monotonic() + 30)


def read(stored: Stored, keys: Sequence[bytes], kind: type[InPlace]) -> list[ReadStatus]:
    """Statuses; what is OK holds the right bytes."""
    items = [ReadItem(key, stored.places[key], kind(blocks.blank(OF))) for key in keys]
    statuses = stored.store.read(items, time.monotonic() + 30)
    for item, status in zip(items, statuses, strict=True):
        if status is ReadStatus.OK:
            assert blocks.holds(OF, item.key, item.pieces)
    return statuses


def test_no_copy_is_made_and_the_bytes_are_the_same(open_store: Open) -> None:
    stored = open_store(OF)
    keys = chain("a", 7)
    assert write(stored, keys, InPlace) == [WriteStatus.OK] * 7
    assert read(stored, keys, InPlace) == [ReadStatus.OK] * 7
    assert stored.read(keys) == [ReadStatus.OK] * 7, "nor does a copy read anything else"
    assert stored.write(chain("b", 3)) == [WriteStatus.OK] * 3
    assert read(stored, chain("b", 3), InPlace) == [ReadStatus.OK] * 3


def test_a_damaged_block_is_found_in_place_too(open_store: Open) -> None:
    stored = open_store(OF)
    keys = chain("a", 4)
    write(stored, keys, InPlace)
    stored.damage(keys[2], 4096 + 100_000, b"\x00\xff\x00")
    statuses = read(stored, keys, InPlace)
    assert statuses == [ReadStatus.OK, ReadStatus.OK, ReadStatus.CHECKSUM, ReadStatus.OK]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_memory_that_the_system_refuses_is_copied_from_then_on(
    open_store: Open, tmp_path: Path, code: int
) -> None:
    faulty = Faulty(tmp_path)
    if not faulty.direct:
        pytest.fail("this needs a disk with direct I/O")
    stored = open_store(OF, backend=faulty)
    keys = chain("a", 3)

    def refuse(what: str, offset: int, sizes: list[int]) -> None:
        del offset
        if what != "sync" and len(sizes) > 1:
            raise OSError(code, "not this memory")

    faulty.before = refuse
    assert write(stored, keys, Refused) == [WriteStatus.OK] * 3
    assert read(stored, keys, Refused) == [ReadStatus.OK] * 3
    tried = [what for what, _, sizes in faulty.calls if len(sizes) > 1]
    assert tried == ["write"], "once"


def address_of(area: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def test_the_system_tells_where_memory_lies() -> None:
    size = 8 * HUGE_BYTES
    huge = in_huge_pages(size)
    huge[:] = bytes(size)
    small = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small.madvise(mmap.MADV_NOHUGEPAGE)
    small[:] = bytes(size)
    never = "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    assert lies_in_huge_pages(address_of(huge), size) is not never
    assert not lies_in_huge_pages(address_of(memoryview(small)), size)
    assert not lies_in_huge_pages(4096, size), "nobody's memory"
    assert not lies_in_huge_pages(address_of(huge), 0)


@pytest.mark.parametrize(
    ("layer_bytes", "huge", "suits"),
    [
        (64 << 10, True, True),
        (64 << 10, False, False),
        (8 << 10, True, False),
        (20_000, True, False),
    ],
)
def test_a_pool_is_used_in_place_only_where_that_is_no_loss(
    layer_bytes: int, huge: bool, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dualpath_sglang.page_memory.lies_in_huge_pages", lambda address, size: huge
    )
    layers, pages = 2, 3
    area = memoryview(mmap.mmap(-1, layers * pages * layer_bytes))
    pool = torch.frombuffer(area, dtype=torch.uint8).view(pages, layers, layer_bytes)
    memory = PageMemory(list(pool.unbind(1)), layers)
    assert memory.pieces(1).suit_direct_io is suits
