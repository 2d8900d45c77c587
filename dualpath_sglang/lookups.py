"""Which prefixes can be restored, answered on a thread that must not wait.

An engine asks again and again while a request is queued, from the thread that also runs its
decodes. An answer comes from the first of these that knows it:

| source | knows | until |
|---|---|---|
| request | what it was told before, for the same keys | 10 s; a miss until something is written |
| pages | which pages are there, and which are not | the next eviction here; 10 s, 1 s |
| index | everything | asked by a thread of its own, while the caller waits for a moment |

When none of them knows in time there is no answer yet: the engine leaves the request in its queue
and asks again. After a second, or while the index does not answer at all, it is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dualpath_sglang.bounded import MAX_REQUESTS, remember
from dualpath_sglang.known_pages import KnownPages
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import key_bytes

logger = logging.getLogger(__name__)

REQUEST_S = 10.0
PRESENT_S = 10.0
MISSING_S = 1.0
PROMISE_S = 60.0
PATIENCE_S = 1.0
STUCK_S = 1.0
_SLICE = 256


@dataclass(frozen=True, slots=True)
class Need:
    """A pool that a restored prefix needs.

    Args:
        window: name of the window of which it needs the last pages; None when it needs them all.
    """

    pool: Pool
    window: str | None = None


_Chain: TypeAlias = tuple[int, str, tuple[tuple[str, int], ...]]
"""Names a chain: its length, its last key, which depends on all before, and the windows."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a request was told.

    Args:
        writes: the count of writes that it is good for; None for a complete hit, always good.
    """

    chain: _Chain
    lengths: Sequence[int]
    until: float
    writes: int | None


@dataclass(slots=True)
class _Job:
    """A chain for the thread to look up.

    Args:
        run: leading pages that are there.
    """

    chain: _Chain
    keys: Sequence[str]
    windows: Mapping[str, int]
    run: int
    began: float
    writes: int
    lengths: Sequence[int] = ()
    done: threading.Event = field(default_factory=threading.Event)


class PrefixLookups:
    """Answers for one model. For one thread, but for what others tell.

    Args:
        needs: the pools of a page, the anchor first.
        wait_s: longest time that all answers together may wait, from one :meth:`begin_round` to
            the next.
    """

    def __init__(self, cache: KVCache, needs: Sequence[Need], wait_s: float = 0.005) -> None:
        self._cache = cache
        self._every = [need.pool for need in needs if need.window is None]
        self._ends = [(need.pool, need.window) for need in needs if need.window is not None]
        self._wait_s = self._left_s = wait_s
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._asked: OrderedDict[str, _Job] = OrderedDict()
        self._pages: KnownPages[str] = KnownPages(PRESENT_S, MISSING_S)
        self._writes = 0
        self.sources: Counter[str] = Counter()
        """Answers by where they came from: request, pages, index, none."""
        self._jobs: list[_Job] = []
        self._wake = threading.Condition()
        self._began: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="dualpath-lookup", daemon=True)
        self._thread.start()

    # -- asking -----------------------------------------------------------------------------

    def begin_round(self) -> None:
        """From now on answers may wait again."""
        self._left_s = self._wait_s

    def restorable(
        self, rid: str, keys: Sequence[str], windows: Mapping[str, int] | None = None
    ) -> Sequence[int] | None:
        """Every prefix of ``keys`` that can be restored, as lengths in pages, ascending.

        The longest is promised to ``rid``, until :meth:`forget` or for a minute.

        Args:
            windows: pages at the end of a prefix that a window needs, by its name.

        Returns:
            None when it is not known yet: ask again.
        """
        if not keys:
            return ()
        now = time.monotonic()
        windows = windows or {}
        chain = (len(keys), keys[-1], tuple(sorted(windows.items())))
        answer = self._answers.get(rid)
        if answer is not None and answer.chain == chain and self._holds(answer, now):
            self.sources["request"] += 1
            return answer.lengths
        answer = self._ask(rid, chain, keys, windows, now)
        if answer is None:
            return None
        remember(self._answers, rid, answer)
        if answer.lengths:
            last = key_bytes(keys[answer.lengths[-1] - 1])
            self._cache.promise(rid, self._every[0], last, PROMISE_S)
        return answer.lengths

    def _holds(self, answer: _Answer, now: float) -> bool:
        return now < answer.until and answer.writes in (None, self._writes)

    def _ask(
        self, rid: str, chain: _Chain, keys: Sequence[str], windows: Mapping[str, int], now: float
    ) -> _Answer | None:
        job = self._asked.get(rid)
        if job is None or job.chain != chain:
            run, missing = self._pages.leading_run(keys, self._cache.epoch)
            if not self._ends and (missing or run == len(keys)):
                self.sources["pages"] += 1
                return self._answer(chain, range(1, run + 1), now, self._writes)
            job = _Job(chain, keys, windows, run, now, self._writes)
            if not self._submit(job):
                self.sources["none"] += 1
                return _Answer(chain, (), now + MISSING_S, self._writes)
            remember(self._asked, rid, job)
        if not self._done_in_time(job):
            if now - job.began < PATIENCE_S:
                return None
            self.sources["none"] += 1
            del self._asked[rid]
            return _Answer(chain, (), now + MISSING_S, self._writes)
        self.sources["index"] += 1
        del self._asked[rid]
        return self._answer(chain, job.lengths, now, job.writes)

    def _done_in_time(self, job: _Job) -> bool:
        if job.done.is_set():
            return True
        if self._left_s <= 0:
            return False
        begin = time.monotonic()
        done = job.done.wait(self._left_s)
        self._left_s -= time.monotonic() - begin
        return done

    def _answer(self, chain: _Chain, lengths: Sequence[int], now: float, writes: int) -> _Answer:
        complete = bool(lengths) and lengths[-1] == chain[0]
        until = now + (REQUEST_S if lengths else MISSING_S)
        return _Answer(chain, lengths, until, None if complete else writes)

    # -- what others tell -------------------------------------------------------------------

    def written(self, keys: Iterable[str]) -> None:
        """Blocks were stored by this process."""
        self._writes += 1
        self._pages.appeared(keys)

    def doubt(self, rid: str) -> None:
        """What ``rid`` was told turned out wrong."""
        self._answers.pop(rid, None)
        self._asked.pop(rid, None)
        self._pages.forget_present()

    def forget(self, rid: str) -> None:
        """The request needs its promise no more."""
        self._answers.pop(rid, None)
        self._asked.pop(rid, None)
        self._cache.release(rid)

    def clear(self) -> None:
        """Forget everything."""
        for rid in list(self._answers):
            self.forget(rid)
        self._asked.clear()
        self._pages.forget_all()

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(1.0)

    # -- the thread that asks the index -----------------------------------------------------

    def _submit(self, job: _Job) -> bool:
        with self._wake:
            began = self._began
            if self._closed or (began is not None and time.monotonic() - began > STUCK_S):
                return False  # it hangs, and nobody waits for it any more
            self._jobs.append(job)
            del self._jobs[:-MAX_REQUESTS]
            self._wake.notify()
        return True

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                job = self._jobs.pop(0)
                self._began = time.monotonic()
            try:
                self._look(job)
            except Exception:
                logger.exception("A lookup failed, which counts as a miss")
                job.lengths = ()
                job.done.set()
            finally:
                with self._wake:
                    self._began = None

    def _look(self, job: _Job) -> None:
        """One slice of a chain; a long one takes turns with others."""
        count = len(job.keys)
        epoch = self._cache.epoch
        part = job.keys[job.run : job.run + _SLICE]
        present = self._present(self._every, part)
        run = present.index(False) if False in present else len(part)
        job.run += run
        self._pages.seen(part[:run], part[run] if run < len(part) else None, epoch)
        if run == len(part) and job.run < count:
            with self._wake:
                self._jobs.append(job)
            return
        job.lengths = self._lengths(job)
        job.done.set()

    def _present(self, pools: Sequence[Pool], keys: Sequence[str]) -> list[bool]:
        raw = [key_bytes(key) for key in keys]
        present = [True] * len(keys)
        for pool in pools:
            places = self._cache.locate(pool, raw)
            present = [a and p is not None for a, p in zip(present, places, strict=True)]
        return present

    def _lengths(self, job: _Job) -> Sequence[int]:
        if not self._ends:
            return range(1, job.run + 1)
        good = [True] * job.run
        for pool, window in self._ends:
            need = max(1, job.windows.get(window, 1))
            there = self._present([pool], job.keys[: job.run])
            good = [a and b for a, b in zip(good, windows_of(there, need), strict=True)]
        return [i + 1 for i, ok in enumerate(good) if ok]


def windows_of(present: Sequence[bool], length: int) -> list[bool]:
    """For each page whether it is there, and as many before it as make up ``length``."""
    run, good = 0, []
    for i, there in enumerate(present):
        run = run + 1 if there else 0
        good.append(run >= min(length, i + 1))
    return good
