"""Index files that are cut, zeroed, overwritten, removed or of another format.

The live tests damage the file under a running process, which maps it into its memory. What is
written between the look before a transaction and its end can still end the process; how often
depends on the share of time it spends in transactions. At 50 calls a second that is under one in
ten of the moments at which the file may be damaged; without the guard it is nearly all of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from dualpath_sglang.index import (
    EmbeddedIndex,
    IndexDamagedError,
    IndexUnavailableError,
    embedded,
    environment,
)
from dualpath_sglang.index.check import sound
from dualpath_sglang.index.environment import Environment
from tests.index.records import FOREVER_S, KV, records
from tests.support.blocks import chain
from tests.support.zygote import Zygote

Damage = Callable[[Path, random.Random], None]


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([0, 1, 4096, 8192, path.stat().st_size // 2]))


def zero(path: Path, rng: random.Random) -> None:
    overwrite(path, bytes(path.stat().st_size), 0)


def garbage(path: Path, rng: random.Random) -> None:
    overwrite(path, rng.randbytes(path.stat().st_size), 0)


def some_pages(path: Path, rng: random.Random) -> None:
    pages = path.stat().st_size // 4096
    for page in rng.sample(range(pages), max(1, pages // 4)):
        overwrite(path, rng.randbytes(4096), 4096 * page)


def some_bytes(path: Path, rng: random.Random) -> None:
    for _ in range(200):
        overwrite(path, rng.randbytes(1), rng.randrange(path.stat().st_size))


def overwrite(path: Path, data: bytes, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


DAMAGES: list[Damage] = [cut, zero, garbage, some_pages, some_bytes]


def grown(path: Path) -> None:
    """An index of some hundred pages, with a free list."""
    index = EmbeddedIndex(path)
    for i in range(40):
        index.publish(KV, records(chain(i, 64), slot=64 * i), FOREVER_S)
    index.forget_freed(index.evict({KV.id_bytes: 1}, 300, FOREVER_S), FOREVER_S)
    index.close()


# -- before it is opened ----------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_was_changed_while_closed_is_damaged(path: Path, damage: Damage) -> None:
    grown(path)
    for seed in range(10):
        copy = path.with_name(f"copy-{seed}")
        for suffix in ("", "-writer"):
            shutil.copy2(f"{path}{suffix}", f"{copy}{suffix}")
        EmbeddedIndex(copy).close()  # the copy itself is sound
        damage(copy, random.Random(seed))
        if copy.stat().st_size == 0:
            continue  # a new one is made, see the next test
        with pytest.raises(IndexDamagedError):
            EmbeddedIndex(copy)


def test_an_empty_file_becomes_a_new_index(path: Path) -> None:
    grown(path)
    os.truncate(path, 0)
    index = EmbeddedIndex(path)
    assert index.counts() == {}
    index.close()


@pytest.mark.parametrize("damage", [zero, garbage, some_pages])
def test_the_walk_of_a_child_finds_damage_that_left_no_other_trace(
    path: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the device gives back other bytes than it was given: no time tells it."""
    grown(path)
    assert sound(path, FOREVER_S)
    found = 0
    for seed in range(4):
        copy = path.with_name(f"copy-{seed}")
        shutil.copy2(path, copy)
        damage(copy, random.Random(seed))
        assert not Path(f"{copy}-writer").exists(), "nothing says when it was last written"
        found += not sound(copy, FOREVER_S)
    assert found == 4


def test_a_walk_that_cannot_be_made_says_nothing_against_a_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grown(path)
    assert sound(path, 0.001), "slow"
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert sound(path, FOREVER_S), "an interpreter in trouble of its own"
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    assert sound(path, FOREVER_S)


@contextlib.contextmanager
def told(index: EmbeddedIndex, txn: lmdb.Transaction) -> Iterator[lmdb.Transaction]:
    with index._env._told():
        yield txn


