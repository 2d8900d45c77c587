"""Rounds in which backends and limits take turns, and the rows that come of them.

A shared disk drifts by a factor of three within minutes. So within a round everybody has a turn,
in another order each round, and a share is the median over the rounds of (figure / limit of the
same round), never a ratio of medians.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.limits import Disk, copy_memory
from bench.measure import (
    BenchError,
    Timing,
    drop_cached_pages,
    median,
    percentile,
    sync_file_system,
)
from bench.pages import Case, PagePool
from bench.systems import BATCH, OPENERS, System, chain

DEPTHS = (4, 8, 16)
"""I/Os in flight that are tried for the disk's limit."""

_LIMIT_OF = {"set_durable": "disk", "get_cold": "disk", "get_warm": "memcpy"}
_EXISTS_REPEATS = 5
_POPULATED_TURN = 10**6

Say = Callable[[str], None]


@dataclass(slots=True)
class Row:
    """Medians over the rounds; latencies over all calls of all rounds.

    Args:
        system: a backend, or a limit (``disk``, ``memcpy``).
        case: size of the pages.
        op: what was done.
        gb_s: payload in 1e9 bytes a second.
        share: of the limit of the same round: the disk's, for ``get_warm`` that of memcpy.
        p50_ms, p99_ms: one call (128 pages; all keys for ``exists``).
        cpu_s_per_gb: CPU seconds of the process, all threads, for 1e9 bytes.
    """

    system: str
    case: str
    op: str
    gb_s: float | None = None
    share: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    cpu_s_per_gb: float | None = None


