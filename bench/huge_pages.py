"""Huge pages for the pool of a bench, as an operator would reserve them for SGLang's host pool."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RESERVED = Path("/proc/sys/vm/nr_hugepages")
_HUGE_BYTES = 2 << 20


@contextmanager
def huge_pages(size: int) -> Iterator[bool]:
    """Have SGLang put its host pools into huge pages, ``size`` bytes of them at the most.

    Root reserves what is missing and gives it back at the end.

    Yields:
        False when there are not enough, or none are asked for; then nothing is changed.
    """
    if size == 0:
        yield False
        return
    before = _RESERVED.read_text() if _RESERVED.exists() else ""
    missing = -(-size // _HUGE_BYTES) - _free()
    if before and missing > 0:
        _reserve(int(before) + missing)
    enough = _free() * _HUGE_BYTES >= size
    name = "SGLANG_HUGEPAGE_SIZE"
    had = os.environ.get(name)
    if enough:
        os.environ[name] = "2MB"
    try:
        yield enough
    finally:
        if had is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = had
        if before and missing > 0:
            _reserve(int(before))


def _free() -> int:
    """Huge pages of 2 MiB that nobody has."""
    text = Path("/proc/meminfo").read_text()
    free = re.search(r"HugePages_Free:\s+(\d+)", text)
    size = re.search(r"Hugepagesize:\s+(\d+) kB", text)
    if free is None or size is None or int(size[1]) << 10 != _HUGE_BYTES:
        return 0
    return int(free[1])


def _reserve(count: int) -> None:
    try:
        _RESERVED.write_text(str(count))
    except OSError:
        return  # not root: what is free has to do
