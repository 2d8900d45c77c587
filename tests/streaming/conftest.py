"""Fixtures for the streamer's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.streaming.bed import Bed

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def make_bed(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    """`make_bed(options, **store)`: a cache with a streamer, closed after the test."""
    beds: list[Bed] = []

    def make(*args: Any, **kwargs: Any) -> Bed:
        beds.append(Bed(tmp_path / f"store-{len(beds)}", *args, **kwargs))
        return beds[-1]

    yield make
    for bed in beds:
        bed.__exit__()


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    """A cache with a streamer."""
    return make_bed()


@pytest.fixture
def seed() -> int:
    """A seed that the report of a failure shows; DUALPATH_TEST_SEED repeats it."""
    value = int(os.environ.get("DUALPATH_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"DUALPATH_TEST_SEED={value}")
    return value
