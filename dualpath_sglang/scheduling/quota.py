"""Compute quota: how much a prefill batch may hold (DualPath, section 6.2).

A request in a prefill batch is ``(cached, new)`` tokens. The batch is filled in the order of the
queue while its predicted attention time, summed over the layers, stays within the quota (the paper
takes 300 ms); the request that would pass it is cut to the largest chunk that fits, found by binary
search, and is the last of its batch. An empty batch always takes one unit (a page), or a request
whose smallest chunk is above the quota would wait for ever.

The paper's rule alone leaves nothing to those behind a long prompt: its next chunk comes first and
fills the next batch as well, and so on to its end. *Our addition:* a prompt that is being continued
leaves up to ``share`` of each batch to short requests behind it (see :func:`continued`). It always
gets the rest, so it always advances; with a share of 0 the rule is the paper's.

Everything here is pure: no clock, no I/O, nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a prefill batch.

    Args:
        cached: tokens whose KV is there already.
        new: tokens to be computed.
    """

    cached: int
    new: int

    def cut(self, new: int) -> Work:
        """Only its first tokens."""
        return Work(self.cached, new)


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Seconds of attention, summed over layers: each factor times its quantity.

    No factor is negative, so a larger batch is never predicted to be faster.

    Args:
        batch_s: a batch.
        request_s: a request.
        token_s: a new token.
        context_s: a token of context, cached or new: its KV is read.
        pair_s: a pair of a new token and one that it sees, ``new * (cached + new / 2)``.
        square_s: ``context ** 2 / 2``: for backends that compute the cached rows again, such as
            SGLang's torch_native.
    """

    batch_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
    square_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < float("inf") for value in astuple(self)):
            raise ValueError("the factors of a prediction are finite and not negative")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The factors, in the order of :func:`quantities`."""
        return tuple(field.name for field in fields(cls))

    def request(self, work: Work) -> float:
        """Seconds that a request adds to a batch."""
        context = work.cached + work.new
        return (
            self.request_s
            + self.token_s * work.new
            + self.context_s * context
            + self.pair_s * work.new * (work.cached + work.new / 2)
            + self.square_s * context * context / 2
        )

    def predict(self, batch: Iterable[Work]) -> float:
        """Seconds of a whole batch."""
        return self.batch_s + sum(self.request(work) for work in batch)