class Contest:
    """All turns of one case.

    Args:
        case: the pages.
        systems: names of the backends.
        directory: where every store of the case lies.
        exists_counts: lengths of the chains that are looked up. Those up to the number of pages
            of a turn are asked of the turn's own store, longer ones of a larger store.
        say: prints a line of progress.
    """

    def __init__(
        self,
        case: Case,
        systems: Sequence[str],
        directory: Path,
        exists_counts: Sequence[int],
        say: Say,
    ) -> None:
        self.case = case
        self.failed: dict[str, str] = {}
        self._systems = list(systems)
        self._directory = directory
        self._say = say
        self._pool = PagePool(case)
        order = np.random.default_rng(2).permutation(case.pages)
        self._batches = [
            self._pool.indices(order[i : i + BATCH]) for i in range(0, case.pages, BATCH)
        ]
        self._small = [n for n in exists_counts if n <= case.pages]
        self._large = [n for n in exists_counts if n > case.pages]
        self._populated: dict[str, tuple[System, list[str]]] = {}
        self._timings: dict[tuple[str, str], dict[int, Timing]] = {}
        self._turn = 0

    # -- turns ------------------------------------------------------------------------------

    def populate(self) -> None:
        """Give every backend a store as large as the longest chain, kept for all rounds."""
        if not self._large:
            return
        for name in list(self._systems):
            with self._guarded(name):
                self._populate(name)
                self._say(f"{self.case.name} {name}: a store of {max(self._large)} pages is ready")

    def _populate(self, name: str) -> None:
        directory = self._directory / f"populated-{name}"
        directory.mkdir(parents=True)
        system = OPENERS[name](directory, self._pool)
        keys = chain(self.case, _POPULATED_TURN + list(OPENERS).index(name), max(self._large))
        self._populated[name] = system, keys
        self._pool.fill(0)
        for first in range(0, len(keys), self.case.pages):
            self._store(system, keys[first : first + self.case.pages], Timing())
        sync_file_system(directory)

    def round(self, number: int) -> None:
        """One turn for everybody."""
        names = [*self._systems, "disk", "memcpy"]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with self._guarded(name):
                if name == "disk":
                    said = self._disk_turn(number)
                elif name == "memcpy":
                    said = self._memcpy_turn(number)
                else:
                    said = self._system_turn(name, number)
                self._say(f"{self.case.name} round {number + 1} {name}: {said}")

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A backend that fails leaves the contest; the others go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- peers fail in every way there is
            self._say(f"{self.case.name} {name} FAILED: {error!r}")
            self.failed[name] = repr(error)
            if name in self._systems:
                self._systems.remove(name)

    def _system_turn(self, name: str, number: int) -> str:
        self._turn += 1
        turn = self._turn
        directory = self._directory / f"turn-{name}-{turn}"
        directory.mkdir(parents=True)
        system = OPENERS[name](directory, self._pool)
        try:
            return self._exchange(system, name, number, turn, directory)
        finally:
            system.close()
            shutil.rmtree(directory)

    def _exchange(self, system: System, name: str, number: int, turn: int, directory: Path) -> str:
        keys = chain(self.case, turn, self.case.pages)
        self._pool.fill(turn)
        sync_file_system(directory)  # whatever others left to be written
        timing = self._timing(name, "set_durable", number)
        self._store(system, keys, timing)
        with timing.settle():
            system.settle()
        for op in ("get_cold", "get_warm"):
            self._poison()
            if op == "get_cold":
                drop_cached_pages(directory)
            self._load(system, keys, self._timing(name, op, number))
            self._verify(turn)
        self._controls(system, turn)
        for count in self._small:
            self._look_up(system, keys[:count], name, number)
        if name in self._populated:
            for count in self._large:
                larger, names = self._populated[name]
                self._look_up(larger, names[:count], name, number)
        return ", ".join(
            f"{op} {self._gb_s(name, op, number):.2f} GB/s"
            for op in ("set_durable", "get_cold", "get_warm")
        )

    def _store(self, system: System, keys: list[str], timing: Timing) -> None:
        for i, first in enumerate(range(0, len(keys), BATCH)):
            part = keys[first : first + BATCH]
            with timing.call():
                taken = system.set(part, self._batches[i % len(self._batches)])
            if not taken:
                raise BenchError(f"the pages from {first} on were not stored")

    def _load(self, system: System, keys: list[str], timing: Timing) -> None:
        for i, first in enumerate(range(0, len(keys), BATCH)):
            part = keys[first : first + BATCH]
            with timing.call():
                good = system.get(part, self._batches[i])
            if not all(good):
                raise BenchError(f"{good.count(False)} of the pages from {first} on were missing")

    def _look_up(self, system: System, keys: list[str], name: str, number: int) -> None:
        timing = self._timing(name, f"exists_{len(keys)}", number)
        for _ in range(_EXISTS_REPEATS):
            with timing.call():
                found = system.exists(keys)
            if found != len(keys):
                raise BenchError(f"exists found {found} of {len(keys)}")

    def _poison(self) -> None:
        self._pool.poison()
        if len(self._pool.wrong(self._turn)) != self.case.pages:
            raise BenchError("control: pages that were never read passed the check")

    def _verify(self, turn: int) -> None:
        bad = self._pool.wrong(turn)
        if bad:
            raise BenchError(f"wrong bytes in {len(bad)} pages reported as hits: {bad[:5]}")

    def _controls(self, system: System, turn: int) -> None:
        """The check must notice one flipped bit, and strangers' keys must not be there."""
        victim = turn % self.case.pages
        self._pool.flip(victim)
        if self._pool.wrong(turn) != [victim]:
            raise BenchError("control: a flipped bit passed the check")
        strange = chain(self.case, -turn, 1)
        if system.exists(strange) or any(system.get(strange, self._pool.indices(np.array([0])))):
            raise BenchError("control: a page that was never stored was found")

    def _disk_turn(self, number: int) -> str:
        directory = self._directory / "limit"
        directory.mkdir(exist_ok=True)
        said = []
        self._turn += 1
        for i in range(len(DEPTHS)):
            depth = DEPTHS[(i + number) % len(DEPTHS)]
            name = f"disk {depth}"
            self._pool.fill(self._turn)
            sync_file_system(directory)
            disk = Disk(directory, self._pool, depth)
            try:
                self._note(name, "set_durable", number, disk.write())
                self._poison()
                self._note(name, "get_cold", number, disk.read())
                self._verify(self._turn)
            finally:
                disk.remove()
            write, read = (self._gb_s(name, op, number) for op in ("set_durable", "get_cold"))
            said.append(f"depth {depth} write {write:.2f} read {read:.2f} GB/s")
        return ", ".join(said)

    def _memcpy_turn(self, number: int) -> str:
        self._note("memcpy", "get_warm", number, copy_memory(self._pool))
        return f"{self._gb_s('memcpy', 'get_warm', number):.2f} GB/s"

    def close(self) -> None:
        """Close the stores that were kept, and remove every file."""
        for system, _ in self._populated.values():
            system.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- rows -------------------------------------------------------------------------------

    def _timing(self, name: str, op: str, number: int) -> Timing:
        return self._timings.setdefault((name, op), {}).setdefault(number, Timing())

    def _note(self, name: str, op: str, number: int, timing: Timing) -> None:
        self._timings.setdefault((name, op), {})[number] = timing

    def _gb_s(self, name: str, op: str, number: int) -> float:
        return self.case.total_bytes / self._timings[name, op][number].wall_s / 1e9

    def _limit(self, op: str) -> str | None:
        """The limit that an operation is compared with: the depth that is best over all rounds."""
        kind = _LIMIT_OF.get(op)
        names = [n for n, o in self._timings if o == op and n.split()[0] == kind]
        return max(
            names,
            key=lambda n: median([self._gb_s(n, op, i) for i in self._timings[n, op]]),
            default=None,
        )

    def rows(self) -> list[Row]:
        """One row a system and operation; failed systems have none."""
        limits = {op: self._limit(op) for op in _LIMIT_OF}
        rows = []
        for name, op in self._timings:
            limit = limits.get(op)
            is_limit = name.split()[0] in _LIMIT_OF.values()
            if name not in self.failed and (not is_limit or name == limit):
                rows.append(self._row(name, op, limit))
        return rows

    def _row(self, name: str, op: str, limit: str | None) -> Row:
        by_round = self._timings[name, op]
        row = Row(name.split()[0], self.case.name, op)
        if op in _LIMIT_OF:
            total_gb = self.case.total_bytes / 1e9
            row.gb_s = _middle([self._gb_s(name, op, i) for i in by_round])
            row.cpu_s_per_gb = _middle([t.cpu_s / total_gb for t in by_round.values()])
        if limit is not None:
            of_limit = self._timings[limit, op]
            row.share = _middle(
                [
                    self._gb_s(name, op, i) / self._gb_s(limit, op, i)
                    for i in by_round
                    if i in of_limit
                ]
            )
        if name != limit:
            calls = [1000 * s for timing in by_round.values() for s in timing.calls_s]
            row.p50_ms = _middle(calls)
            row.p99_ms = _rounded(percentile(calls, 0.99))
        return row


def _middle(values: Sequence[float]) -> float | None:
    return _rounded(median(values)) if values else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
