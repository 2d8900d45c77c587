"""Segment files of a geometry: who owns them, and what happens when they go behind our back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualpath_storage import Geometry, Slot, Space, StoreOptions
from dualpath_storage import segments as segments_module
from dualpath_storage.backends import PosixBackend
from dualpath_storage.segments import Segments
from tests.support.blocks import geometry

MIB = 1 << 20
OF = geometry()


def segments(root: Path, *, capacity_bytes: int = 8 * MIB, segment_bytes: int = MIB) -> Segments:
    options = StoreOptions(root, capacity_bytes, min_free_fraction=0, segment_bytes=segment_bytes)
    return Segments(root / OF.id, OF, PosixBackend(root, "auto", writable=True), Space(options))


def open_files(path: Path) -> int:
    """Descriptors of this process on a file, removed or not."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += str(link.readlink()).removesuffix(" (deleted)") == str(path)
        except OSError:
            continue
    return found


def test_segments_are_added_up_to_the_capacity(tmp_path: Path) -> None:
    files = segments(tmp_path)
    assert [files.add(1.0) for _ in range(10)] == [True] * 8 + [False] * 2
    assert len(files.numbers()) == len(files.slots.owned()) == 8
    assert files.slots.free_count() == 8 * (MIB // OF.slot_bytes)
    files.close()


def test_the_directory_describes_itself(tmp_path: Path) -> None:
    files = segments(tmp_path)
    files.add(1.0)
    text = (tmp_path / OF.id / "geometry.json").read_text()
    assert Geometry.from_json(text) == OF
    files.close()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe\x00", None])
def test_a_damaged_description_is_written_again(tmp_path: Path, damage: bytes | None) -> None:
    files = segments(tmp_path)
    files.create_directory()
    path = tmp_path / OF.id / "geometry.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    files.create_directory()
    assert Geometry.from_json(path.read_text()) == OF
    assert [p.name for p in path.parent.iterdir()] == ["geometry.json"], "no leftovers"


def test_a_segment_is_not_added_while_another_process_allocates(tmp_path: Path) -> None:
    files, others = segments(tmp_path), Space(StoreOptions(tmp_path, capacity_bytes=8 * MIB))
    with others.reserved(1.0) as held:
        assert held
        assert not files.add(0.05)
    assert files.add(1.0)
    files.close()


def test_adding_to_a_root_that_is_gone_says_no(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    files = segments(root)
    root.rmdir()
    assert not files.add(1.0)
    limitless = Space(StoreOptions(root))  # its capacity is a share of a file system that is gone
    files = Segments(root / OF.id, OF, PosixBackend(tmp_path, "auto", writable=True), limitless)
    assert not files.add(1.0)


def test_orphans_are_taken_by_one_process_only(tmp_path: Path) -> None:
    first = segments(tmp_path)
    first.add(1.0)
    (number,) = first.numbers()
    second = segments(tmp_path)
    assert second.lock_orphans(second.strangers()) == []
    first.close()
    assert second.lock_orphans(second.strangers()) == [number]
    assert segments(tmp_path).lock_orphans([number]) == []
    assert second.slots.owned() == [], "its slots are in no table yet"
    second.own(number, {3: 7}, dirty=[5])
    assert second.slots.taken() == {Slot(number, 3): 7}
    assert second.slots.dirty() == {Slot(number, 5)}
    second.close()


def test_an_orphan_that_is_given_back_can_be_taken_and_still_be_read(tmp_path: Path) -> None:
    first = segments(tmp_path)
    first.add(1.0)
    (number,) = first.numbers()
    first.close()
    second, third = segments(tmp_path), segments(tmp_path)
    assert second.lock_orphans(second.strangers()) == [number]
    file = second.get(number)
    second.unlock(number)
    assert third.lock_orphans(third.strangers()) == [number]
    assert file.read([memoryview(bytearray(4096))], 0) >= 0, "a reader was at work with it"
    assert second.get(number) is file
    with pytest.raises(FileNotFoundError):
        second.owned(number)
    second.close()
    third.close()


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    files = segments(tmp_path)
    files.create_directory()
    for name in ("seg-1", "seg-0000000z", "seg-00000001.bak", "other"):
        (tmp_path / OF.id / name).write_bytes(bytes(MIB))
    assert files.numbers() == files.lock_orphans(files.strangers()) == []


def test_removed_and_shortened_segments_are_noticed(tmp_path: Path) -> None:
    files = segments(tmp_path)
    for _ in range(3):
        files.add(1.0)
    removed, short, whole = files.slots.owned()
    paths = {n: tmp_path / OF.id / f"seg-{n:08x}" for n in (removed, short, whole)}
    paths[removed].unlink()
    os.truncate(paths[short], MIB // 2)
    assert sorted(files.drop_lost()) == sorted([removed, short])
    assert files.slots.owned() == [whole]
    assert not paths[short].exists(), "it would grow back over the capacity"
    assert paths[whole].exists()
    assert files.drop_lost() == []
    files.close()


def test_a_file_that_took_the_place_of_a_removed_one_is_left_alone(tmp_path: Path) -> None:
    files = segments(tmp_path)
    files.add(1.0)
    (number,) = files.numbers()
    path = tmp_path / OF.id / f"seg-{number:08x}"
    path.unlink()
    path.write_bytes(b"restored from a backup")
    assert files.drop_lost() == [number]
    assert path.read_bytes() == b"restored from a backup"
    files.close()


def test_a_dropped_segment_gives_its_room_back_at_once(tmp_path: Path) -> None:
    files = segments(tmp_path)
    files.add(1.0)
    (number,) = files.numbers()
    file = files.get(number)
    files.drop(number, unlink=True)
    assert files.numbers() == []
    assert file.read([memoryview(bytearray(4096))], 0) == 0, "still open for its readers, but empty"
    files.close()


def test_files_of_gone_segments_are_closed_after_a_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = segments(tmp_path), segments(tmp_path)
    writer.add(1.0)
    (number,) = writer.numbers()
    path = tmp_path / OF.id / f"seg-{number:08x}"
    reader.get(number)
    assert open_files(path) == 2
    writer.drop(number, unlink=True)
    reader.forget_unlinked()
    assert open_files(path) == 2, "a reader may be at work"
    monkeypatch.setattr(segments_module, "_CLOSE_GRACE_S", 0.0)
    reader.forget_unlinked()
    assert open_files(path) == 1
    writer.add(1.0)
    writer.drop(writer.slots.owned()[0], unlink=True)
    assert open_files(path) == 0
    writer.close()
    reader.close()


def test_a_segment_that_cannot_be_opened_has_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = segments(tmp_path), segments(tmp_path)
    writer.add(1.0)
    (number,) = writer.numbers()
    assert writer.slot_count(number) == MIB // OF.slot_bytes
    assert reader.slot_count(12345) == 0
    with pytest.raises(FileNotFoundError):
        reader.get(12345)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many"):
        reader.get(number)
    writer.close()


def test_the_death_of_a_writer_frees_its_segments(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.storage.test_segments import segments\n"
        "files = segments(Path(sys.argv[1])); files.add(1.0); print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        files = segments(tmp_path)
        assert files.lock_orphans(files.strangers()) == []
        writer.kill()
    assert len(files.lock_orphans(files.strangers())) == 1
    files.close()
