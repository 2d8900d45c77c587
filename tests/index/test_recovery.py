"""Opening the index of a store: checked, and rebuilt from the segments when it is bad."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import (
    EmbeddedIndex,
    Index,
    IndexDamagedError,
    IndexUnavailableError,
    embedded,
    keeper,
    recovery,
)
from dualpath_sglang.index.keeper import IndexKeeper
from dualpath_sglang.index.recovery import open_index, rebuild
from dualpath_storage import (
    NO_PARENT,
    BlockStore,
    Geometry,
    Placement,
    Space,
    StoreOptions,
    WriteItem,
)
from dualpath_storage.backends import PosixBackend
from dualpath_storage.locks import file_lock
from dualpath_storage.workers import Workers
from tests.index.records import FOREVER_S, INDEXER, KV
from tests.support import blocks
from tests.support.blocks import chain, key

Stores = Callable[[], Iterator[BlockStore]]


class Disk:
    """Blocks in segment files, without an index."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workers = Workers(2, "test")
        self.opened: list[BlockStore] = []
        self.geometries: list[Geometry] = []

    def store(self, geometry: Geometry) -> BlockStore:
        space = Space(StoreOptions(self.root, 64 << 20, min_free_fraction=0))
        backend = PosixBackend(self.root, "auto", writable=True)
        store = BlockStore(self.root, geometry, backend, space, self.workers, self.workers, 1 << 20)
        self.opened.append(store)
        return store

    def write(self, geometry: Geometry, keys: list[bytes], generation: int) -> list[Placement]:
        """Write a chain with neither index nor slot table knowing of it afterwards."""
        if geometry not in self.geometries:
            self.geometries.append(geometry)
        store = self.store(geometry)
        assert store.files.add(1.0)
        slots = store.slots.take(len(keys), generation)
        places = [Placement(s.segment, s.slot, generation) for s in slots]
        items = [
            WriteItem(name, parent, place, blocks.filled(geometry, name))
            for name, parent, place in zip(keys, [NO_PARENT, *keys[:-1]], places, strict=True)
        ]
        store.write(items, time.monotonic() + FOREVER_S)
        return places

    def stores(self) -> Iterator[BlockStore]:
        for geometry in self.geometries:
            yield self.store(geometry)

    def close(self) -> None:
        self.workers.close()
        for store in self.opened:
            store.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def opened(disk: Disk, *, read_only: bool = False, timeout_s: float = FOREVER_S) -> EmbeddedIndex:
    return open_index(disk.root, disk.stores, read_only=read_only, timeout_s=timeout_s)


def test_a_missing_index_is_made_of_what_stands_in_the_store(disk: Disk) -> None:
    kv = disk.write(KV, chain("a", 10), generation=5)
    side = disk.write(INDEXER, chain("a", 4), generation=6)
    index = opened(disk)
    assert index.lookup(KV, chain("a", 10)) == kv
    assert index.lookup(INDEXER, chain("a", 4)) == side
    parents = {e.key: e.parent for e in index.entries(KV)}
    assert [parents[k] for k in chain("a", 10)] == [NO_PARENT, *chain("a", 9)]
    index.check()
    index.close()
    assert sorted(p.name for p in disk.root.glob("index*")) == [
        "index.lmdb",
        "index.lmdb-lock",
        "index.lmdb-writer",
    ]


def test_of_two_copies_the_newer_one_counts(disk: Disk) -> None:
    for order in ((3, 4), (6, 5)):
        a = disk.write(KV, [key(order)], generation=order[0])
        b = disk.write(KV, [key(order)], generation=order[1])
        index = opened(disk)
        assert index.lookup(KV, [key(order)]) == (b if order[1] > order[0] else a)
        index.close()
        (disk.root / "index.lmdb").unlink()


