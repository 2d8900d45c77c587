"""Long-lived I/O threads that run batches of blocking calls under a deadline."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from dualpath_storage.memory import Arena

logger = logging.getLogger(__name__)

Task: TypeAlias = Callable[[Arena], None]


class _Job(Protocol):
    """What a worker tells about the task in its hands."""

    def start(self) -> bool:
        """It is about to run; False when it must not any more."""
        ...

    def done(self) -> None:
        """It has run, well or not."""
        ...


class _Call:
    """A task that nobody waits for."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.done = ended

    def start(self) -> bool:
        return True


class _Batch:
    """Counts the tasks of one call: which still wait, which are in a worker's hands."""

    def __init__(self, size: int) -> None:
        self._waiting = size
        self._running = 0
        self._cancelled = False
        self._changed = threading.Condition()

    def start(self) -> bool:
        with self._changed:
            if self._cancelled:
                return False
            self._waiting -= 1
            self._running += 1
            return True

    def done(self) -> None:
        with self._changed:
            self._running -= 1
            if self._running == 0 and (self._waiting == 0 or self._cancelled):
                self._changed.notify_all()

    def wait(self, deadline: float) -> None:
        """Until all ran, or until the deadline and then until none is in a worker's hands.

        A started I/O is always waited for: its buffer belongs to the caller again only when the
        kernel has let go of it, or a late completion would overwrite another request's memory.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting == 0 and self._running == 0,
                max(0.0, deadline - time.monotonic()),
            )
            self._cancelled = True
            self._changed.wait_for(lambda: self._running == 0)


class Workers:
    """A fixed set of threads, each with its own arena.

    Args:
        count: number of threads, that is I/Os in flight.
        name: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._queue: queue.SimpleQueue[tuple[_Job, Task] | None] = queue.SimpleQueue()
        self._since: list[float | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task], deadline: float) -> None:
        """Run the tasks; those not begun by ``deadline`` (monotonic seconds) never run.

        A task reports through what it closes over; one that raises is logged and counts as run.
        Returns when no task is running any more.
        """
        if not tasks:
            return
        batch = _Batch(len(tasks))
        for task in tasks:
            self._queue.put((batch, task))
        batch.wait(deadline)

    def submit(self, task: Task, ended: Callable[[], None]) -> None:
        """Run a task some time; ``ended`` is called in its thread after it, also if it raised.

        For callers that keep deadlines of their own: the task itself must look whether it is
        still wanted, and its memory is its own until ``ended``. Never runs after :meth:`close`.
        """
        self._queue.put((_Call(ended), task))

    def oldest_s(self) -> float:
        """Age of the longest-running task, 0 when idle: tells a store that hangs."""
        now = time.monotonic()
        return max((now - since for since in self._since if since is not None), default=0.0)

    def older_than(self, seconds: float) -> int:
        """How many tasks have been running for longer than that."""
        now = time.monotonic()
        return sum(since is not None and now - since > seconds for since in self._since)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads after what is queued. A thread that hangs in the kernel is left."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self, index: int) -> None:
        arena = Arena()
        while (item := self._queue.get()) is not None:
            job, task = item
            if not job.start():
                continue
            self._since[index] = time.monotonic()
            try:
                task(arena)
            except BaseException:  # whatever it is, a lost thread would be lost to all that follows
                logger.exception("An I/O task failed")
            self._since[index] = None
            job.done()
            del item, job, task
