"""What a router tells Prometheus: ``dualpath_router_*``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualpath_sglang.router.engines import Registry

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where the figures of a moment come from, each called at a scrape."""

    waiting: Callable[[], int]
    active: Callable[[], int]
    sessions: Callable[[], int]
    rounds: Callable[[], int]
    read_queues: Callable[[], dict[str, int]]
    index_answers: Callable[[], bool]


class _Moment(Collector):
    def __init__(self, registry: Registry, gauges: Gauges) -> None:
        self._registry = registry
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "dualpath_router_engine_up", "1 while an engine takes requests", labels=_ENGINE
        )
        requests = GaugeMetricFamily(
            "dualpath_router_engine_requests", "Unfinished requests of an engine", labels=_ENGINE
        )
        tokens = GaugeMetricFamily(
            "dualpath_router_engine_tokens", "Tokens of its unfinished requests", labels=_ENGINE
        )
        for engine in self._registry:
            labels = (engine.name, engine.role, engine.node)
            up.add_metric(labels, int(engine.ready))
            requests.add_metric(labels, engine.requests)
            tokens.add_metric(labels, engine.tokens)
        yield from (up, requests, tokens)
        queues = GaugeMetricFamily(
            "dualpath_router_read_queue_tokens",
            "Tokens that a node has yet to read from storage",
            labels=("node",),
        )
        for node, count in self._gauges.read_queues().items():
            queues.add_metric((node,), count)
        yield queues
        for name, text, value in (
            ("waiting_requests", "Requests that wait for engines", self._gauges.waiting),
            ("active_requests", "Requests under way, those that wait included",
             self._gauges.active),
            ("sessions", "Sessions that are remembered", self._gauges.sessions),
            ("placement_rounds", "Rounds of placement so far", self._gauges.rounds),
            ("index_up", "1 while the index answers, or none is used", self._gauges.index_answers),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"dualpath_router_{name}", text, value=int(value()))


_ENGINE = ("engine", "role", "node")


class Metrics:
    """All of one router."""

    def __init__(self, registry: Registry, gauges: Gauges) -> None:
        self._all = CollectorRegistry()
        self._all.register(_Moment(registry, gauges))
        self.requests = Counter(
            "dualpath_router_requests",
            "Requests by how they ended",
            ("endpoint", "outcome"),
            registry=self._all,
        )
        self.placements = Counter(
            "dualpath_router_placements",
            "Requests given to engines",
            ("prefill", "decode"),
            registry=self._all,
        )
        self.failures = Counter(
            "dualpath_router_failures",
            "Attempts that failed, by whose fault and how",
            ("role", "failure"),
            registry=self._all,
        )
        self.retries = Counter(
            "dualpath_router_retries", "Requests that were placed again", registry=self._all
        )
        self.broken_streams = Counter(
            "dualpath_router_broken_streams",
            "Streams that broke off after their first byte",
            ("role",),
            registry=self._all,
        )
        self.deaths = Counter(
            "dualpath_router_engine_deaths", "Engines found dead", ("engine",), registry=self._all
        )
        self.warm = Counter(
            "dualpath_router_warm",
            "Requests whose prefix was known to be warm, by where they went",
            ("placed",),
            registry=self._all,
        )
        self.read_tokens = Counter(
            "dualpath_router_read_tokens",
            "Tokens expected to be read from storage, by node",
            ("node",),
            registry=self._all,
        )
        self.prompt_tokens = Counter(
            "dualpath_router_prompt_tokens", "Prompt tokens that engines told of",
            registry=self._all,
        )  # fmt: skip
        self.cached_tokens = Counter(
            "dualpath_router_cached_tokens", "Of them those that were cached", registry=self._all
        )
        self.queue_seconds = Histogram(
            "dualpath_router_queue_seconds",
            "Time until a request had its engines",
            buckets=_SECONDS,
            registry=self._all,
        )
        self.first_seconds = Histogram(
            "dualpath_router_first_byte_seconds",
            "Time until the first byte of an answer",
            buckets=_SECONDS,
            registry=self._all,
        )
        self.poll_seconds = Histogram(
            "dualpath_router_poll_seconds",
            "Round trip of asking an engine for its load",
            buckets=_SECONDS,
            registry=self._all,
        )

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._all)
