"""One index, many processes: they take turns, die at any moment, stop, and harm nobody."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import EmbeddedIndex, IndexUnavailableError
from tests.index.records import FOREVER_S, KV, records
from tests.support.blocks import chain
from tests.support.zygote import Zygote

PATIENCE_S = 0.3
LATE_S = 20.0  # far above any deadline here, far below "for ever"


@pytest.fixture
def index(path: Path) -> Iterator[EmbeddedIndex]:
    opened = EmbeddedIndex(path)
    yield opened
    opened.close()


def test_processes_write_in_turn(path: Path, children: Zygote) -> None:
    running = [children.fork("publish_and_evict", path, str(i), 60) for i in range(4)]
    assert [child.wait() for child in running] == [0] * 4, [child.text() for child in running]
    index = EmbeddedIndex(path)
    index.check()
    found = {(e.key, e.placement) for e in index.entries()}
    written = {
        (record.key, record.placement)
        for name in range(4)
        for i in range(60)
        for record in records(chain((str(name), i), 8), segment=name, slot=8 * i)
    }
    assert found
    assert found <= written
    index.close()


@pytest.mark.parametrize("how", ["hold_a_transaction", "hold_the_lock"])
def test_a_killed_writer_holds_nobody_up(
    path: Path, index: EmbeddedIndex, children: Zygote, how: str
) -> None:
    keys = chain("a", 10)
    index.publish(KV, records(keys), FOREVER_S)
    for _ in range(3):
        child = children.fork(how, path)
        child.until("holding")
        began = time.monotonic()
        with pytest.raises(IndexUnavailableError, match="no turn to write"):
            index.touch(KV.unit, keys, PATIENCE_S)
        assert time.monotonic() - began < LATE_S
        child.send(signal.SIGKILL)
        index.touch(KV.unit, keys, FOREVER_S)
        child.wait()
        assert index.prefix(KV, keys) == 10
        index.check()
    with index._env.read() as txn:
        assert not [n for n, _ in txn.cursor(index._meta) if n.startswith(b"half")]


@pytest.mark.parametrize("how", ["hold_a_transaction", "hold_the_lock"])
def test_a_stopped_writer_makes_others_miss_in_time(
    path: Path, index: EmbeddedIndex, children: Zygote, how: str
) -> None:
    keys = chain("a", 10)
    index.publish(KV, records(keys), FOREVER_S)
    child = children.fork(how, path)
    child.until("holding")
    child.send(signal.SIGSTOP)
    calls: list[Callable[[], object]] = [
        lambda: index.publish(KV, records(chain("b", 3)), PATIENCE_S),
        lambda: index.touch(KV.unit, keys, PATIENCE_S),
        lambda: index.evict({KV.id_bytes: 1}, 1, PATIENCE_S),
        lambda: index.remove(KV, [(keys[0], 1)], PATIENCE_S),
        lambda: index.clear(KV, PATIENCE_S),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(IndexUnavailableError, match="no turn to write"):
            call()
        assert time.monotonic() - began < LATE_S
    assert index.prefix(KV, keys) == 10, "reading goes on"
    opener = children.fork("try_to_open", path, PATIENCE_S)
    assert opener.wait(LATE_S) == 0
    assert "unavailable" in opener.text(), "nor does opening hang"
    child.send(signal.SIGKILL)
    child.wait()
    index.touch(KV.unit, keys, FOREVER_S)
    index.check()


def test_writers_killed_at_any_moment_leave_whole_chains(
    path: Path, children: Zygote, request: pytest.FixtureRequest
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for i in range(30):
        child = children.fork("write_for_ever", path, i)
        child.until("writing")
        time.sleep(rng.random() * 0.05)
        child.kill()
        index = EmbeddedIndex(path)
        index.check()
        entries = {e.key: e for e in index.entries()}
        for entry in entries.values():
            # Leaves go first, and a chain is published whole: no page is without its parent.
            assert entry.parent == bytes(32) or entry.parent in entries
        index.close()


def test_snapshots_of_killed_readers_are_forgotten(
    path: Path, index: EmbeddedIndex, children: Zygote
) -> None:
    index.publish(KV, records(chain("a", 10)), FOREVER_S)
    readers = [children.fork("hold_a_snapshot", path) for _ in range(3)]
    for reader in readers:
        reader.until("reading")
    for reader in readers:
        reader.kill()
    assert index._env._env is not None
    assert index._env._env.readers().count("\n") > 3
    index.upkeep()
    assert index._env._env.reader_check() == 0


def test_old_pages_are_used_again_after_readers_were_killed(
    path: Path, index: EmbeddedIndex, children: Zygote
) -> None:
    index.publish(KV, records(chain("a", 100)), FOREVER_S)
    reader = children.fork("hold_a_snapshot", path)
    reader.until("reading")
    reader.kill()
    index.upkeep()
    for _ in range(20):
        index.touch(KV.unit, chain("a", 100), FOREVER_S)
    size = path.stat().st_size
    for _ in range(200):
        index.touch(KV.unit, chain("a", 100), FOREVER_S)
    assert path.stat().st_size == size
