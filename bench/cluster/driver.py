"""Runs one workload in a bed and says what it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from bench.cluster.bed import STORAGE, Bed
from bench.cluster.counters import NicSampler
from bench.cluster.lines import Message, Peer
from bench.cluster.model import MODELS, Model
from bench.cluster.workload import Trajectory
from bench.measure import BenchError, percentile

_ANSWER_S = 30.0
_TURN_S = 180.0
_STORE_S = 120.0
_MOST_FROM_MEMORY = 0.01

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Hits that each PE reads back to back, without any compute.

    Args:
        readers: of each PE, at a time.
        hits: of each reader, in turn, over and over.
        pages: of each hit.
        agent_bytes: so little that no hit is in a DE's memory when it is read once more.
        seconds: after which no more hits are begun; those under way end, and count.
    """

    model: str
    readers: int
    hits: int
    pages: int
    seconds: float
    agent_bytes: int = 48 << 20


@dataclass(frozen=True, slots=True)
class Playing:
    """Agents that begin all at once; the next turn of each follows when the last has ended.

    Args:
        agents: their trajectories, which the store has up to their start.
        at_once: agents at a time; the next begins when one is through.
        token_s: of a generated token.
        agent_bytes: memory of each DE: room for what it reads, on its way, and not for the store.
    """

    model: str
    agents: Sequence[Trajectory]
    at_once: int
    token_s: float
    agent_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run took.

    Args:
        aggregate_mbit_s: payload that landed at the PEs over the time of the run.
        snic_max_avg: see :func:`bench.cluster.counters.max_avg`; received bytes, 1 s windows.
        snic_mbit_s: received by all storage NICs, headers of all layers included.
        jct_s: until the last agent was through.
        ttft_s: of each turn.
        short_pages: pages of contexts that were not yet in the store when they were asked for.
        failed: hits of which something was missing or damaged; they were computed.
        from_memory: blocks that a DE had in memory when it was asked for them.
    """

    aggregate_mbit_s: float
    snic_max_avg: float
    snic_mbit_s: float
    jct_s: float = 0.0
    ttft_s: Sequence[float] = ()
    short_pages: int = 0
    failed: int = 0
    from_memory: int = 0

    def ttft(self, share: float) -> float:
        """A percentile of the times to first token, 0 when there are none."""
        return percentile(self.ttft_s, share) if self.ttft_s else 0.0


def run(workload: Reading | Playing, bed: Bed, progress: Progress) -> Figures:
    """Store what the workload finds in the store, and run it.

    Raises:
        BenchError: a process failed, wrong bytes were served, or figures contradict each other.
    """
    if isinstance(workload, Reading):
        return _read(workload, bed, progress)
    return _play(workload, bed, progress)


def fill(bed: Bed, pages: Sequence[tuple[str, int]], progress: Progress) -> None:
    """Store the first pages of some trajectories, from the storage host.

    Raises:
        BenchError: not all could be stored.
    """
    sent = [
        (count, bed.store.send("write", trajectory=name, first=0, end=count))
        for name, count in pages
    ]
    for i, (count, answer) in enumerate(sent, 1):
        written = bed.store.result(answer, _STORE_S)["written"]
        if written != count:
            raise BenchError(f"The store took {written} of {count} pages")
        progress(f"filling the store: {i} of {len(pages)}")


# -- bandwidth ------------------------------------------------------------------------------


def _read(work: Reading, bed: Bed, progress: Progress) -> Figures:
    by_pe = [
        [[(f"{peer.name}.{r}.{h}", work.pages) for h in range(work.hits)]
         for r in range(work.readers)]
        for peer in bed.prefill
    ]  # fmt: skip
    fill(bed, [hit for readers in by_pe for hits in readers for hit in hits], progress)
    with _nics(bed) as nics:
        for peer, readers in zip(bed.prefill, by_pe, strict=True):
            peer.ask("stream", _ANSWER_S, hits=readers)
        progress(f"reading for {work.seconds:.0f} s")
        time.sleep(work.seconds)
        halted = [(peer, peer.send("halt")) for peer in bed.prefill]
        ends = [peer.result(answer, _TURN_S) for peer, answer in halted]
    stats = [peer.ask("stats", _ANSWER_S) for peer in bed.prefill]
    _check_wrong(stats)
    landed, received = [row["landed_bytes"] for row in stats], sum(nics.bytes)
    # A few are asked for twice, when somebody else is late.
    from_memory = _total(bed.decode, "hits")
    size = from_memory * MODELS[work.model].geometry.block_bytes
    if size > _MOST_FROM_MEMORY * sum(landed):
        raise BenchError(f"{from_memory} blocks came from memory: that is no bandwidth of storage")
    _check_landed(sum(landed), received)
    # Each PE by its own time: it does not wait for the last one's last hit.
    rate = sum(size / end["took_s"] for size, end in zip(landed, ends, strict=True))
    took = max(end["took_s"] for end in ends)
    missed = sum(end["missed"] for end in ends)
    return Figures(
        _mbit(rate), nics.spread, _mbit(received / took), failed=missed, from_memory=from_memory
    )


# -- trajectories ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Played:
    """One turn as its engine saw it."""

    ttft_s: float
    short_pages: int
    ok: bool


class _Scheduler:
    """Which PE takes a turn: the one with the fewest tokens that it has not computed yet."""

    def __init__(self, count: int) -> None:
        self._tokens = [0] * count
        self._last = -1
        self._lock = threading.Lock()

    def take(self, tokens: int) -> int:
        """The number of the PE, whose turn it is among equals."""
        with self._lock:
            count = len(self._tokens)
            order = [(self._last + 1 + i) % count for i in range(count)]
            self._last = min(order, key=lambda i: self._tokens[i])
            self._tokens[self._last] += tokens
            return self._last

    def give(self, number: int, tokens: int) -> None:
        """A turn is over."""
        with self._lock:
            self._tokens[number] -= tokens


class _Play:
    """The agents of one run."""

    def __init__(self, work: Playing, bed: Bed) -> None:
        self._work = work
        self._bed = bed
        self._model: Model = MODELS[work.model]
        self._scheduler = _Scheduler(len(bed.prefill))
        self._lock = threading.Lock()
        self._writes: list[tuple[Peer, Future[Message]]] = []
        self.turns: list[_Played] = []

    def agent(self, number: int) -> None:
        """All turns of one agent."""
        agent = self._work.agents[number]
        decode = self._bed.decode[number % len(self._bed.decode)]
        page = self._model.page_tokens
        written = agent.start // page
        for context, turn in zip(agent.contexts, agent.turns, strict=True):
            self._turn(agent.name, context, turn.append)
            prompt = context + turn.append
            written = self._write(decode, agent.name, written, prompt // page)
            time.sleep(turn.gen * self._work.token_s)
            written = self._write(decode, agent.name, written, (prompt + turn.gen) // page)

    def _turn(self, trajectory: str, context: int, append: int) -> None:
        number = self._scheduler.take(context + append)
        try:
            peer = self._bed.prefill[number]
            fields = {"trajectory": trajectory, "context": context, "append": append}
            answer = peer.ask("prefill", _TURN_S, **fields)
        finally:
            self._scheduler.give(number, context + append)
        with self._lock:
            self.turns.append(_Played(answer["ttft_s"], answer["short_pages"], answer["ok"]))

    def _write(self, peer: Peer, trajectory: str, first: int, end: int) -> int:
        """In the background; what is stored by then."""
        if first < end:
            answer = peer.send("write", trajectory=trajectory, first=first, end=end)
            with self._lock:
                self._writes.append((peer, answer))
        return max(first, end)

    def settle(self) -> None:
        """Wait for what is still written."""
        for peer, answer in self._writes:
            peer.result(answer, _STORE_S)


def _play(work: Playing, bed: Bed, progress: Progress) -> Figures:
    page = MODELS[work.model].page_tokens
    fill(bed, [(a.name, a.start // page) for a in work.agents if a.start >= page], progress)
    play = _Play(work, bed)
    turns = sum(len(agent.turns) for agent in work.agents)
    with _nics(bed) as nics, ThreadPoolExecutor(work.at_once, "agent") as executor:
        began = time.monotonic()
        agents = [executor.submit(play.agent, i) for i in range(len(work.agents))]
        watch = threading.Event()

        def look() -> None:
            while not watch.wait(0.5):
                progress(f"{len(play.turns)} of {turns} turns")

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            for agent in as_completed(agents):
                agent.result()
        finally:
            watch.set()
            watcher.join()
            for agent in agents:
                agent.cancel()
        took = time.monotonic() - began
    play.settle()
    stats = [peer.ask("stats", _ANSWER_S) for peer in bed.prefill]
    _check_wrong(stats)
    landed = sum(row["landed_bytes"] for row in stats)
    received = sum(nics.bytes)
    from_memory = _total(bed.decode, "hits")
    if not from_memory:
        _check_landed(landed, received)
    return Figures(
        _mbit(landed / took),
        nics.spread,
        _mbit(received / took),
        took,
        [turn.ttft_s for turn in play.turns],
        sum(turn.short_pages for turn in play.turns),
        sum(not turn.ok for turn in play.turns),
        from_memory,
    )


# -- figures --------------------------------------------------------------------------------


def _nics(bed: Bed) -> NicSampler:
    return NicSampler([peer.process.pid for peer in bed.hosts], STORAGE)


def _total(peers: Sequence[Peer], name: str) -> int:
    return sum(int(peer.ask("stats", _ANSWER_S)[name]) for peer in peers)


def _check_wrong(stats: Sequence[Message]) -> None:
    if wrong := sum(row["wrong"] for row in stats):
        raise BenchError(f"{wrong} Layer Blocks had the bytes of others")


def _check_landed(landed: int, received: int) -> None:
    if landed > received:
        raise BenchError(f"{landed} bytes landed, and the storage NICs brought {received}")


def _mbit(bytes_per_s: float) -> float:
    return bytes_per_s * 8e-6
