"""I/O threads: deadlines, running work that is waited for, tasks that fail."""

from __future__ import annotations

import threading
import time

import pytest

from dualpath_storage.memory import Arena
from dualpath_storage.workers import Task, Workers

LONG_S = 60.0


@pytest.fixture
def two() -> Workers:
    return Workers(2, "test")


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def test_every_task_runs_once(two: Workers) -> None:
    ran: list[int] = []

    def task(i: int) -> Task:
        return lambda _: ran.append(i)

    two.run([task(i) for i in range(100)], soon())
    assert sorted(ran) == list(range(100))
    two.close()


def test_nothing_begins_after_the_deadline_but_what_runs_is_waited_for(two: Workers) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def task(i: int) -> Task:
        def run(_: Arena) -> None:
            begun.append(i)
            time.sleep(0.2)
            ended.append(i)

        return run

    two.run([task(i) for i in range(10)], soon(0.1))
    assert len(begun) == 2
    assert sorted(ended) == sorted(begun), "a buffer is the caller's again only after its I/O"
    now = list(begun)
    two.run([lambda _: None, lambda _: None], soon())
    assert begun == now, "late tasks never run, not even when a worker is free again"
    two.close()


def test_a_deadline_that_has_passed_begins_nothing_new(two: Workers) -> None:
    ran: list[int] = []
    two.run([lambda _: ran.append(1) for _ in range(50)], soon(-1.0))
    count = len(ran)
    assert count <= 2
    two.run([lambda _: None], soon())
    assert len(ran) == count
    two.close()


def test_a_task_that_raises_harms_no_other(two: Workers, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def bad(_: Arena) -> None:
        raise ValueError("bad task")

    tasks: list[Task] = [bad, lambda _: ran.append(1)] * 10
    two.run(tasks, soon())
    two.run(tasks, soon())
    assert len(ran) == 20
    assert "bad task" in caplog.text
    two.close()


def test_the_age_of_the_oldest_task_tells_a_hang(two: Workers) -> None:
    assert two.oldest_s() == 0
    begun, release = threading.Event(), threading.Event()

    def hang(_: Arena) -> None:
        begun.set()
        release.wait(LONG_S)

    caller = threading.Thread(target=two.run, args=([hang], soon()))
    caller.start()
    begun.wait(LONG_S)
    first = two.oldest_s()
    time.sleep(0.01)
    assert two.oldest_s() > first > 0
    two.run([lambda _: None], soon())
    assert two.oldest_s() > first, "short tasks beside it do not hide it"
    release.set()
    caller.join()
    assert two.oldest_s() == 0
    two.close()


def test_calls_from_many_threads_share_the_workers(two: Workers) -> None:
    totals = [0] * 8

    def call(i: int) -> None:
        def add(_: Arena) -> None:
            totals[i] += 1

        for _ in range(20):
            before = totals[i]
            two.run([add], soon())
            assert totals[i] == before + 1

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [20] * 8
    two.close()


def test_closing_leaves_no_thread_and_later_calls_end_at_their_deadline(two: Workers) -> None:
    two.run([lambda _: None], soon())
    two.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]
    ran: list[int] = []
    two.run([lambda _: ran.append(1)], soon(0.05))
    assert not ran


def test_closing_does_not_wait_for_a_hang_for_ever() -> None:
    workers = Workers(1, "test")
    begun, release = threading.Event(), threading.Event()

    def hang(_: Arena) -> None:
        begun.set()
        release.wait(LONG_S)

    caller = threading.Thread(target=workers.run, args=([hang], soon()))
    caller.start()
    begun.wait(LONG_S)
    workers.close(timeout_s=0.05)
    release.set()
    caller.join()


def test_scratch_memory_is_aligned_and_grows() -> None:
    arena = Arena()
    assert len(arena.headers(1)) == 4096
    small = arena.payload(5000)
    assert len(small) == 8192
    assert arena.payload(100) is small, "reused"
    assert len(arena.payload(10_000)) == 12_288