def test_what_was_written_first_is_evicted_first_after_a_rebuild(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_PUBLISH_BATCH", 2)
    for i in random.Random(1).sample(range(5), 5):
        disk.write(KV, [key(i)], generation=100 + i)
    index = opened(disk)
    gone = []
    for _ in range(5):
        (freed,) = index.evict({KV.id_bytes: 1}, 1, FOREVER_S)
        gone.append(freed.generation)
    assert gone == [100, 101, 102, 103, 104]
    index.close()


def damaged_index(disk: Disk, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk.root / "index.lmdb"
    if how == "removed":
        path.unlink()
    elif how == "removed with its lock files":
        for suffix in ("", "-lock", "-writer"):
            Path(f"{path}{suffix}").unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "zeroed":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "garbage":
        path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    elif how == "garbage that no time tells":
        path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
        Path(f"{path}-writer").unlink()
    elif how == "another format":
        index = EmbeddedIndex(path)
        with index._env.write(FOREVER_S) as txn:
            txn.put(b"format", b"999", db=index._meta)
        index.close()
    else:
        assert how == "another boot"
        EmbeddedIndex(path)._env.release()
        index = EmbeddedIndex(path)
        index.touch(KV.unit, chain("a", 1), FOREVER_S)
        index._env.release()
        monkeypatch.setattr(embedded, "boot_id", lambda: b"another boot")


DAMAGES = [
    "removed",
    "removed with its lock files",
    "cut",
    "emptied",
    "zeroed",
    "garbage",
    "garbage that no time tells",
    "another format",
    "another boot",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_is_rebuilt(disk: Disk, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = disk.write(KV, chain("a", 10), generation=5)
    opened(disk).close()
    damaged_index(disk, how, monkeypatch)
    index = opened(disk)
    assert index.lookup(KV, chain("a", 10)) == places
    assert index.publish(KV, [], FOREVER_S) == []
    index.check()
    index.close()


def test_a_sound_index_is_kept(disk: Disk) -> None:
    disk.write(KV, chain("a", 10), generation=5)
    index = opened(disk)
    index.clear(KV, FOREVER_S)
    index.close()
    index = opened(disk)
    assert index.counts() == {}, "a rebuild would have found the blocks again"
    index.close()


def test_only_one_of_many_rebuilds(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    places = disk.write(KV, chain("a", 10), generation=5)
    opened(disk).close()
    (disk.root / "index.lmdb").write_bytes(b"garbage" * 5000)
    rebuilt: list[int] = []

    def counted(*args: object) -> int:
        rebuilt.append(1)
        time.sleep(0.2)
        return rebuild(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "rebuild", counted)
    found: list[object] = []

    def open_one() -> None:
        index = opened(disk)
        found.append(index.lookup(KV, chain("a", 10)))
        index.close()

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [places] * 4
    assert len(rebuilt) == 1


def test_a_rebuild_that_dies_half_way_is_begun_anew(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = disk.write(KV, chain("a", 10), generation=5)

    def broken() -> Iterator[BlockStore]:
        yield from disk.stores()
        raise OSError("the disk went away")

    with pytest.raises(IndexUnavailableError):
        open_index(disk.root, broken, read_only=False, timeout_s=FOREVER_S)
    assert not (disk.root / "index.lmdb").exists()
    index = opened(disk)
    assert index.lookup(KV, chain("a", 10)) == places
    index.close()


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_rebuild_that_is_killed_while_it_swaps_the_files_is_made_good(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    class Killed(BaseException):
        pass

    places = disk.write(KV, chain("a", 10), generation=5)
    opened(disk).close()
    (disk.root / "index.lmdb").write_bytes(b"garbage" * 5000)
    left = [steps]

    def step(real: Callable[..., object]) -> Callable[..., object]:
        def call(self: Path, *args: object, **kwargs: object) -> object:
            if self.name.startswith("index.lmdb") and self.exists():
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return real(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", step(Path.unlink))
        patch.setattr(Path, "replace", step(Path.replace))
        with contextlib.suppress(Killed):
            opened(disk).close()
    index = opened(disk)
    assert index.lookup(KV, chain("a", 10)) == places
    index.check()
    index.close()


def test_who_comes_while_another_opens_waits_no_longer_than_asked(disk: Disk) -> None:
    with file_lock(disk.root / ".open", FOREVER_S) as held:
        assert held
        with pytest.raises(IndexUnavailableError, match="being opened"):
            opened(disk, timeout_s=0.1)
    opened(disk).close()


def test_a_reader_neither_makes_nor_rebuilds(disk: Disk) -> None:
    disk.write(KV, chain("a", 3), generation=5)
    with pytest.raises(IndexUnavailableError):
        opened(disk, read_only=True)
    assert not list(disk.root.glob("index*"))
    opened(disk).close()
    reader = opened(disk, read_only=True)
    assert reader.prefix(KV, chain("a", 3)) == 3
    reader.close()
    garbage = b"garbage" * 5000
    (disk.root / "index.lmdb").write_bytes(garbage)
    with pytest.raises(IndexDamagedError):
        opened(disk, read_only=True)
    assert (disk.root / "index.lmdb").read_bytes() == garbage


def test_a_root_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(IndexUnavailableError):
            open_index(tmp_path / "none", list, read_only=read_only, timeout_s=1.0)


# -- keeping it open --------------------------------------------------------------------------


class FakeIndex:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IndexKeeper]]:
    made: list[IndexKeeper] = []

    def make(open_: Callable[[], object], opened: Callable[[Index], None]) -> IndexKeeper:
        made.append(IndexKeeper("root", open_, opened))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_index_is_opened_once_and_settled_before_others_use_it(
    kept: Callable[..., IndexKeeper],
) -> None:
    told: list[Index | None] = []
    keeper_ = kept(FakeIndex, lambda index: told.append(keeper_.index))
    keeper_.ensure()
    first = keeper_.index
    keeper_.ensure()
    assert keeper_.index is first is not None
    assert told == [None]


def test_a_damaged_index_is_let_go_and_opened_again(
    kept: Callable[..., IndexKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(keeper, "_CLOSE_GRACE_S", 0.0)
    keeper_ = kept(FakeIndex, lambda _: None)
    keeper_.ensure()
    lost = keeper_.index
    for _ in range(2):  # two threads find the same damage
        with keeper_.guarded(lost):
            raise IndexDamagedError("bad")
    assert keeper_.index is None
    keeper_.ensure()
    renewed = keeper_.index
    assert renewed is not lost
    with keeper_.guarded(lost):  # a third one, late
        raise IndexDamagedError("bad")
    assert keeper_.index is renewed
    keeper_.ensure()
    assert lost.closed, "in the end"  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [IndexUnavailableError("slow"), OSError("no root")])
def test_other_failures_are_swallowed_and_change_nothing(
    kept: Callable[..., IndexKeeper], error: Exception
) -> None:
    keeper_ = kept(FakeIndex, lambda _: None)
    keeper_.ensure()
    index = keeper_.index
    with keeper_.guarded(index) as given:
        assert given is index
        raise error
    assert keeper_.index is index


def test_what_cannot_be_opened_is_tried_more_and_more_seldom(
    kept: Callable[..., IndexKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    tries: list[float] = []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: clock[0])

    def fail() -> object:
        tries.append(clock[0])
        raise IndexUnavailableError("no")

    keeper_ = kept(fail, lambda _: None)
    while clock[0] < 300:
        keeper_.ensure()
        clock[0] += 0.5
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:5] == [1, 2, 4, 8, 16]
    assert set(gaps[5:]) == {20}, "within half a minute of its return"


def test_an_index_that_is_lost_at_once_each_time_is_not_rebuilt_in_a_loop(
    kept: Callable[..., IndexKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    made: list[FakeIndex] = []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: clock[0])

    def open_() -> FakeIndex:
        made.append(FakeIndex())
        return made[-1]

    keeper_ = kept(open_, lambda _: None)
    while clock[0] < 300:
        keeper_.ensure()
        with keeper_.guarded(keeper_.index) as index:
            if index is not None:
                raise IndexDamagedError("again")
        clock[0] += 0.5
    assert len(made) < 25


def test_an_index_that_cannot_be_settled_is_used_all_the_same(
    kept: Callable[..., IndexKeeper],
) -> None:
    def fail(_: Index) -> None:
        raise IndexUnavailableError("busy")

    keeper_ = kept(FakeIndex, fail)
    keeper_.ensure()
    assert keeper_.index is not None
