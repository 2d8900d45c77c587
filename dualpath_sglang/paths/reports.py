"""What a node's report says, as far as it can be true.

Whoever may write to the index may write anything there, and one report must not keep the other
nodes out: what cannot be is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualpath_sglang.node.listen import parted
from dualpath_sglang.transport.base import Load

_LONGEST = 256
"""Characters of a name or an address."""
_MOST = 1 << 60
"""Bytes, and bytes a second."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Of one node.

    Args:
        name: unique, new at each start.
        host, port: where it listens.
        machine: what its machine is called; empty when it says nothing.
        protocol: version that it speaks; -1 when it says none.
        has_blocks: whether there are any in its memory.
        load: its read queue; None when it says none.
        read_rate: bytes a second that it reads from storage; None when it says none.
        told: differs from report to report.
    """

    name: str
    host: str
    port: int
    machine: str
    protocol: int
    has_blocks: bool
    load: Load | None
    read_rate: float | None
    told: object


def nodes_among(reports: Iterable[object]) -> list[NodeReport]:
    """Those of nodes, among the reports of all that use a store."""
    parsed = (_parsed(report) for report in reports if isinstance(report, dict))
    return [report for report in parsed if report is not None]


def _parsed(report: dict[str, object]) -> NodeReport | None:
    name, address = _text(report.get("node_id")), _text(report.get("address"))
    if report.get("role") != "node" or not name:
        return None
    try:
        host, port = parted(address)
    except ValueError:
        return None
    queue, tokens = (_count(report.get(f"read_queue_{unit}")) for unit in ("bytes", "tokens"))
    protocol = _count(report.get("protocol"))
    return NodeReport(
        name,
        host,
        port,
        _text(report.get("host")),
        -1 if protocol is None else protocol,
        bool(report.get("cached_bytes")),
        None if queue is None else Load(queue, tokens or 0),
        _rate(report.get("read_rate")),
        report.get("up_s"),
    )


def _text(value: object) -> str:
    """A line of text; empty when it is none."""
    if isinstance(value, str) and len(value) <= _LONGEST and value.isprintable():
        return value
    return ""


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST:
        return value
    return None


def _rate(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST:
        return float(value)
    return None
