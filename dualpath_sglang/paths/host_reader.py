"""Reading whole blocks into host memory over both paths, for whoever waits for all of them.

What other nodes are to read goes straight into the caller's memory while this node reads its own
share; with a hint, the agents of the nodes that it names read everything. A node that brings
nothing for a while is given up; then nothing of it writes any more, and what it still owes is read
here. What this node cannot read is asked of another one, once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.paths.host_fetch import HostFetch
from dualpath_sglang.pool import Pool
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.scheduling.paths import Side
from dualpath_sglang.streaming.estimate import RateMeter
from dualpath_sglang.streaming.other_paths import LOCAL, Blame, OtherPaths
from dualpath_sglang.transport.base import MAX_BLOCKS, FetchRequest
from dualpath_storage import Pieces, Placement, ReadStatus

_SAMPLE_BYTES = 1 << 20
_LONGEST_S = 3600.0
"""A fetch is asked for no longer, however much time the caller has."""


@dataclass(slots=True)
class _Job:
    """Blocks to be read, and which of them have been."""

    pool: Pool
    keys: Sequence[bytes]
    pieces: Sequence[Pieces]
    began: float
    timeout_s: float
    good: list[bool]
    hint: ReadHint | None = None
    replaced: bool = False
    """Whether somebody else had to read what the hint gave to a node."""
    fetches: list[HostFetch] = field(default_factory=list)
    """All that was asked of others, over or not."""

    @property
    def deadline(self) -> float:
        return self.began + self.timeout_s

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


class HostReader:
    """See the module. Thread-safe.

    Args:
        paths: the other nodes.
        hedge_after: share of a read's time after which a node that brings nothing is given up.
    """

    def __init__(self, cache: KVCache, paths: OtherPaths, hedge_after: float = 0.25) -> None:
        self._cache = cache
        self._paths = paths
        self._hedge_after = hedge_after
        self.remote_bytes = 0
        """What agents have brought."""
        self.own_agent_bytes = 0
        """What of it was brought by this machine's agent."""
        self.hedges = 0
        """Nodes that were given up."""
        self.hinted: Counter[str] = Counter()
        """Reads with a hint, by whether the nodes that it names read all of it."""
        self._meter = RateMeter()
        self._lock = threading.Lock()

    def read(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        pieces: Sequence[Pieces],
        *,
        timeout_s: float,
        hint: ReadHint | None = None,
    ) -> list[bool]:
        """As :meth:`KVCache.read`, of whole blocks.

        Args:
            hint: who is to read them.
        """
        job = _Job(pool, keys, pieces, time.monotonic(), timeout_s, [False] * len(keys), hint)
        try:
            self._read(job)
        finally:  # whatever happens, the memory is the caller's again
            for fetch in job.fetches:
                fetch.stop()
        if hint is not None:
            with self._lock:
                self.hinted["replaced" if job.replaced else "honoured"] += 1
        return job.good

    def _read(self, job: _Job) -> None:
        hinted = self._hinted(job)
        left = self._from_nearby(job, hinted)
        if hinted is None:
            fetches, mine = self._share_out(job, left)
        else:
            fetches, mine = self._follow(job, left, hinted)
        self._read_here(job, mine)
        self._await(job, fetches)
        missed = [i for f in fetches for i in f.numbers if not job.good[i]]
        self._read_here(job, missed)
        unread = [i for i in mine if not job.good[i]]
        self._substitute(job, unread)
        job.replaced |= bool(missed or unread)

    def _share_out(self, job: _Job, numbers: Sequence[int]) -> tuple[list[HostFetch], list[int]]:
        """Ask the others for their shares; these fetches, and what this node is to read."""
        queued = self._cache.read_queue.of_machine()[0]
        own = Side(LOCAL, queued, self._meter.hope(time.monotonic()))
        shares = self._paths.shares(job.pool.geometry, len(numbers), own)
        fetches: list[HostFetch] = []
        mine: list[int] = []
        for share in shares:
            some = numbers[share.first : share.first + share.count]
            fetch = None if share.side == LOCAL else self._ask(job, some, share.side)
            if fetch is None:
                mine += some
            else:
                fetches.append(fetch)
        return fetches, mine

    def _hinted(self, job: _Job) -> Sequence[str | None] | None:
        """By block: who reads it by the hint; None when there is none to follow."""
        if job.hint is None:
            return None
        return self._paths.hinted(job.pool.geometry, job.keys, job.hint)

    def _follow(
        self, job: _Job, numbers: Sequence[int], hinted: Sequence[str | None]
    ) -> tuple[list[HostFetch], list[int]]:
        """Ask whom the hint says; what nobody can be asked for is shared out as without one."""
        groups: dict[str | None, list[int]] = {}
        for i in numbers:
            groups.setdefault(hinted[i], []).append(i)
        mine = groups.pop(LOCAL, [])
        homeless = groups.pop(None, [])
        fetches: list[HostFetch] = []
        for side, some in groups.items():
            fetch = None if side is None else self._ask(job, some, side)
            if fetch is None:
                homeless += some
            else:
                fetches.append(fetch)
        if homeless:
            job.replaced = True
            more, here = self._share_out(job, sorted(homeless))
            fetches, mine = fetches + more, mine + here
        return fetches, mine

    def _from_nearby(self, job: _Job, hinted: Sequence[str | None] | None) -> Sequence[int]:
        """Have what this machine's agent has in memory; the numbers of what it has not.

        Not when a hint has it read anything: then it is asked for that at once.
        """
        numbers = range(len(job.keys))
        side = self._paths.nearby(job.pool.geometry) if numbers else None
        if hinted is not None and side in hinted:
            return numbers
        fetch = None if side is None else self._ask(job, numbers, side, cached_only=True)
        if fetch is None:
            return numbers
        self._await(job, [fetch])
        return [i for i in numbers if not job.good[i]]

    def _ask(
        self, job: _Job, numbers: Sequence[int], side: str, *, cached_only: bool = False
    ) -> HostFetch | None:
        """Ask another node; None when it cannot be asked."""
        geometry, left_s = job.pool.geometry, min(job.left_s, _LONGEST_S)
        if left_s <= 0 or len(numbers) > MAX_BLOCKS:
            return None
        fetch = HostFetch(side, geometry, numbers, [job.pieces[i] for i in numbers])
        keys = [job.keys[i] for i in numbers]
        request = FetchRequest(geometry.id_bytes, keys, 0, geometry.layers, left_s, cached_only)
        fetch.going = self._paths.begin(side, request, fetch, fetch)
        if fetch.going is None:
            return None
        job.fetches.append(fetch)
        return fetch

    def _await(self, job: _Job, fetches: Sequence[HostFetch]) -> None:
        """Until every fetch is over or given up."""
        patience_s = self._hedge_after * job.timeout_s
        for fetch in fetches:
            if not fetch.wait(patience_s, job.deadline):
                self._paths.blame(fetch.side, Blame.LATE)
                with self._lock:
                    self.hedges += 1
                fetch.stop()
            if fetch.damaged:
                self._paths.blame(fetch.side, Blame.BAD)
            whole = fetch.whole
            size = len(whole) * job.pool.geometry.block_bytes
            with self._lock:
                self.remote_bytes += size
                self.own_agent_bytes += size if self._paths.is_own(fetch.side) else 0
            for i in whole:
                job.good[i] = True
            came: list[tuple[bytes, Placement | None, ReadStatus]] = [
                (job.keys[i], None, ReadStatus.OK) for i in whole
            ]
            self._cache.report(job.pool, came)

    def _read_here(self, job: _Job, numbers: Sequence[int]) -> None:
        if not numbers or job.left_s <= 0:
            return
        began = time.monotonic()
        keys, pieces = [job.keys[i] for i in numbers], [job.pieces[i] for i in numbers]
        read = self._cache.read(job.pool, keys, pieces, timeout_s=job.left_s)
        for i, good in zip(numbers, read, strict=True):
            job.good[i] = good
        self._measure(sum(read) * job.pool.geometry.block_bytes, time.monotonic() - began)

    def _measure(self, size: int, seconds: float) -> None:
        if not size or seconds <= 0:
            return
        now = time.monotonic()
        with self._lock:
            if size < _SAMPLE_BYTES:
                self._meter.at_least(size / seconds, now)
            else:
                self._meter.add(size / seconds, now)

    def _substitute(self, job: _Job, numbers: Sequence[int]) -> None:
        """What this node could not read is asked of another."""
        side = self._paths.substitute(job.pool.geometry) if numbers else None
        fetch = None if side is None else self._ask(job, numbers, side)
        if fetch is not None:
            self._await(job, [fetch])
