"""Small file systems of a test's own, in a file: they fill up, and turn read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="NOT TESTED: this fault needs root, for a loop mount; run the tests as root",
)


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 file system of a size, mounted below a directory; it turns read-only on errors."""
    image, point = directory / "disk.img", directory / "disk"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", image)
    point.mkdir()
    _run("mount", "-o", "loop,errors=remount-ro", image, point)
    try:
        yield point
    finally:
        _run("umount", "-l", point)
        image.unlink()


def remount(point: Path, how: str) -> None:
    """Make an idle mount ``ro`` or ``rw``."""
    _run("mount", "-o", f"remount,{how}", point)


def break_down(point: Path) -> None:
    """Let a mount turn read-only under its users, as after an error of its device."""
    device = os.stat(point).st_dev  # noqa: PTH116
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("test\n")
    for i in range(500):  # newer kernels refuse to write, but do not call the mount read-only
        try:
            (point / f"writable-{i}").touch()
        except OSError as error:
            assert error.errno == errno.EROFS
            return
        time.sleep(0.01)
    raise AssertionError(f"{point} did not turn read-only")


def fill_up(point: Path, leave_bytes: int = 0) -> Path:
    """A file that takes all the space of a mount but some."""
    ballast = point / "ballast"
    stat = os.statvfs(point)
    with ballast.open("wb") as file:
        size = max(0, stat.f_bavail * stat.f_frsize - leave_bytes)
        while size >= stat.f_frsize:
            try:
                os.posix_fallocate(file.fileno(), ballast.stat().st_size, size)
            except OSError:
                size //= 2
    return ballast
