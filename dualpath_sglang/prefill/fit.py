"""Fitting the prediction of attention time to measured batches.

Least squares of the relative error, with no negative factor. There are six factors, so every
choice of those that are above zero is tried (64 small systems) and the best one without a negative
factor taken: that is the exact answer, and needs no iteration.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualpath_sglang.scheduling.quota import AttentionModel, Work, quantities


@dataclass(frozen=True, slots=True)
class Point:
    """A batch and how long its attention took.

    Args:
        batch: its requests.
        seconds: measured, summed over layers.
    """

    batch: tuple[Work, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a prediction: median, and the one that nine in ten do not exceed."""

    median: float
    p90: float


class FitError(ValueError):
    """The points do not determine a prediction; the message is one plain sentence."""


def medians(points: Sequence[Point]) -> list[Point]:
    """One point a batch shape, with the median of its times: a busy machine has slow moments."""
    shapes: dict[tuple[Work, ...], list[float]] = {}
    for point in points:
        shapes.setdefault(point.batch, []).append(point.seconds)
    return [Point(batch, statistics.median(times)) for batch, times in shapes.items()]


def fit(points: Sequence[Point]) -> AttentionModel:
    """The prediction with the least squared relative error.

    Raises:
        FitError: there are too few points, or they say nothing.
    """
    names = AttentionModel.names()
    used = [point for point in points if point.seconds > 0]
    if len(used) < 2 * len(names):
        raise FitError(
            f"{len(used)} batches were measured, and a fit needs at least {2 * len(names)}"
        )
    seconds = np.array([point.seconds for point in used])
    table = np.array([quantities(point.batch) for point in used]) / seconds[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    wanted = np.ones(len(used))
    best, best_error = None, np.inf
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            columns = list(chosen)
            answer = np.linalg.lstsq((table / scale)[:, columns], wanted, rcond=None)[0]
            if (answer < 0).any() or not np.isfinite(answer).all():
                continue
            error = float(
                ((table / scale)[:, columns] @ answer - wanted)
                @ ((table / scale)[:, columns] @ answer - wanted)
            )
            if error < best_error * (1 - 1e-9):
                best_error = error
                factors = np.zeros(len(names))
                factors[columns] = answer / scale[columns]
                best = AttentionModel(*(float(factor) for factor in factors))
    if best is None:
        raise FitError("no prediction without negative times fits what was measured")
    return best


def errors(model: AttentionModel, points: Sequence[Point]) -> Errors:
    """How far a prediction is from measured times, relative to them."""
    found = sorted(
        abs(model.predict(point.batch) - point.seconds) / point.seconds
        for point in points
        if point.seconds > 0
    )
    if not found:
        return Errors(float("nan"), float("nan"))
    return Errors(statistics.median(found), found[min(len(found) - 1, int(0.9 * len(found)))])


def held_out(points: Sequence[Point], every: int = 3) -> tuple[list[Point], list[Point]]:
    """Points to fit, and points to check with: every third by size of the batch, not the largest.

    The largest stay in the fit, so that the check does not ask for what lies outside.
    """
    ordered = sorted(points, key=lambda p: (sum(w.cached + w.new for w in p.batch), p.seconds))
    check = [p for i, p in enumerate(ordered[:-1]) if i % every == every - 1]
    rest = [p for i, p in enumerate(ordered) if i == len(ordered) - 1 or i % every != every - 1]
    return rest, check
