"""Capacity: what may be taken of the file system, and how large a segment is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_storage import Space, StoreError, StoreOptions
from dualpath_storage.locks import acquire, file_lock
from dualpath_storage.paths import (
    geometry_directories,
    segment_number,
    segment_path,
    segment_paths,
)
from tests.support.blocks import geometry

MIB = 1 << 20
Statvfs = namedtuple("Statvfs", "f_blocks f_frsize f_bavail")


def space(root: Path, **options: object) -> Space:
    return Space(StoreOptions(root, **options))  # type: ignore[arg-type]


def segment(root: Path, name: str, size: int) -> Path:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_segment_fits_up_to_the_capacity_and_not_a_byte_more(tmp_path: Path) -> None:
    limited = space(tmp_path, capacity_bytes=10 * MIB, min_free_fraction=0)
    assert limited.fits(10 * MIB)
    assert not limited.fits(10 * MIB + 1)
    segment(tmp_path, "a/seg-00000000", 4 * MIB)
    segment(tmp_path, "b/seg-00000001", 3 * MIB)
    assert limited.used_bytes() == 7 * MIB
    assert limited.fits(3 * MIB)
    assert not limited.fits(3 * MIB + 1)


def test_segments_count_whether_or_not_their_geometry_can_be_read(tmp_path: Path) -> None:
    limited = space(tmp_path, capacity_bytes=10 * MIB)
    segment(tmp_path, "no-geometry/seg-00000000", 1 * MIB)
    segment(tmp_path, "damaged/seg-00000000", 2 * MIB)
    (tmp_path / "damaged" / "geometry.json").write_bytes(b"\xff\x00")
    segment(tmp_path, "damaged/seg-strange", 4 * MIB)
    assert limited.used_bytes() == 7 * MIB


def test_a_share_of_the_file_system_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = space(tmp_path, capacity_bytes=1 << 40, min_free_fraction=0.1)
    monkeypatch.setattr(os, "statvfs", lambda _: Statvfs(1000, MIB, 150))
    assert limited.fits(50 * MIB)
    assert not limited.fits(50 * MIB + 1)


def test_the_capacity_may_be_a_share_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: Statvfs(1000, MIB, 1000))
    assert space(tmp_path, capacity_fraction=0.25).capacity_bytes == 250 * MIB


def test_reaching_a_limit_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limited = space(tmp_path, capacity_bytes=MIB, min_free_fraction=0)
    with caplog.at_level("INFO"):
        for _ in range(5):
            limited.fits(2 * MIB)
    assert caplog.text.count("has reached its capacity") == 1


@given(
    st.integers(1, 1 << 44),
    st.integers(1, 495),
    st.integers(1, 1 << 22),
)
def test_a_segment_holds_a_slot_and_leaves_room_for_others(
    capacity: int, layers: int, layer_bytes: int
) -> None:
    of = geometry(layers=layers, layer_bytes=layer_bytes)
    size = Space(StoreOptions(Path("/"), capacity_bytes=capacity)).segment_bytes(of)
    slot = of.slot_bytes
    assert size >= slot
    assert size % 4096 == 0
    assert size <= max(capacity // 4, slot), "others can have a part of the capacity"
    assert size <= max(256 * MIB, slot, capacity // 1024) + MIB, "large stores: larger, not more"
    unused = size % slot
    assert unused <= min(MIB, size // 2), "hardly anything is lost behind the last slot"
    if capacity >= 64 * 16 * slot:
        assert size // slot >= min(16, 256 * MIB // slot), "small blocks share a segment"


def test_the_segment_size_can_be_given(tmp_path: Path) -> None:
    given_size = space(tmp_path, capacity_bytes=MIB, segment_bytes=123_456)
    assert given_size.segment_bytes(geometry()) == 123_456
    large = geometry(layer_bytes=MIB)
    assert given_size.segment_bytes(large) == large.slot_bytes


def test_a_root_that_is_gone_is_empty(tmp_path: Path) -> None:
    assert space(tmp_path / "gone", capacity_bytes=1).used_bytes() == 0
    assert geometry_directories(tmp_path / "gone") == []
    assert segment_paths(tmp_path / "gone") == []


def test_only_a_segments_name_has_a_number(tmp_path: Path) -> None:
    for number in (0, 1, 2**32 - 1):
        assert segment_number(segment_path(tmp_path, number)) == number
    for name in (
        "seg-",
        "seg-1",
        "seg-0000000g",
        "seg-00000001.new",
        "seg-000000001",
        "seg-+0000001",
    ):
        assert segment_number(tmp_path / name) is None
    assert segment_number(tmp_path / "seg-0000000A") is None


def test_a_lock_is_had_by_one_and_freed_by_death(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with file_lock(path, 0.05) as held:
            assert not held
        holder.kill()
    with file_lock(path, 30.0) as held:
        assert held
        with file_lock(path, 0.0) as again:
            assert not again


def test_a_lock_is_had_as_soon_as_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    release = threading.Event()
    taken = threading.Event()

    def hold() -> None:
        with file_lock(path, 30.0):
            taken.set()
            release.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30.0)
    threading.Timer(0.1, release.set).start()
    with path.open("rb") as file:
        assert acquire(file.fileno(), 30.0)
    thread.join()


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_bytes": 0},
        {"capacity_fraction": 0.0},
        {"capacity_fraction": 1.1},
        {"min_free_fraction": -0.1},
        {"min_free_fraction": 1.0},
        {"io_threads": 0},
        {"io_threads": 1000},
        {"read_timeout_s": 0.0},
        {"write_timeout_s": -1.0},
        {"lookup_timeout_s": 0.0},
        {"segment_bytes": 100},
        {"max_io_bytes": 100},
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(StoreError):
        StoreOptions(tmp_path, **options)  # type: ignore[arg-type]