def test_tables_that_contradict_each_other_are_found(path: Path) -> None:
    grown(path)

    def first(index: EmbeddedIndex, txn: lmdb.Transaction, table: object) -> bytes:
        cursor = txn.cursor(table)
        assert cursor.first()
        return bytes(cursor.key())

    def without(table: str) -> Callable[[EmbeddedIndex, lmdb.Transaction], None]:
        def change(index: EmbeddedIndex, txn: lmdb.Transaction) -> None:
            db = getattr(index, table)
            txn.delete(first(index, txn, db), db=db)

        return change

    def more(
        table: str, name: bytes, value: bytes = b""
    ) -> Callable[[EmbeddedIndex, lmdb.Transaction], None]:
        return lambda index, txn: txn.put(name, value, db=getattr(index, table))

    changes = [
        without("_units"),
        without("_lru"),
        without("_children"),
        more("_blocks", bytes(56), bytes(16)),
        more("_blocks", bytes(55), bytes(16)),
        more("_blocks", KV.unit + chain(0, 1)[0] + bytes(16), bytes(3)),
        more("_units", bytes(39), bytes(40)),
        more("_units", bytes(40), bytes(40)),
        more("_units", bytes(40), bytes(4)),
        more("_lru", bytes(48)),
        more("_children", bytes(72)),
        more("_children", bytes(10)),
        more("_freed", bytes(10), bytes(8)),
        more("_freed", bytes(24), bytes(3)),
    ]
    for change in changes:
        index = EmbeddedIndex(path)
        index.check()
        assert index._env._env is not None
        txn = index._env._env.begin(write=True)
        change(index, txn)
        with pytest.raises(IndexDamagedError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(index._env, "copy_structure", lambda: None)
            patch.setattr(index._env, "read", lambda: told(index, txn))  # noqa: B023
            index.check()
        txn.abort()
        index.close()


# -- under a running process ------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_changed_under_us_is_damaged_to_reader_and_writer(
    path: Path, damage: Damage
) -> None:
    grown(path)
    index = EmbeddedIndex(path)
    damage(path, random.Random(1))
    keys = chain(0, 64)
    calls: list[Callable[[], object]] = [
        lambda: index.lookup(KV, keys),
        lambda: index.prefix(KV, keys),
        lambda: index.present(KV.unit, keys[0]),
        lambda: list(index.entries()),
        lambda: index.counts(),
        lambda: index.freed(KV, [1]),
        lambda: index.wanted(KV),
        lambda: index.segment_uses(),
        lambda: index.chain_segments(KV.unit, keys[5]),
        lambda: index.publish(KV, records(keys), FOREVER_S),
        lambda: index.touch(KV.unit, keys, FOREVER_S),
        lambda: index.evict({}, 1, FOREVER_S),
        lambda: index.clear(KV, FOREVER_S),
        lambda: index.check(),
    ]
    for call in calls:
        with pytest.raises(IndexDamagedError):
            call()
    index.close()


@pytest.mark.parametrize("seed", range(4))
def test_damage_that_fell_into_a_commit_of_ours_does_not_stay(path: Path, seed: int) -> None:
    """The commit's stamp is put on the damaged file then, and only LMDB can tell."""
    grown(path)
    index = EmbeddedIndex(path)
    garbage(path, random.Random(seed))
    index._env._stamp_commit(sound=True)
    with pytest.raises(IndexDamagedError):
        index.lookup(KV, chain(0, 1))
    with pytest.raises(IndexDamagedError):
        index.publish(KV, records(chain("new", 1)), FOREVER_S)
    index.close()
    assert not sound(path, FOREVER_S)


@pytest.mark.parametrize("suffix", ["", "-lock", "-writer"])
def test_a_removed_file_is_noticed(path: Path, suffix: str) -> None:
    grown(path)
    index = EmbeddedIndex(path)
    Path(f"{path}{suffix}").unlink()
    with pytest.raises(IndexDamagedError, match="removed or replaced"):
        index.lookup(KV, chain(0, 1))
    with pytest.raises(IndexDamagedError, match="removed or replaced"):
        index.publish(KV, records(chain("new", 1)), FOREVER_S)
    index.close()


def test_a_new_file_of_that_name_is_another_index(path: Path) -> None:
    grown(path)
    old = EmbeddedIndex(path)
    for suffix in ("", "-lock", "-writer"):
        Path(f"{path}{suffix}").unlink()
    new = EmbeddedIndex(path)
    new.publish(KV, records(chain("new", 3)), FOREVER_S)
    with pytest.raises(IndexDamagedError):
        old.lookup(KV, chain(0, 1))
    old.close()
    assert new.prefix(KV, chain("new", 3)) == 3, "the end of the old one is not its end"
    new.close()


