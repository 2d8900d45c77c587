"""What was decided about each request and what came of its loads, counted once a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dualpath_sglang.admission import Decision
from dualpath_sglang.bounded import remember
from dualpath_sglang.metrics import Metrics
from dualpath_sglang.streaming.load import LoadResult, Outcome

_ENOUGH = 2


class RequestLedger:
    """Bounded; for one thread.

    Args:
        metrics: told of decisions and failures.
        page_tokens: tokens a page.
    """

    def __init__(self, metrics: Metrics, page_tokens: int) -> None:
        self._metrics = metrics
        self._page_tokens = page_tokens
        self._decided: OrderedDict[str, Decision] = OrderedDict()
        self._failures: OrderedDict[str, int] = OrderedDict()

    def decided(
        self, rid: str, decision: Decision, asked: int, found: Sequence[int], kept: Sequence[int]
    ) -> None:
        """A lookup was answered; counted again only when the decision changes.

        Args:
            asked: pages of the prompt.
            found: restorable prefix lengths, in pages.
            kept: those of them that are worth loading.
        """
        if self._decided.get(rid) is decision:
            return
        first = rid not in self._decided
        remember(self._decided, rid, decision)
        longest, loaded = (found[-1] if found else 0), (kept[-1] if kept else 0)
        if found:
            self._metrics.count("admissions", decision=decision.value)
            self._missed(longest - loaded, "budget")
        if first:
            self._metrics.count("hit_tokens", longest * self._page_tokens)
            self._missed(asked - longest, "absent")

    def ended(self, rid: str, result: LoadResult) -> None:
        """A load has its result.

        A block that is gone shortens the next hit; anything else, or a second time, bars it.
        """
        self._metrics.count("loads", outcome=result.outcome.value)
        self._metrics.observe("load_seconds", result.seconds)
        if result.ok:
            self._failures.pop(rid, None)
            return
        gone = result.outcome is Outcome.MISS
        remember(self._failures, rid, self._failures.get(rid, 0) + (1 if gone else _ENOUGH))
        reason = result.reason or result.outcome.value
        self._missed(result.blocks, reason)
        self._metrics.count("recomputes", reason=reason)

    def barred(self, rid: str) -> bool:
        """Whether the request is computed without storage from now on."""
        return self._failures.get(rid, 0) >= _ENOUGH

    def clear(self) -> None:
        """Forget everything."""
        self._decided.clear()
        self._failures.clear()

    def _missed(self, pages: int, reason: str) -> None:
        self._metrics.count("miss_tokens", pages * self._page_tokens, reason=reason)
