"""Which prefixes can be restored, answered on a thread that must not wait.

An engine asks again and again while a request is queued, from the thread that also runs its
decodes. An answer comes from the first of these that knows it:

| source | knows | until |
|---|---|---|
| request | what it was told before, for the same keys | 10 s; a miss until something is written |
| pages | which pages are there, and which are not | the next eviction here; 10 s, 1 s |
| index | everything | asked by a thread of its own; the caller waits for 5 ms at the most |

A chain whose pages have not all been seen by then is answered by bisection, which is exact unless
a page is missing from the middle of it: then the load finds out, and the next answer is right. An
index that does not answer at all is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_storage import key_bytes

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096
MAX_PAGES = 1 << 16
MAX_MISSING = 1 << 13
REQUEST_S = 10.0
PRESENT_S = 10.0
MISSING_S = 1.0
PROMISE_S = 60.0
STUCK_S = 0.1
_SLICE = 256
_WAITING_JOBS = 8


@dataclass(frozen=True, slots=True)
class Need:
    """A pool that a restored prefix needs.

    Args:
        window: name of the window of which it needs the last pages; None when it needs them all.
    """

    pool: Pool
    window: str | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a request was told.

    Args:
        writes: the count of writes that it is good for; None for a complete hit, always good.
    """

    chain: tuple[int, str, tuple[tuple[str, int], ...]]
    lengths: Sequence[int]
    until: float
    writes: int | None


@dataclass(slots=True)
class _Job:
    """A chain for the thread to look up.

    Args:
        run: leading pages that are there for certain.
        guess: leading pages by bisection.
    """

    keys: Sequence[str]
    windows: Mapping[str, int]
    run: int
    guess: int = 0
    lengths: Sequence[int] = ()
    done: threading.Event = field(default_factory=threading.Event)


