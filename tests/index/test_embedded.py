"""The embedded index: what is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import EmbeddedIndex, IndexDamagedError, IndexUnavailableError
from tests.index.records import FOREVER_S, KV, records
from tests.support.blocks import chain, key

ONE = {KV.id_bytes: 1}


@pytest.fixture
def index(path: Path) -> Iterator[EmbeddedIndex]:
    opened = EmbeddedIndex(path)
    yield opened
    opened.close()


def test_closing_one_leaves_the_other(path: Path) -> None:
    a, b = EmbeddedIndex(path), EmbeddedIndex(path)
    a.publish(KV, records(chain("a", 3)), FOREVER_S)
    a.close()
    assert b.prefix(KV, chain("a", 3)) == 3
    b.publish(KV, records(chain("b", 3), slot=10), FOREVER_S)
    b.close()
    c = EmbeddedIndex(path)
    assert c.prefix(KV, chain("b", 3)) == 3
    c.close()


def test_a_thread_that_writes_for_long_makes_others_late_not_stuck(index: EmbeddedIndex) -> None:
    inside, release = threading.Event(), threading.Event()

    def hold() -> None:
        with index._env.write(FOREVER_S):
            inside.set()
            release.wait(FOREVER_S)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(FOREVER_S)
    began = time.monotonic()
    with pytest.raises(IndexUnavailableError, match="no turn"):
        index.touch(KV.unit, [key("a")], 0.1)
    assert time.monotonic() - began < 20
    assert index.lookup(KV, [key("a")]) == [None]
    release.set()
    thread.join()
    index.touch(KV.unit, [key("a")], FOREVER_S)


def test_a_walk_sees_one_moment(index: EmbeddedIndex) -> None:
    keys = chain("a", 10)
    index.publish(KV, records(keys), FOREVER_S)
    walk = index.entries()
    first = next(walk)
    index.clear(KV, FOREVER_S)
    assert {first.key, *(entry.key for entry in walk)} == set(keys)


# -- reading only -----------------------------------------------------------------------------


def test_a_reader_sees_what_others_write_and_writes_nothing(path: Path) -> None:
    writer = EmbeddedIndex(path)
    writer.publish(KV, records(chain("a", 3)), FOREVER_S)
    writer.close()
    before = (path.stat().st_mtime_ns, Path(f"{path}-writer").read_bytes())
    reader = EmbeddedIndex(path, read_only=True)
    assert reader.prefix(KV, chain("a", 3)) == 3
    calls: list[Callable[[], object]] = [
        lambda: reader.publish(KV, records(chain("b", 1)), FOREVER_S),
        lambda: reader.touch(KV.unit, chain("a", 1), FOREVER_S),
        lambda: reader.evict(ONE, 1, FOREVER_S),
        lambda: reader.clear(KV, FOREVER_S),
    ]
    for call in calls:
        with pytest.raises(IndexUnavailableError, match="reading only"):
            call()
    reader.check()
    with pytest.raises(IndexUnavailableError, match="reading only in this process"):
        EmbeddedIndex(path)
    reader.close()
    assert (path.stat().st_mtime_ns, Path(f"{path}-writer").read_bytes()) == before
    EmbeddedIndex(path).close()


def test_a_reader_makes_no_file(path: Path) -> None:
    with pytest.raises(IndexUnavailableError):
        EmbeddedIndex(path, read_only=True)
    assert not path.exists()
    assert not Path(f"{path}-writer").exists()


def test_a_reader_notices_damage_too(path: Path) -> None:
    EmbeddedIndex(path).close()
    reader = EmbeddedIndex(path, read_only=True)
    with path.open("r+b") as file:
        file.write(bytes(8192))
    with pytest.raises(IndexDamagedError):
        reader.lookup(KV, [key("a")])
    reader.close()
