"""The read queue of a machine: the sum over who lives, whatever kills the others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualpath_sglang.node import machine_queue
from dualpath_sglang.node.machine_queue import FILE_BYTES, MachineQueue
from dualpath_sglang.read_queue import ReadQueue

READER = """
import sys, time
from pathlib import Path
from dualpath_sglang.node.machine_queue import MachineQueue
from dualpath_sglang.read_queue import ReadQueue
queue = ReadQueue(MachineQueue(Path(sys.argv[1])))
queue.add(int(sys.argv[2]), int(sys.argv[3]))
print("ready", flush=True)
for line in sys.stdin:
    queue.add(*map(int, line.split()))
    print("done", flush=True)
"""
SOON_S = 60.0


def reader(path: Path, size: int, tokens: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(size), str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def heard(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == word + "\n"


def wait_until(queue: MachineQueue, total: tuple[int, int]) -> None:
    end = time.monotonic() + SOON_S
    while queue.total() != total:
        assert time.monotonic() < end, f"{queue.total()} is not {total}"
        time.sleep(0.01)


def add(rows: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(size for size, _ in rows), sum(tokens for _, tokens in rows)


def now(queue: MachineQueue) -> tuple[int, int]:
    time.sleep(2 * machine_queue._SUM_S)
    return queue.total()


def test_twenty_processes_add_up_and_killed_ones_count_no_more(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    queue = MachineQueue(path)
    queue.put(1 << 40, 7)
    numbers = range(20)
    processes = [reader(path, 1000 + i, 10 + i) for i in numbers]
    try:
        for process in processes:
            heard(process, "ready")
        expected = [(1000 + i, 10 + i) for i in numbers]
        assert now(queue) == add([(1 << 40, 7), *expected])
        assert queue.others() == 20
        for i in range(0, 20, 2):
            processes[i].kill()
            processes[i].wait()
        left = [expected[i] for i in range(1, 20, 2)]
        assert now(queue) == add([(1 << 40, 7), *left])
        assert queue.others() == 10
        assert processes[1].stdin is not None
        processes[1].stdin.write("-1001 -11\n")
        processes[1].stdin.flush()
        heard(processes[1], "done")
        assert now(queue) == add([(1 << 40, 7), *left[1:]])
        again = reader(path, 5, 5)  # takes a slot that a killed one had
        processes.append(again)
        heard(again, "ready")
        assert now(queue) == add([(1 << 40, 7), *left[1:], (5, 5)])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
    assert now(queue) == (1 << 40, 7)
    queue.close()


def test_every_cache_of_a_process_has_its_own_slot(tmp_path: Path) -> None:
    a, b = (MachineQueue(tmp_path / "queue") for _ in range(2))
    one, two = ReadQueue(a), ReadQueue(b)
    with one.holding(100, 1), two.holding(30, 2):
        time.sleep(2 * machine_queue._SUM_S)
        assert one.of_machine() == two.of_machine() == (130, 3)
        assert (one.bytes, two.tokens) == (100, 2)
    wait_until(a, (0, 0))
    b.put(5, 5)
    b.close()
    wait_until(a, (0, 0))
    assert a.others() == 0
    a.close()


def test_a_forked_child_is_not_taken_for_its_parent(tmp_path: Path) -> None:
    queue, other = (MachineQueue(tmp_path / "queue") for _ in range(2))
    queue.put(10, 1)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        queue.put(1 << 30, 1 << 30)
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    wait_until(other, (10, 1))
    queue._release()  # as the kernel does for a killed process: closed, and nothing given back
    wait_until(other, (0, 0))
    assert other.others() == 0, "though the child lives"
    os.close(theirs)
    os.close(ours)
    assert os.waitpid(pid, 0)[1] == 0
    other.close()


@pytest.mark.parametrize("content", [b"x" * FILE_BYTES, b"short", b"x" * 2 * FILE_BYTES])
def test_with_a_damaged_file_a_process_counts_itself_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "queue"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        queue = MachineQueue(path)
        queue.put(12, 3)
        queue.renew()
        assert queue.total() == (12, 3)
    assert len(caplog.records) == 1
    assert "counts only its own reads" in caplog.text
    path.unlink()
    queue.renew()
    other = MachineQueue(path)
    wait_until(other, (12, 3))
    queue.close()
    other.close()


def test_a_file_whose_maker_was_killed_is_made_good(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    path.write_bytes(bytes(FILE_BYTES))
    one, two = MachineQueue(path), MachineQueue(path)
    one.put(1, 2)
    wait_until(two, (1, 2))
    one.close()
    two.close()


def test_when_all_slots_are_taken_the_next_waits_for_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_queue, "SLOTS", 3)
    monkeypatch.setattr(machine_queue, "_RIGHT", machine_queue._HEAD.pack(b"test", 1, 3))
    monkeypatch.setattr(machine_queue, "FILE_BYTES", 64 + 3 * 32)
    queues = [MachineQueue(tmp_path / "queue") for _ in range(3)]
    assert not caplog.records
    late = MachineQueue(tmp_path / "queue")
    assert "all 3 slots" in caplog.text
    late.put(9, 9)
    assert late.total() == (9, 9)
    queues[1].close()
    late.renew()
    wait_until(queues[0], (9, 9))
    for queue in (*queues, late):
        queue.close()


def test_a_file_that_was_removed_is_made_anew_by_all(tmp_path: Path) -> None:
    one, two = (MachineQueue(tmp_path / "queue") for _ in range(2))
    one.put(4, 4)
    wait_until(two, (4, 4))
    (tmp_path / "queue").unlink()
    one.renew()
    two.renew()
    wait_until(two, (4, 4))
    one.close()
    two.close()