def test_what_one_process_finds_damaged_is_damaged_to_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(path)
    a, b = EmbeddedIndex(path), EmbeddedIndex(path)
    with pytest.raises(IndexDamagedError), a._env.write(FOREVER_S):
        raise lmdb.CorruptedError("in the middle of a write")
    with pytest.raises(IndexDamagedError):
        b.lookup(KV, chain(0, 1))
    a.close()
    b.close()
    with pytest.raises(IndexDamagedError):
        EmbeddedIndex(path)


def test_our_own_writes_are_no_damage(path: Path) -> None:
    """Whatever LMDB does with its pages: its last one may lie past the end of the file."""
    index = EmbeddedIndex(path)
    rng = random.Random(1)
    for i in range(150):
        index.publish(KV, records(chain(i, rng.randrange(1, 90)), slot=100 * i), FOREVER_S)
        with index._env.write(FOREVER_S) as txn:
            names = [rng.randbytes(40) for _ in range(rng.randrange(300))]
            for name in names:
                txn.put(name, bytes(16), db=index._meta)
            for name in names:
                txn.delete(name, db=index._meta)
        index.evict({KV.id_bytes: 1}, rng.randrange(90), FOREVER_S)
        index.counts()
    index.check()
    index.close()


def test_a_commit_during_the_look_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = EmbeddedIndex(path)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    real = Environment._stat
    commits = [True]

    def stat(self: Environment) -> os.stat_result:
        before = real(self)
        if commits and commits.pop():
            index.publish(KV, records(chain("b", 3), slot=10), FOREVER_S)
        return before

    monkeypatch.setattr(Environment, "_stat", stat)
    assert index.prefix(KV, chain("a", 3)) == 3
    index.close()


def test_where_a_server_sets_the_times_nothing_is_held_against_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_is_local", lambda _: False)
    index = EmbeddedIndex(path)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    os.utime(path, (1, 1))
    assert index.prefix(KV, chain("a", 3)) == 3
    os.truncate(path, 8192)
    with pytest.raises(IndexDamagedError, match="cut short"):
        index.lookup(KV, chain("a", 3))
    index.close()


@pytest.mark.parametrize(
    ("mounts", "local"),
    [
        (b"/dev/vda / ext4 rw 0 0\n", True),
        (b"/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n", False),
        (b"server:/x / nfs rw 0 0\n/dev/sdb /data/deep xfs rw 0 0\n", False),
        (b"server:/x / nfs rw 0 0\ntmpfs /data tmpfs rw 0 0\n", True),
        (b"/dev/vda / ext4 rw 0 0\nhf3fs /data fuse.hf3fs rw 0 0\n", False),
        (b"/dev/vda / ext4 rw 0 0\nhf3fs /data fuse.hf3fs rw 0 0\n/dev/c /data xfs rw 0 0\n", True),
        (b"/dev/vda / ext4 rw 0 0\nserver:/x /da nfs rw 0 0\n", True),
        (b"", False),
    ],
)
def test_the_mount_tells_whose_times_they_are(
    monkeypatch: pytest.MonkeyPatch, mounts: bytes, local: bool
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: mounts)
    assert environment._is_local(Path("/data")) == local


def test_mount_points_with_odd_names_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"/dev/vda / ext4 rw 0 0\nserver:/x /my\\040d\xc3\xa4ta nfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _: text)
    assert not environment._is_local(Path("/my däta/store"))
    assert environment._is_local(Path("/my/store"))


# -- the process lives ------------------------------------------------------------------------


def damage_a_running_process(
    path: Path, children: Zygote, damage: Damage, *, guarded: bool, rounds: int, seed: int
) -> Counter[str]:
    """How processes end whose index is damaged at a random moment."""
    ends: Counter[str] = Counter()
    for i in range(rounds):
        rng = random.Random(seed + i)
        for old in path.parent.glob(f"{path.name}*"):
            old.unlink()
        child = children.fork("live_under_damage", path, 0.02, i, guarded)
        child.until("grown")
        time.sleep(rng.random() * 0.05)
        damage(path, rng)
        time.sleep(0.1)
        Path(f"{path}-stop").touch()
        status = child.wait()
        if status < 0:
            ends["killed"] += 1
        elif status == 0 and "renewed 1" in child.text():
            ends["recovered"] += 1
        else:
            ends[f"{status}: {child.text()[-300:]}"] += 1
    return ends


