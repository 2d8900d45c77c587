"""Trajectories of agents: how many tokens each turn appends and generates. No I/O but a trace file.

The generator draws what the paper's Table 2 (arXiv 2602.21548) says of its traces: the means of
turns, of appended and generated tokens a turn, of the context before a turn, and of the final
length. A bench runs a *window* of each trajectory: the turns before it have been run, and their KV
is in the store. So few turns, at random places, stand for all.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.measure import BenchError


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that one turn adds to a trajectory.

    Args:
        append: of the prompt, all to be computed.
        gen: generated.
    """

    append: int
    gen: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One growing prefix.

    Args:
        name: unique in a workload.
        start: tokens of the context before the first of ``turns``.
    """

    name: str
    start: int
    turns: Sequence[Turn]

    @property
    def total(self) -> int:
        """Tokens at the end."""
        return self.start + sum(turn.append + turn.gen for turn in self.turns)

    @property
    def contexts(self) -> list[int]:
        """Tokens before each turn."""
        contexts, tokens = [], self.start
        for turn in self.turns:
            contexts.append(tokens)
            tokens += turn.append + turn.gen
        return contexts

    def window(self, first: int, count: int) -> Trajectory:
        """Turns ``[first, first + count)`` of it; what came before is its start."""
        turns = self.turns[first : first + count]
        return Trajectory(f"{self.name}/{first}", self.contexts[first], turns)


@dataclass(frozen=True, slots=True)
class Means:
    """Of a set of trajectories, as Table 2 has them: tokens and turns.

    Its figures agree with each other only if tokens a turn are first averaged over the turns of a
    trajectory, the first prompt left out, and then over trajectories: short ones add more a turn.

    Args:
        turns, total: means over trajectories.
        append, gen: as said above.
        context: mean over all turns of all trajectories.
    """

    turns: float
    append: float
    gen: float
    total: float
    context: float


@dataclass(frozen=True, slots=True)
class TraceKind:
    """What the generator draws from.

    Args:
        most: tokens that no trajectory exceeds.
        first: mean tokens of the first prompt.
        means: of Table 2.
        sigma: of the logarithm of the number of turns.
        spread: of the logarithm of the tokens of one turn.
    """

    most: int
    first: float
    means: Means
    sigma: float = 0.84
    spread: float = 1.0


KINDS = {
    "32k": TraceKind(32_768, 6_300, Means(60, 608, 148, 28_639, 17_183)),
    "48k": TraceKind(49_152, 8_100, Means(106, 474, 172, 42_607, 25_120)),
    "64k": TraceKind(65_536, 9_900, Means(157, 429, 176, 55_958, 32_721)),
}
_LEAST_TURNS = 4
_TRIES = 100
_TOTAL_SIGMA, _FIRST_SIGMA = 0.08, 0.3


def generate(kind: TraceKind, count: int, seed: int) -> list[Trajectory]:
    """So many whole trajectories, the same ones for the same seed."""
    rng = random.Random(seed)
    return [_trajectory(kind, rng, f"made{i}") for i in range(count)]


def _trajectory(kind: TraceKind, rng: random.Random, name: str) -> Trajectory:
    """All end near the same length, so whoever takes more turns adds less in each."""
    means = kind.means
    turns = max(_LEAST_TURNS, round(_around(rng, means.turns, kind.sigma)))
    total = min(kind.most, _around(rng, means.total, _TOTAL_SIGMA))
    first = _around(rng, kind.first, _FIRST_SIGMA)
    weights = [rng.lognormvariate(0.0, kind.spread) for _ in range(turns)]
    unit = max(0.0, total - first) / sum(weights)
    share = means.append / (means.append + means.gen)
    drawn = []
    for i, weight in enumerate(weights):
        appended = min(0.95, max(0.05, rng.gauss(share, 0.1)))
        prompt = unit * weight * appended + (first if i == 0 else 0.0)
        drawn.append(Turn(max(1, round(prompt)), max(1, round(unit * weight * (1 - appended)))))
    return Trajectory(name, 0, drawn)


def _around(rng: random.Random, mean: float, sigma: float) -> float:
    """A lognormal number of that mean."""
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def load_trace(path: Path) -> list[Trajectory]:
    """Trajectories of a trace: lines of ``{"id": name, "turns": [[append, gen], ...]}``.

    Args:
        path: JSON lines, compressed when the name ends in ``.gz``.

    Raises:
        BenchError: it cannot be read, or is no such trace.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        trace = [
            Trajectory(str(row["id"]), 0, [Turn(int(a), int(g)) for a, g in row["turns"]])
            for row in rows
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"The trace {path} cannot be used: {error}") from error
    if not trace or any(t.append < 1 or t.gen < 0 for row in trace for t in row.turns):
        raise BenchError(f"The trace {path} has no turns, or turns of no tokens")
    return trace


def windows(
    trace: Sequence[Trajectory],
    count: int,
    turns: int,
    seed: int,
    *,
    most_tokens: int,
    first: int = 0,
) -> list[Trajectory]:
    """So many windows of so many turns; every turn of the trace is as likely to be in one.

    Args:
        most_tokens: no window ends with more; so that the stores of a run are of known size.
        first: turn that windows begin with at the earliest.

    Raises:
        BenchError: the trace has no such window.
    """
    rng = random.Random(seed)
    long = [row for row in trace if len(row.turns) >= first + turns]
    if not long:
        raise BenchError(f"The trace has no trajectory of {turns} turns")
    weights = [len(row.turns) - turns - first + 1 for row in long]
    found: list[Trajectory] = []
    for _ in range(_TRIES * count):
        if len(found) == count:
            return found
        row = rng.choices(long, weights)[0]
        window = row.window(rng.randint(first, len(row.turns) - turns), turns)
        if window.total <= most_tokens:
            found.append(Trajectory(f"{len(found)}/{window.name}", window.start, window.turns))
    raise BenchError(f"The trace has too few windows of at most {most_tokens} tokens")


def means_of(trace: Sequence[Trajectory]) -> Means:
    """What Table 2 says of a trace, of this one; its trajectories are whole."""
    later = [row.turns[1:] for row in trace if len(row.turns) > 1]
    return Means(
        turns=fmean(len(row.turns) for row in trace),
        append=fmean(fmean(turn.append for turn in turns) for turns in later),
        gen=fmean(fmean(turn.gen for turn in turns) for turns in later),
        total=fmean(row.total for row in trace),
        context=fmean(tokens for row in trace for tokens in row.contexts),
    )
