"""Runs of a file in memory: never two for one page, never above the bound, given back."""

from __future__ import annotations

import fcntl
import mmap
import os
import random

import pytest

from dualpath_sglang.node.shared_memory import SharedMemory

PAGE = 4096
MIB = 1 << 20


def test_runs_never_overlap_and_all_of_it_can_be_had() -> None:
    memory = SharedMemory(64 * PAGE)
    rng = random.Random(5)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            offset = rng.choice(list(held))
            memory.give(offset, held.pop(offset))
        else:
            size = rng.randrange(1, 9 * PAGE)
            offset = memory.take(size)
            if offset is not None:
                pages = -(-size // PAGE)
                mine = set(range(offset // PAGE, offset // PAGE + pages))
                for at, other in held.items():
                    assert mine.isdisjoint(range(at // PAGE, at // PAGE - (-other // PAGE)))
                held[offset] = size
        assert memory.used_bytes == sum(-(-size // PAGE) * PAGE for size in held.values())
    for offset, size in held.items():
        memory.give(offset, size)
    assert memory.take(64 * PAGE) == 0
    assert memory.take(1) is None


def test_what_was_not_taken_cannot_be_given_back() -> None:
    memory = SharedMemory(8 * PAGE)
    with pytest.raises(AssertionError):
        memory.give(0, PAGE)


def test_memory_costs_nothing_before_it_is_used_and_comes_back() -> None:
    memory = SharedMemory(256 * MIB)
    fd = memory.fd
    assert fd is not None

    def in_use() -> int:
        return os.fstat(fd).st_blocks * 512

    assert in_use() == 0
    offset = memory.take(32 * MIB)
    assert offset is not None
    memory.bytes[offset : offset + 32 * MIB] = b"\1" * (32 * MIB)
    assert 32 * MIB <= in_use() <= 34 * MIB
    kept = memory.take(2 * MIB)
    assert kept is not None
    memory.bytes[kept : kept + 2 * MIB] = b"\2" * (2 * MIB)
    memory.give(offset, 32 * MIB)
    memory.release()
    assert in_use() <= 4 * MIB
    assert memory.bytes[kept : kept + 2 * MIB] == b"\2" * (2 * MIB)


def test_nobody_can_change_its_size() -> None:
    memory = SharedMemory(16 * PAGE)
    assert memory.fd is not None
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    for size in (0, 32 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


def test_others_see_what_was_written() -> None:
    memory = SharedMemory(16 * PAGE)
    assert memory.fd is not None
    memory.bytes[5 * PAGE : 5 * PAGE + 4] = b"here"
    with mmap.mmap(memory.fd, 16 * PAGE, prot=mmap.PROT_READ) as view:
        assert view[5 * PAGE : 5 * PAGE + 4] == b"here"


def test_without_files_in_memory_there_is_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = SharedMemory(16 * PAGE)
    assert memory.fd is None
    memory.bytes[:4] = b"here"
    memory.release()