@pytest.mark.parametrize("damage", [cut, zero, garbage, some_pages])
def test_a_process_survives_damage_to_its_index(
    path: Path, children: Zygote, damage: Damage
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rounds = 8
    ends = damage_a_running_process(path, children, damage, guarded=True, rounds=rounds, seed=seed)
    print(damage.__name__, dict(ends))
    # Rare hits inside of a transaction are the known limit, see the top of this file.
    assert ends["recovered"] >= rounds // 2
    assert ends["recovered"] + ends["killed"] == rounds, ends


def test_without_the_guard_a_cut_file_kills(path: Path, children: Zygote) -> None:
    """Control: the damage does hit what the process has mapped."""
    ends = damage_a_running_process(
        path, children, lambda p, _: os.truncate(p, 0), guarded=False, rounds=3, seed=1
    )
    assert ends["killed"] == 3, ends


# -- other formats and boots ------------------------------------------------------------------


def put_meta(path: Path, name: bytes, value: bytes) -> None:
    index = EmbeddedIndex(path)
    with index._env.write(FOREVER_S) as txn:
        txn.put(name, value, db=index._meta)
    index._env.release()  # not closed cleanly


def test_another_format_is_refused(path: Path) -> None:
    grown(path)
    put_meta(path, b"format", b"999")
    with pytest.raises(IndexDamagedError, match="format"):
        EmbeddedIndex(path)


def test_after_a_crash_of_the_machine_it_is_not_trusted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = EmbeddedIndex(path)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    index._env.release()  # as if the machine went down: nothing says goodbye
    monkeypatch.setattr(embedded, "boot_id", lambda: b"another boot")
    with pytest.raises(IndexDamagedError, match="machine went down"):
        EmbeddedIndex(path)


def test_after_a_clean_end_it_is_trusted_on_the_next_boot(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = EmbeddedIndex(path)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    index.close()
    monkeypatch.setattr(embedded, "boot_id", lambda: b"another boot")
    index = EmbeddedIndex(path)
    assert index.prefix(KV, chain("a", 3)) == 3
    index.publish(KV, records(chain("b", 3), slot=5), FOREVER_S)
    index._env.release()
    monkeypatch.setattr(embedded, "boot_id", lambda: b"a third boot")
    with pytest.raises(IndexDamagedError):
        EmbeddedIndex(path)


def test_the_clean_mark_goes_durably_before_anything_builds_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(path)
    index = EmbeddedIndex(path)
    synced: list[int] = []
    monkeypatch.setattr(Environment, "sync", lambda self: synced.append(1))
    index.touch(KV.unit, chain(0, 1), FOREVER_S)
    index.touch(KV.unit, chain(0, 1), FOREVER_S)
    assert synced == [1]
    index.close()


def test_a_killed_process_is_no_crash_of_the_machine(path: Path) -> None:
    index = EmbeddedIndex(path)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    index._env.release()
    again = EmbeddedIndex(path)
    assert again.prefix(KV, chain("a", 3)) == 3
    again.close()


# -- errors that are no damage ----------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [lmdb.MapFullError, lmdb.ReadersFullError, lmdb.DiskError, lmdb.MemoryError, OSError]
)
def test_what_may_pass_is_no_damage(path: Path, error: type[Exception]) -> None:
    index = EmbeddedIndex(path)
    with pytest.raises(IndexUnavailableError) as caught, index._env.write(FOREVER_S):
        raise error("not now")
    assert not isinstance(caught.value, IndexDamagedError)
    assert index.publish(KV, records(chain("a", 1)), FOREVER_S) == [True]
    index.close()


@pytest.mark.parametrize(
    "error",
    [
        lmdb.PanicError,
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.MapResizedError,
        lmdb.BadRslotError,
        lmdb.Error,
    ],
)
def test_what_will_not_pass_is_damage(path: Path, error: type[Exception]) -> None:
    index = EmbeddedIndex(path)
    with pytest.raises(IndexDamagedError), index._env.read():
        raise error("for good")
    index.close()


def test_a_directory_or_a_missing_one_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "directory", tmp_path / "none" / "index.lmdb"):
        with pytest.raises(IndexUnavailableError):
            EmbeddedIndex(path)
    with pytest.raises(IndexUnavailableError):
        EmbeddedIndex(tmp_path / "none.lmdb", read_only=True)