def quantities(batch: Sequence[Work]) -> tuple[float, ...]:
    """What each factor of :class:`AttentionModel` is multiplied with, for a batch."""
    return (
        1.0,
        float(len(batch)),
        float(sum(work.new for work in batch)),
        float(sum(work.cached + work.new for work in batch)),
        float(sum(work.new * (work.cached + work.new / 2) for work in batch)),
        float(sum((work.cached + work.new) ** 2 / 2 for work in batch)),
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """What a batch may hold.

    Args:
        quota_s: predicted seconds of attention.
        unit: a chunk is a multiple of so many tokens, unless it ends the request: a page.
        share: part of each batch that a continued request leaves to short ones behind it, 0 to
            below 1. The paper's rule is 0.
    """

    quota_s: float
    unit: int = 1
    share: float = 0.0

    def __post_init__(self) -> None:
        if not (self.quota_s > 0 and self.unit >= 1 and 0 <= self.share < 1):
            raise ValueError("a quota is above 0, a unit at least 1, a share from 0 to below 1")

    def units(self, tokens: int) -> int:
        """Tokens, rounded up to units."""
        return -(-tokens // self.unit) * self.unit


def largest_chunk(
    model: AttentionModel, work: Work, budget_s: float, unit: int, most: int | None = None
) -> int:
    """New tokens of a request that take no longer than the budget.

    Args:
        budget_s: seconds for this request.
        most: tokens at most.

    Returns:
        All of its tokens, or else a multiple of ``unit``; 0 when not even one unit fits.
    """
    limit = work.new if most is None else min(work.new, most)
    if limit == work.new and model.request(work) <= budget_s:
        return limit
    low, high = 0, max(0, limit) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if model.request(work.cut(middle * unit)) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low * unit


def fit(
    model: AttentionModel, rules: Rules, taken: Sequence[Work], work: Work, most: int | None = None
) -> int:
    """New tokens of the next request that go into a batch; 0 when the batch is full.

    Args:
        taken: what is in the batch.
        most: tokens at most, for reasons of others.
    """
    left = rules.quota_s - model.predict(taken)
    chunk = largest_chunk(model, work, left, rules.unit, most)
    if chunk == 0 and not taken:
        return min(work.new, rules.unit)  # or it would wait for ever
    return chunk


def rides_along(model: AttentionModel, rules: Rules, work: Work, tokens: int | None) -> bool:
    """Whether a request is short enough to go into the share that a continued one leaves.

    Args:
        tokens: that a batch may hold, for reasons of others.
    """
    if model.request(work) > rules.share * rules.quota_s:
        return False
    return tokens is None or rules.units(work.new) <= rules.share * tokens


def passed_over(model: AttentionModel, rules: Rules, work: Work, tokens: int | None) -> bool:
    """Whether a request that had to be cut lets those behind it go first; another is in parts.

    Only one request is in parts at a time. This one would be of no use to the share in later
    batches either, so short ones take it; its own turn comes when the one in parts is through.
    """
    return rules.share > 0 and not rides_along(model, rules, work, tokens)


def continued(
    model: AttentionModel,
    rules: Rules,
    work: Work,
    waiting: Iterable[Work],
    most: int | None = None,
) -> int:
    """The next chunk of a request that was cut, which goes into an empty batch.

    It leaves room for the short requests that wait, in their order, up to the share of the quota
    and of the tokens; what they do not need is its own. Those that would not fit into the share
    whole get nothing here: they are continued themselves, one after the other.

    Args:
        waiting: the queue, first come first.
        most: tokens at most, for reasons of others.
    """
    seconds, tokens = 0.0, 0
    for other in waiting:
        if not rides_along(model, rules, other, most):
            continue
        more_s, more = model.request(other), rules.units(other.new)
        if seconds + more_s > rules.share * rules.quota_s or (
            most is not None and tokens + more > rules.share * most
        ):
            break
        seconds, tokens = seconds + more_s, tokens + more
    own = None if most is None else max(rules.unit, most - tokens)
    left = rules.quota_s - model.batch_s - seconds
    chunk = largest_chunk(model, work, left, rules.unit, own)
    return chunk if chunk > 0 else min(work.new, rules.unit)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of a batch: which one of the queue, and how many of its new tokens."""

    index: int
    work: Work


def pack(
    model: AttentionModel,
    rules: Rules,
    queue: Sequence[Work],
    *,
    first_is_continued: bool = False,
    most: int | None = None,
) -> list[Chunk]:
    """The next batch of a queue.

    Args:
        first_is_continued: the head of the queue was cut before. As in SGLang there is one such
            request at a time, so while it is not at its end no other one is cut.
        most: tokens that a batch may hold, for reasons of others.
    """
    chunks: list[Chunk] = []
    taken: list[Work] = []
    cut = False

    def take(index: int, new: int) -> None:
        chunks.append(Chunk(index, queue[index].cut(new)))
        taken.append(chunks[-1].work)

    for index, work in enumerate(queue):
        left = None if most is None else most - sum(rules.units(w.new) for w in taken)
        if left is not None and left <= 0:
            break
        if index == 0 and first_is_continued:
            new = continued(model, rules, work, queue[1:], most)
            take(0, new)
            cut = new < work.new
            if cut and rules.share == 0:
                break  # the paper: what is cut is the last of its batch
            continue
        new = fit(model, rules, taken, work, left)
        if new < work.new and cut:
            if passed_over(model, rules, work, most):
                continue
            break  # the next batch is its turn
        if new == 0:
            break
        take(index, new)
        if new < work.new:
            break
    return chunks
