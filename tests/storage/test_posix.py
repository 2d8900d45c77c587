"""Segment files: probing the mount, direct I/O and its refusals, locks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dualpath_storage import StoreError
from dualpath_storage.backends import PosixBackend
from dualpath_storage.backends.posix import PosixFile
from dualpath_storage.memory import aligned

MIB = 1 << 20


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dualpath-test-"))
    yield directory
    shutil.rmtree(directory)


def no_direct_io(monkeypatch: pytest.MonkeyPatch, *, at: str, error: int) -> None:
    """Let direct I/O fail at `open` or at `write`, as some mounts do."""
    real_open, real_write = os.open, os.pwritev
    direct: set[int] = set()

    def open_(path: object, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(error, "refused")
        fd = real_open(path, flags, *args)  # type: ignore[arg-type]
        direct.add(fd) if flags & os.O_DIRECT else direct.discard(fd)
        return fd

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(error, "refused")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", write)


def test_a_disk_takes_direct_io(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    assert backend.direct
    assert backend.alignment == 512
    assert PosixBackend(tmp_path, "on", writable=True).direct
    assert not PosixBackend(tmp_path, "off", writable=True).direct
    assert list(tmp_path.iterdir()) == [], "the probe leaves nothing"


@pytest.mark.parametrize("at", ["open", "write"])
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
def test_a_mount_without_direct_io_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: int
) -> None:
    no_direct_io(monkeypatch, at=at, error=error)
    backend = PosixBackend(tmp_path, "auto", writable=True)
    assert (backend.direct, backend.alignment) == (False, 1)
    file = backend.create(tmp_path / "seg-00000000", MIB)
    assert file is not None
    assert file.write([memoryview(b"odd")], 1) == 3
    file.close()
    with pytest.raises(StoreError, match="direct_io is on"):
        PosixBackend(tmp_path, "on", writable=True)
    assert [p.name for p in tmp_path.iterdir()] == ["seg-00000000"]


def test_memory_file_systems_work_with_or_without(memory_directory: Path) -> None:
    backend = PosixBackend(memory_directory, "auto", writable=True)
    file = backend.create(memory_directory / "seg-00000000", MIB)
    assert file is not None
    page = aligned(4096)
    page[:5] = b"hello"
    assert file.write([page], 8192) == 4096
    back = aligned(4096)
    assert file.read([back], 8192) == 4096
    assert back == page
    file.close()


def test_what_lies_about_direct_io_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 4096)  # reads nothing at all
    assert not PosixBackend(tmp_path, "auto", writable=True).direct


def test_no_probe_is_written_when_nothing_may_be(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    before = tmp_path.stat().st_mtime_ns
    assert not PosixBackend(tmp_path, "auto", writable=False).direct
    assert PosixBackend(tmp_path, "on", writable=False).direct
    assert tmp_path.stat().st_mtime_ns == before


def test_a_segment_is_preallocated(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    file = backend.create(tmp_path / "seg-00000000", 4 * MIB)
    assert file is not None
    stat = (tmp_path / "seg-00000000").stat()
    assert stat.st_size == file.size_bytes == 4 * MIB
    assert stat.st_blocks * 512 >= 4 * MIB
    assert backend.create(tmp_path / "seg-00000000", MIB) is None, "the name is taken"
    assert file.whole and file.linked
    file.close()


def test_a_file_system_that_cannot_reserve_gets_a_file_of_that_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = PosixBackend(tmp_path, "auto", writable=True).create(tmp_path / "seg-00000000", MIB)
    assert file is not None
    assert (tmp_path / "seg-00000000").stat().st_size == MIB
    file.close()


def test_a_segment_for_which_there_is_no_space_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="full"):
        PosixBackend(tmp_path, "auto", writable=True).create(tmp_path / "seg-00000000", MIB)
    assert list(tmp_path.iterdir()) == []


def test_one_owner_at_a_time_even_in_one_process(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    path = tmp_path / "seg-00000000"
    file = backend.create(path, MIB)
    assert file is not None
    assert backend.lock(path) is None
    reader = backend.open(path)
    file.unlock()
    second = backend.lock(path)
    assert second is not None
    second.close()
    third = backend.lock(path)
    assert third is not None
    for each in (third, reader, file, file):
        each.close()


def test_a_segment_in_the_making_cannot_be_taken_over(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    (tmp_path / "seg-00000000").touch()
    assert backend.lock(tmp_path / "seg-00000000") is None


def test_creating_waits_for_whoever_looks_at_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seg-00000000"
    real = os.open
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(0.3)"
    )
    lookers: list[subprocess.Popen[bytes]] = []

    def open_(name: object, flags: int, *args: int) -> int:
        fd = real(name, flags, *args)  # type: ignore[arg-type]
        if flags & os.O_EXCL and name == path:
            looker = subprocess.Popen(
                [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE
            )
            assert looker.stdout is not None
            looker.stdout.readline()
            lookers.append(looker)
        return fd

    backend = PosixBackend(tmp_path, "auto", writable=True)
    monkeypatch.setattr(os, "open", open_)
    file = backend.create(path, MIB)
    assert file is not None
    assert file.size_bytes == MIB
    assert len(lookers) == 1
    lookers[0].communicate()
    file.close()


def test_a_removed_and_a_shortened_file_are_noticed(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    path = tmp_path / "seg-00000000"
    file = backend.create(path, MIB)
    assert file is not None
    os.truncate(path, MIB - 1)
    assert file.linked and not file.whole
    path.unlink()
    assert not file.linked
    file.close()


@pytest.mark.parametrize("step", [512, 4096, 1536])
def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The kernel may stop anywhere: at 2 GiB, at a signal, at a bad page of memory."""
    real_read, real_write = os.preadv, os.pwritev

    def first(buffers: Sequence[memoryview], most: int) -> list[memoryview]:
        kept = []
        for buffer in buffers:
            kept.append(buffer[:most])
            most -= len(kept[-1])
        return [b for b in kept if b]

    monkeypatch.setattr(os, "preadv", lambda fd, b, at: real_read(fd, first(b, step), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: real_write(fd, first(b, step), at))
    backend = PosixBackend(tmp_path, "auto", writable=True)
    file = backend.create(tmp_path / "seg-00000000", MIB)
    assert file is not None
    data = [aligned(4096) for _ in range(3)]
    for i, page in enumerate(data):
        page[:] = os.urandom(4095) + bytes([i])
    assert file.write(data, 4096) == 3 * 4096
    back = [aligned(4096) for _ in range(3)]
    assert file.read(back, 4096) == 3 * 4096
    assert back == data
    end = [aligned(4096), aligned(4096)]
    assert file.read(end, MIB - 4096) == 4096, "the end of the file is the end"
    file.close()


def test_reading_past_the_end_is_short(tmp_path: Path) -> None:
    path = tmp_path / "seg-00000000"
    path.write_bytes(bytes(5000))
    for fd in (os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT)):
        file = PosixFile(fd)
        assert file.read([aligned(4096), aligned(4096)], 0) == 5000
        assert file.read([aligned(4096)], 8192) == 0
        file.close()


def test_a_closed_file_is_an_error_not_another_file(tmp_path: Path) -> None:
    path = tmp_path / "seg-00000000"
    path.write_bytes(bytes(8192))
    file = PosixFile(os.open(path, os.O_RDONLY))
    file.close()
    with path.open("rb"), pytest.raises(OSError, match="Bad file descriptor"):
        file.read([aligned(4096)], 0)


def test_a_file_whose_maker_was_killed_before_it_had_a_size_is_removed(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path, "auto", writable=True)
    new, old = tmp_path / "seg-00000001", tmp_path / "seg-00000002"
    for path in (new, old):
        path.touch()
    os.utime(old, (0, time.time() - 120))
    assert backend.lock(new) is None
    assert backend.lock(old) is None
    assert new.exists(), "it may be in the making"
    assert not old.exists()
