"""Rounds of placement on record, and what the pure functions make of them again.

One JSON object a line: when it was, the queue, the cluster, the rules, the placements, and the ids
of those that wait or are stranded. A thread writes, so that no request waits for a disk.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from dualpath_sglang.scheduling.engines import Cluster, DecodeEngine, PrefillEngine, Request
from dualpath_sglang.scheduling.placement import Placement, Round, Rules, place

logger = logging.getLogger(__name__)

_MOST_UNWRITTEN = 10_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """A round as it was."""

    at: float
    queue: tuple[Request, ...]
    cluster: Cluster
    rules: Rules
    placements: tuple[Placement, ...]
    waiting: tuple[str, ...]
    stranded: tuple[str, ...]


def read(path: Path) -> Iterator[Recorded]:
    """The rounds of a file, in order.

    Raises:
        OSError, ValueError: it cannot be read, or a line is none of these.
    """
    with path.open("rb") as file:
        for line in file:
            told = orjson.loads(line)
            cluster = dict(told["cluster"])
            cluster["prefill"] = tuple(PrefillEngine(**e) for e in cluster["prefill"])
            cluster["decode"] = tuple(DecodeEngine(**e) for e in cluster["decode"])
            yield Recorded(
                told["at"],
                tuple(_request(r) for r in told["queue"]),
                Cluster(**cluster),
                _rules(told["rules"]),
                tuple(_placement(p) for p in told["placements"]),
                tuple(told["waiting"]),
                tuple(told["stranded"]),
            )


def replay(recorded: Recorded) -> Round:
    """What the pure functions make of the same queue, cluster and rules."""
    return place(recorded.queue, recorded.cluster, recorded.rules)


def same(recorded: Recorded, again: Round) -> bool:
    """Whether that is what the router did."""
    return (
        recorded.placements == again.placements
        and recorded.waiting == tuple(r.id for r in again.waiting)
        and recorded.stranded == tuple(r.id for r in again.stranded)
    )


class Recorder:
    """Writes rounds to a file, each line as soon as it can.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._queue: SimpleQueue[tuple[float, Sequence[Request], Cluster, Rules, Round] | None]
        self._queue = SimpleQueue()
        self.lost = 0
        """Rounds that were not written because the disk did not keep up."""
        self._thread = threading.Thread(target=self._run, name="dualpath-record", daemon=True)
        self._thread.start()

    def record(self, queue: Sequence[Request], cluster: Cluster, rules: Rules, done: Round) -> None:
        """Note a round."""
        if self._queue.qsize() >= _MOST_UNWRITTEN:
            self.lost += 1
            return
        self._queue.put((time.time(), queue, cluster, rules, done))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self.lost:
            logger.warning("%d rounds of placement were not recorded", self.lost)

    def _run(self) -> None:
        try:
            with self._file:
                while self._write():
                    pass
        except Exception:
            logger.exception("Rounds of placement are not recorded any more")
            while self._queue.get() is not None:
                self.lost += 1

    def _write(self) -> bool:
        noted = self._queue.get()
        lines = []
        while noted is not None:
            lines.append(_line(*noted))
            try:
                noted = self._queue.get_nowait()
            except Empty:
                break
        self._file.write(b"".join(lines))
        return noted is not None


def _line(
    at: float, queue: Sequence[Request], cluster: Cluster, rules: Rules, done: Round
) -> bytes:
    told = {
        "at": at,
        "queue": queue,
        "cluster": cluster,
        "rules": {k: "inf" if v == math.inf else v for k, v in asdict(rules).items()},
        "placements": done.placements,
        "waiting": [request.id for request in done.waiting],
        "stranded": [request.id for request in done.stranded],
    }
    return orjson.dumps(told, default=_plain, option=orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value)} cannot be recorded")


def _request(told: dict[str, Any]) -> Request:
    return Request(**{**told, "excluded": frozenset(told["excluded"])})


def _placement(told: dict[str, Any]) -> Placement:
    shares = tuple((node, weight) for node, weight in told["shares"])
    return Placement(**{**told, "shares": shares})


def _rules(told: dict[str, Any]) -> Rules:
    known = {field.name for field in fields(Rules)}
    values: dict[str, Any] = {k: math.inf if v == "inf" else v for k, v in told.items()}
    return Rules(**{k: v for k, v in values.items() if k in known})
