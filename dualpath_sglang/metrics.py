"""What DualPath tells Prometheus, through SGLang's own ``/metrics`` (``--enable-metrics``).

SGLang's processes share their samples through files (Prometheus's multiprocess mode), so a metric
that a scheduler makes appears on the server's endpoint. All carry the labels ``mode`` (streaming,
hicache, prefill) and ``rank`` (of tensor parallelism).

| name | | labels | what |
|---|---|---|---|
| dualpath_lookups_total | counter | source | answers about prefixes, by what knew them |
| dualpath_lookup_seconds | histogram | | time a lookup kept the scheduler (streaming) |
| dualpath_hit_tokens_total | counter | | tokens of prefixes found |
| dualpath_miss_tokens_total | counter | reason | tokens not found, not worth it, or not readable |
| dualpath_missed_blocks_total | counter | reason | blocks not found or not readable |
| dualpath_read_bytes_total | counter | | payload read |
| dualpath_read_seconds_total | counter | | summed over threads |
| dualpath_written_bytes_total | counter | | payload written |
| dualpath_write_seconds_total | counter | | summed over threads |
| dualpath_blocks_total | counter | outcome | read, written, present, dropped, failed, evicted |
| dualpath_repairs_total | counter | kind | damaged blocks removed; re-reads that helped |
| dualpath_admissions_total | counter | decision | hits loaded in full, shortened, recomputed |
| dualpath_loads_total | counter | outcome | loads of requests |
| dualpath_load_seconds | histogram | | from the start of a load to its end |
| dualpath_layer_wait_seconds | histogram | | time a forward waited for a layer that was not there |
| dualpath_recomputes_total | counter | reason | requests computed anew after a failed load |
| dualpath_prefill_batches_total | counter | outcome | under a quota: cut, or whole |
| dualpath_prefill_predicted_seconds | histogram | | attention of a prefill batch, predicted |
| dualpath_prefill_attention_seconds | histogram | | and measured, with prefill_trace |
| dualpath_prefill_failures_total | counter | | decisions that the quota left to SGLang |
| dualpath_path_bytes_total | counter | path | bytes of hits, by who read them: pe (this), de |
| dualpath_hedges_total | counter | | nodes that were late and replaced |
| dualpath_hinted_reads_total | counter | kind | reads with a router's hint: honoured, replaced |
| dualpath_nodes | gauge | | other nodes that can be asked now |
| dualpath_node_events_total | counter | event | fetches from nodes by their end, and faults |
| dualpath_read_queue_bytes | gauge | | accepted and not yet read |
| dualpath_reads_in_flight | gauge | | |
| dualpath_staging_used_bytes | gauge | | |
| dualpath_staging_peak_bytes | gauge | | |
| dualpath_offload_waiting_pages | gauge | | pages on their way to the store |
| dualpath_store_used_bytes | gauge | | of the root |
| dualpath_store_capacity_bytes | gauge | | of the root |
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from dualpath_sglang.stats import CacheStats
from dualpath_sglang.streaming.stats import StreamStats

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lookups": ("Answers about prefixes, by what knew them", ("source",)),
    "hit_tokens": ("Tokens of prefixes that were found", ()),
    "miss_tokens": ("Tokens not found, not worth loading, or not readable", ("reason",)),
    "missed_blocks": ("Blocks not found or not readable", ("reason",)),
    "read_bytes": ("Payload read from the store", ()),
    "read_seconds": ("Time of reads, summed over threads", ()),
    "written_bytes": ("Payload written to the store", ()),
    "write_seconds": ("Time of writes, summed over threads", ()),
    "blocks": ("Blocks by what became of them", ("outcome",)),
    "repairs": ("Damaged blocks removed, and second reads that helped", ("kind",)),
    "admissions": ("Hits by what was decided about loading them", ("decision",)),
    "loads": ("Loads of requests by how they ended", ("outcome",)),
    "path_bytes": ("Bytes of hits by who read them: this node (pe) or another (de)", ("path",)),
    "hedges": ("Nodes that were late and replaced", ()),
    "hinted_reads": ("Reads with a hint: honoured, or somebody else was asked too", ("kind",)),
    "node_events": ("Fetches from other nodes by their end, and what went wrong", ("event",)),
    "prefill_batches": (
        "Prefill batches under a quota: a request is in parts, or none",
        ("outcome",),
    ),
    "prefill_failures": ("Decisions that the compute quota left to SGLang", ()),
    "recomputes": ("Requests computed anew after a failed load", ("reason",)),
}
_HISTOGRAMS: Mapping[str, str] = {
    "lookup_seconds": "Time that a lookup kept the scheduler",
    "prefill_predicted_seconds": "Attention time of a prefill batch under a quota, as predicted",
    "prefill_attention_seconds": "Attention time of a prefill batch, as measured",
    "load_seconds": "Time from the start of a load to its end",
    "layer_wait_seconds": "Time that a forward waited for a layer that was not there yet",
}
_GAUGES: Mapping[str, tuple[str, Literal["livesum", "livemax"]]] = {
    "read_queue_bytes": ("Bytes accepted and not yet read", "livesum"),
    "nodes": ("Other nodes that can be asked to read", "livemax"),
    "reads_in_flight": ("Reads in flight", "livesum"),
    "staging_used_bytes": ("Staging memory in use", "livesum"),
    "staging_peak_bytes": ("Most staging memory ever in use", "livesum"),
    "offload_waiting_pages": ("Pages on their way to the store", "livesum"),
    "store_used_bytes": ("Bytes that the store takes", "livemax"),
    "store_capacity_bytes": ("Bytes that the store may take", "livemax"),
}
_LABELS = ("mode", "rank")


@functools.cache
def _registered() -> dict[str, Any]:
    """The metrics of this process: Prometheus keeps them for as long as it runs."""
    from prometheus_client import Counter, Gauge, Histogram

    made: dict[str, Any] = {}
    for name, (text, labels) in _COUNTERS.items():
        made[name] = Counter(f"dualpath_{name}", text, (*_LABELS, *labels))
    for name, text in _HISTOGRAMS.items():
        made[name] = Histogram(f"dualpath_{name}", text, _LABELS, buckets=_SECONDS)
    for name, (text, mode) in _GAUGES.items():
        made[name] = Gauge(f"dualpath_{name}", text, _LABELS, multiprocess_mode=mode)
    return made


class Metrics:
    """The metrics of one backend or linker. Without ``enabled``, every call does nothing.

    Args:
        mode: streaming or hicache.
        rank: of this process.
    """

    def __init__(self, mode: str, rank: int = 0, *, enabled: bool = True) -> None:
        self._labels = {"mode": mode, "rank": str(rank)}
        self._metrics: dict[str, Any] = {}
        self._seen: dict[tuple[str, ...], float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if enabled:
            try:
                self._metrics = _registered()
            except Exception as error:  # noqa: BLE001 -- serving does not depend on them
                logger.warning("DualPath has no metrics: %s", error)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        metric = self._metrics.get(name)
        if metric is not None and amount > 0:
            metric.labels(**self._labels, **labels).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram."""
        metric = self._metrics.get(name)
        if metric is not None:
            metric.labels(**self._labels).observe(value)

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        metric = self._metrics.get(name)
        if metric is not None:
            metric.labels(**self._labels).set(value)

    def follow(self, publish: Callable[[], None]) -> None:
        """Call ``publish`` every second from a thread of its own, until :meth:`close`."""
        if self._metrics and self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(publish,), name="dualpath-metrics", daemon=True
            )
            self._thread.start()

    def _run(self, publish: Callable[[], None]) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                publish()
            except Exception:
                logger.exception("Publishing metrics failed; it goes on")

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    # -- totals that others keep ------------------------------------------------------------

    def cache(self, stats: CacheStats) -> None:
        """Everything that a cache counted since the last call."""
        self._totals("missed_blocks", "reason", stats.misses)
        self._total("read_bytes", stats.read_bytes)
        self._total("read_seconds", stats.read_s)
        self._total("written_bytes", stats.written_bytes)
        self._total("write_seconds", stats.write_s)
        outcomes = {
            "read": stats.hit_blocks,
            "written": stats.written_blocks,
            "pending": stats.pending_blocks,
            "present": stats.present_blocks,
            "dropped": stats.dropped_blocks,
            "failed": stats.failed_blocks,
            "evicted": stats.evicted_blocks,
        }
        self._totals("blocks", "outcome", outcomes)
        self._totals("repairs", "kind", {"removed": stats.repaired_blocks})
        self.gauge("store_used_bytes", stats.used_bytes)
        self.gauge("store_capacity_bytes", stats.capacity_bytes)

    def stream(self, stats: StreamStats) -> None:
        """What a streamer counted since the last call, beside its cache, which counts the I/O."""
        self._totals("repairs", "kind", {"reread": stats.repaired_blocks})
        self.gauge("read_queue_bytes", stats.queued_bytes)
        self.gauge("reads_in_flight", stats.in_flight_reads)
        self.gauge("staging_used_bytes", stats.staging_used_bytes)
        self.gauge("staging_peak_bytes", stats.staging_peak_bytes)

    def paths(self, local_bytes: int, agents_bytes: int, own_bytes: int, hedges: int) -> None:
        """What came over which path, in total.

        Args:
            local_bytes: read by this process.
            agents_bytes: brought by agents.
            own_bytes: those of them that this machine's own agent brought.
        """
        paths = {"pe": local_bytes + own_bytes, "de": agents_bytes - own_bytes}
        self._totals("path_bytes", "path", paths)
        self._total("hedges", hedges)

    def nodes(self, usable: int, events: Mapping[str, int]) -> None:
        """How many can be asked now, and what happened with them in total."""
        self.gauge("nodes", usable)
        self._totals("node_events", "event", events)

    def hinted(self, kinds: Mapping[str, int]) -> None:
        """Reads with a hint by what became of it, in total."""
        self._totals("hinted_reads", "kind", kinds)

    def lookups(self, sources: Mapping[str, int]) -> None:
        """Answers by source, in total."""
        self._totals("lookups", "source", sources)

    def _totals(self, name: str, label: str, values: Mapping[str, float]) -> None:
        for value, total in list(values.items()):
            self._total(name, total, **{label: value})

    def _total(self, name: str, total: float, **labels: str) -> None:
        """Count what was counted elsewhere since the last call."""
        key = (name, *_sorted(labels))
        self.count(name, total - self._seen.get(key, 0), **labels)
        self._seen[key] = max(total, self._seen.get(key, 0))


def _sorted(labels: Mapping[str, str]) -> Iterable[str]:
    return (f"{name}={value}" for name, value in sorted(labels.items()))
