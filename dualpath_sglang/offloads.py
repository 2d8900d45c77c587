"""Pages on their way from a device to the store, in the order in which they were given.

The engine keeps the pages of an offload until its result is taken, and takes results in order; on
several ranks it takes as many as all of them have. So what is accepted, and what waits, is decided
by nothing but the calls, which are the same on every rank.

Pages are copied into host memory before they are written, and what was copied is thrown away when
the offload was given up in between (`abandon`, or its time was over): nothing is ever stored from
a page that may be somebody else's. So a store that hangs keeps the thread, but not the pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.pool import Pool
from dualpath_storage import Pieces
from dualpath_storage.geometry import align_up
from dualpath_storage.memory import aligned

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20


class PageSource(Protocol):
    """The pages of one device pool."""

    def gather(self, pages: Sequence[int], memory: memoryview, stride: int) -> None:
        """Copy whole pages to host memory, page ``i`` to ``i * stride``; done on return."""
        ...


class Ready(Protocol):
    """An event after which a device's pages hold what they should."""

    def synchronize(self) -> None:
        """Block until it happened."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadPart:
    """Pages of one pool.

    Args:
        keys: a chain; the parent of each is the one before it.
        pages: where they lie on the device.
        parent: the parent of the first, when known.
    """

    pool: Pool
    source: PageSource
    keys: Sequence[bytes]
    pages: Sequence[int]
    parent: bytes | None = None


@dataclass(slots=True)
class _Job:
    pages: int
    parts: Sequence[OffloadPart]
    ready: Sequence[Ready]
    deadline: float
    given_up: bool = False
    good: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Offloads:
    """One for each process; `submit` to `pop` are for one thread.

    Args:
        timeout_s: longest time that one offload may take.
        max_pages: most pages that wait; more are refused, the first of all excepted.
        memory: host memory for copies; plain memory of 64 MiB by default.
        on_stored: told the keys of each pool's blocks that were stored just now.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        timeout_s: float,
        max_pages: int,
        memory: memoryview | None = None,
        on_stored: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._max_pages = max_pages
        self._memory = aligned(STAGING_BYTES) if memory is None else memory
        self._on_stored = on_stored
        self._given: deque[_Job] = deque()  # results that nobody has taken, in order
        self._pages = 0
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="dualpath-offload", daemon=True)
        self._thread.start()

    # -- for the engine's thread ------------------------------------------------------------

    def submit(
        self, pages: int, parts: Sequence[OffloadPart] | None, ready: Sequence[Ready] = ()
    ) -> bool:
        """Take pages on.

        Args:
            pages: how many the engine keeps for this.
            parts: what to store; nothing is a success at once, and None a failure.
            ready: events to wait for before the pages are read.

        Returns:
            False when too many wait already; then there will be no result either.
        """
        if self._given and self._pages + pages > self._max_pages:
            return False
        job = _Job(pages, parts or (), ready, time.monotonic() + self._timeout_s)
        self._pages += pages
        self._given.append(job)
        if not parts or self._hangs():
            job.good = parts is not None and not parts
            job.done.set()
            return True
        with self._wake:
            self._queue.append(job)
            self._wake.notify()
        return True

    def _hangs(self) -> bool:
        """Whether an offload was given up and still keeps the thread."""
        job = self._running
        return job is not None and job.given_up

    def completed(self) -> int:
        """Results that can be taken now."""
        count, now = 0, time.monotonic()
        for job in self._given:
            if not job.done.is_set():
                if now < job.deadline:
                    break
                job.given_up = True
                job.done.set()
            count += 1
        return count

    def pop(self) -> bool:
        """Take the oldest result: whether all of it is stored, or left out on purpose."""
        job = self._given.popleft()
        self._pages -= job.pages
        return job.good

    @property
    def waiting_pages(self) -> int:
        """Pages that the engine keeps for offloads."""
        return self._pages

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was submitted is over; whether it is."""
        end = time.monotonic() + timeout_s
        return all(job.done.wait(max(0.0, end - time.monotonic())) for job in list(self._given))

    def abandon(self) -> None:
        """The pages are no longer what they were: store nothing more of them, forget all results.

        Copies under way may still read them; what they read is thrown away.
        """
        for job in self._given:
            job.given_up = True
        self._given.clear()
        self._pages = 0

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then end the thread."""
        self.drain(timeout_s)
        self.abandon()
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(1.0)

    # -- the thread that stores -------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                job = self._running = self._queue.popleft()
            try:
                job.good = self._store(job) and not job.given_up
            except Exception:
                logger.exception("An offload failed; its pages are not stored")
            finally:
                self._running = None
                job.parts, job.ready = (), ()
                job.done.set()

    def _store(self, job: _Job) -> bool:
        if job.given_up:
            return False
        for event in job.ready:
            event.synchronize()
        good = [self._store_part(job, part) for part in job.parts]
        return all(good)

    def _store_part(self, job: _Job, part: OffloadPart) -> bool:
        """Write what is missing, run by run: what lies between two runs is there already."""
        places = self._cache.locate(part.pool, part.keys)
        self._cache.touch(part.pool, [k for k, p in zip(part.keys, places, strict=True) if p])
        good, begin = True, 0
        while begin < len(places):
            if places[begin] is not None:
                begin += 1
                continue
            end = begin
            while end < len(places) and places[end] is None:
                end += 1
            good &= self._store_run(job, part, begin, end)
            begin = end
        return good

    def _store_run(self, job: _Job, part: OffloadPart, first: int, end: int) -> bool:
        geometry = part.pool.geometry
        stride = align_up(geometry.block_bytes)
        step = max(1, len(self._memory) // stride)
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            part.source.gather(part.pages[begin:stop], self._memory, stride)
            left = job.deadline - time.monotonic()
            if job.given_up or left <= 0:
                return False
            keys = part.keys[begin:stop]
            results = self._cache.write(
                part.pool,
                keys,
                [
                    self._pieces(i * stride, geometry.layers, geometry.layer_bytes)
                    for i in range(stop - begin)
                ],
                parent=part.keys[begin - 1] if begin else part.parent,
                timeout_s=left,
            )
            self._told(keys, results)
            if WriteResult.FAILED in results:
                return False
        return True

    def _pieces(self, begin: int, layers: int, layer_bytes: int) -> Pieces:
        starts = range(begin, begin + layers * layer_bytes, layer_bytes)
        return [self._memory[start : start + layer_bytes] for start in starts]

    def _told(self, keys: Sequence[bytes], results: Sequence[WriteResult]) -> None:
        stored = WriteResult.STORED
        new = [key for key, result in zip(keys, results, strict=True) if result is stored]
        if new and self._on_stored is not None:
            self._on_stored(new)
