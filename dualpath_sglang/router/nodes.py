"""What agents and servers report in the index: read queues, read rates, and which engines exist.

The index is asked in a thread of its own, so that a Redis that hangs holds up nothing here. While
it does not answer, the router goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.index import Index, IndexUnavailableError, Report
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.paths.reports import nodes_among
from dualpath_sglang.router.options import EngineSpec, OptionsError

logger = logging.getLogger(__name__)

REPORT_S = 0.5
"""Agents report twice a second."""
_OPEN_S = 5.0
_MOST = 1 << 60


@dataclass(slots=True, eq=False)
class Promise:
    """A read that the router has given to a node."""

    node: str
    tokens: float
    at: float


@dataclass(slots=True)
class _Told:
    queue: int
    rate: float | None
    stamp: object
    at: float
    before: float
    """When the report before this one came."""


class ReadQueues:
    """How many tokens each node has yet to read from storage, as well as the router can know.

    That is what its agent reported last, and of what was placed since the report before that one
    the reads whose prefill has not ended: they may not have been in the queue yet.
    """

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._promises: dict[str, set[Promise]] = {}
        self._bytes_per_token: float | None = None

    def promise(self, shares: Iterable[tuple[str, float]], tokens: int) -> list[Promise]:
        """A request was placed; its hit will be read so."""
        now = time.monotonic()
        made = [Promise(node, weight * tokens, now) for node, weight in shares if tokens]
        for promise in made:
            self._promises.setdefault(promise.node, set()).add(promise)
        return made

    def kept(self, promises: Iterable[Promise]) -> None:
        """Those reads have ended, or will not begin."""
        for promise in promises:
            self._promises.get(promise.node, set()).discard(promise)

    def learn(self, reports: Iterable[Report]) -> None:
        """What agents and servers said."""
        now = time.monotonic()
        reports = list(reports)
        for report in reports:
            self._learn_size(report)
        size = self._bytes_per_token
        told: dict[str, _Told] = {}
        for node in nodes_among(reports):
            known = self._told.get(node.machine)
            stamp = (node.name, node.told)
            if known is not None and known.stamp == stamp:
                told[node.machine] = known
                continue
            told[node.machine] = _Told(
                0 if node.load is None else node.load.tokens,
                node.read_rate / size if node.read_rate and size else None,
                stamp,
                now,
                known.at if known is not None else now,
            )
            self._promises[node.machine] = {
                p for p in self._promises.get(node.machine, ()) if p.at >= told[node.machine].before
            }
        self._told = told

    def _learn_size(self, report: Report) -> None:
        tokens, size = (_number(report.get(f"read_queue_{n}")) for n in ("tokens", "bytes"))
        if not (tokens and size):
            tokens, size = (_number(report.get(name)) for name in ("page_tokens", "block_bytes"))
        if tokens and size:
            self._bytes_per_token = size / tokens

    def queues(self) -> dict[str, int]:
        """Tokens by node."""
        queues = {node: told.queue for node, told in self._told.items()}
        for node, promises in self._promises.items():
            if promises:
                queues[node] = queues.get(node, 0) + math.ceil(sum(p.tokens for p in promises))
        return queues

    def rates(self) -> dict[str, float]:
        """Tokens a second by node, where measured."""
        return {node: told.rate for node, told in self._told.items() if told.rate}

    @property
    def promised(self) -> int:
        """Reads given to nodes that have not ended."""
        return sum(len(promises) for promises in self._promises.values())


def engines_among(reports: Iterable[Report]) -> dict[str, EngineSpec]:
    """The engines that tell of themselves, by name; reports that make no sense are left out."""
    found: dict[str, EngineSpec] = {}
    for report in reports:
        if report.get("pd_role") not in ("prefill", "decode"):
            continue
        fields = {"url": report.get("url"), "role": report.get("pd_role")}
        fields |= {"node": report.get("host"), "bootstrap_port": report.get("bootstrap_port")}
        try:
            spec = EngineSpec.of(fields)
        except OptionsError:
            continue
        found[spec.name] = spec
    return found


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST:
        return float(value)
    return None


class IndexReports:
    """Reads the reports of a store again and again.

    Args:
        learn: is given all reports, on the event loop.
    """

    def __init__(
        self, config: DualPathConfig, learn: Callable[[Mapping[str, Report]], None]
    ) -> None:
        self._source = config.index_source()
        if not isinstance(self._source, RedisSource):
            raise ConfigError("A router finds engines in an index in Redis, not in a file")
        self._root = config.store_options().root
        self._learn = learn
        self._thread = ThreadPoolExecutor(1, "dualpath-reports")
        self._index: Index | None = None
        self._task: asyncio.Task[None] | None = None
        self.answers: bool | None = None
        """Whether the index answered last; None before the first time."""

    def start(self) -> None:
        """From now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Not any more. A thread that hangs is left behind."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._index is not None:
            self._index.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                reports = await loop.run_in_executor(self._thread, self._ask)
            except IndexUnavailableError as error:
                if self.answers is not False:
                    logger.warning("The index does not answer, what was known stays: %s", error)
                self.answers = False
            except Exception:
                logger.exception("The reports in the index cannot be read")
                self.answers = False
            else:
                if self.answers is False:
                    logger.info("The index answers again")
                self.answers = True
                self._learn(reports)
            await asyncio.sleep(REPORT_S)

    def _ask(self) -> Mapping[str, Report]:
        if self._index is None:
            self._index = self._source.open(self._root, list, read_only=True, timeout_s=_OPEN_S)
        return self._index.nodes()