class PrefixLookups:
    """Answers for one model. ``restorable`` is for one thread; the rest is thread-safe.

    Args:
        needs: the pools of a page, the anchor first.
        timeout_s: longest wait for the index.
    """

    def __init__(self, cache: KVCache, needs: Sequence[Need], timeout_s: float = 0.005) -> None:
        self._cache = cache
        self._every = [need.pool for need in needs if need.window is None]
        self._ends = [(need.pool, need.window) for need in needs if need.window is not None]
        self._timeout_s = timeout_s
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._pages = _PageMemory()
        self._epoch = cache.epoch
        self._writes = 0
        self.sources: Counter[str] = Counter()
        """Answers by where they came from: request, pages, index, guess, none."""
        self._jobs: list[_Job] = []
        self._wake = threading.Condition()
        self._began: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="dualpath-lookup", daemon=True)
        self._thread.start()

    # -- asking -----------------------------------------------------------------------------

    def restorable(
        self, rid: str, keys: Sequence[str], windows: Mapping[str, int] | None = None
    ) -> Sequence[int]:
        """Every prefix of ``keys`` that can be restored, as lengths in pages, ascending.

        The longest is promised to ``rid``, until :meth:`forget` or for a minute.

        Args:
            windows: pages at the end of a prefix that a window needs, by its name.
        """
        if not keys:
            return ()
        begin = time.monotonic()
        windows = windows or {}
        chain = (len(keys), keys[-1], tuple(sorted(windows.items())))
        answer = self._answers.get(rid)
        if answer is None or answer.chain != chain or not self._holds(answer, begin):
            answer = self._ask(chain, keys, windows, begin)
            if answer.until > begin:
                self._answers[rid] = answer
                self._answers.move_to_end(rid)
                if len(self._answers) > MAX_REQUESTS:
                    self._answers.popitem(last=False)
            if answer.lengths:
                last = key_bytes(keys[answer.lengths[-1] - 1])
                self._cache.promise(rid, self._every[0], last, PROMISE_S)
        else:
            self.sources["request"] += 1
        return answer.lengths

    def _holds(self, answer: _Answer, now: float) -> bool:
        return now < answer.until and answer.writes in (None, self._writes)

    def _ask(
        self,
        chain: tuple[int, str, tuple[tuple[str, int], ...]],
        keys: Sequence[str],
        windows: Mapping[str, int],
        begin: float,
    ) -> _Answer:
        writes, epoch = self._writes, self._cache.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._pages.forget_present()
        run, missing = self._pages.leading_run(keys)
        if not self._ends and (missing or run == len(keys)):
            self.sources["pages"] += 1
            return self._answer(chain, range(1, run + 1), begin, writes)
        job = _Job(keys, windows, run)
        if self._submit(job) and job.done.wait(begin + self._timeout_s - time.monotonic()):
            self.sources["index"] += 1
            return self._answer(chain, job.lengths, begin, writes)
        self.sources["guess" if job.guess else "none"] += 1
        likely = 0 if self._ends else max(job.run, job.guess)
        return _Answer(chain, range(1, likely + 1), begin, writes)  # asked again next time

    def _answer(
        self,
        chain: tuple[int, str, tuple[tuple[str, int], ...]],
        lengths: Sequence[int],
        now: float,
        writes: int,
    ) -> _Answer:
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
        self._pages.forget_present()

    def forget(self, rid: str) -> None:
        """The request needs its promise no more."""
        self._answers.pop(rid, None)
        self._cache.release(rid)

    def clear(self) -> None:
        """Forget everything."""
        for rid in list(self._answers):
            self.forget(rid)
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
            del self._jobs[:-_WAITING_JOBS]
            self._wake.notify()
        return True

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                job = self._jobs.pop()  # the newest: somebody is waiting for it
                self._began = time.monotonic()
            try:
                self._look(job)
            except Exception:
                logger.exception("A lookup failed, which counts as a miss")
            finally:
                with self._wake:
                    self._began = None

    def _look(self, job: _Job) -> None:
        keys, count = job.keys, len(job.keys)
        epoch = self._cache.epoch
        if not job.guess and not self._ends and count - job.run > _SLICE:
            job.guess = self._bisect(keys, job.run)
        while job.run < count:
            part = keys[job.run : job.run + _SLICE]
            present = self._present(self._every, part)
            run = present.index(False) if False in present else len(part)
            self._pages.seen(part[:run], part[run] if run < len(part) else None)
            job.run += run
            if run < len(part):
                break
            with self._wake:
                self._began = time.monotonic()
                if self._jobs:  # somebody waits for another one
                    self._jobs.insert(0, job)
                    return
        if epoch != self._cache.epoch:
            self._pages.forget_present()
        job.lengths = self._lengths(job)
        job.done.set()

    def _bisect(self, keys: Sequence[str], known: int) -> int:
        """Pages of a chain without gaps."""
        if self._there(keys[-1]):
            return len(keys)
        low, high = known, len(keys) - 1  # the first `low` are there, key `high` is not
        while low < high:
            middle = (low + high) // 2
            if self._there(keys[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _there(self, key: str) -> bool:
        return all(self._present(self._every, [key]))

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


class _PageMemory:
    """Pages known to be there, and known not to be. Bounded, thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Two generations: what is not seen again while the younger one fills is forgotten.
        self._young: dict[str, None] = {}
        self._old: dict[str, None] = {}
        self._turned = time.monotonic()
        self._missing: OrderedDict[str, float] = OrderedDict()

    def leading_run(self, keys: Sequence[str]) -> tuple[int, bool]:
        """Leading pages that are there, and whether the next is known to be missing."""
        now = time.monotonic()
        with self._lock:
            self._turn(now)
            young, old = self._young, self._old
            for i, key in enumerate(keys):
                if key not in young and key not in old:
                    return i, self._missing.get(key, 0.0) > now
        return len(keys), False

    def seen(self, present: Sequence[str], missing: str | None) -> None:
        """What the index says."""
        now = time.monotonic()
        with self._lock:
            self._turn(now)
            self._young.update(dict.fromkeys(present))
            for key in present:
                self._missing.pop(key, None)
            if missing is not None:
                self._missing[missing] = now + MISSING_S
                self._missing.move_to_end(missing)
                if len(self._missing) > MAX_MISSING:
                    self._missing.popitem(last=False)

    def appeared(self, keys: Iterable[str]) -> None:
        """Pages are not missing any more; whether all of their pools are there is not said."""
        with self._lock:
            for key in keys:
                self._missing.pop(key, None)

    def forget_present(self) -> None:
        with self._lock:
            self._young, self._old = {}, {}

    def forget_all(self) -> None:
        with self._lock:
            self._young, self._old = {}, {}
            self._missing.clear()

    def _turn(self, now: float) -> None:
        if len(self._young) > MAX_PAGES // 2 or now - self._turned > PRESENT_S / 2:
            self._old, self._young = self._young, {}
            self._turned = now
