"""A file of prefill batches: one JSON line that says whose they are, then one a batch.

| field | meaning |
|---|---|
| ``requests`` | ``[cached, new]`` tokens of each |
| ``predicted_s`` | attention time as predicted; null without a profile |
| ``attention_s`` | measured, summed over layers; null where nothing was measured |
| ``forward_s`` | from the start of the forward to its end, on a CPU; null elsewhere |
| ``cut`` | whether a request of the batch is in parts |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from dualpath_sglang.prefill.profile import ProfileKey
from dualpath_sglang.scheduling.quota import Work


@dataclass(frozen=True, slots=True)
class Header:
    """Whose batches a file holds.

    Args:
        key: of the profile that they make.
        page_tokens: tokens a page.
        chunk_tokens: most tokens that SGLang puts into a batch; None without chunked prefill.
        context_tokens: longest request that the server takes.
    """

    key: ProfileKey
    page_tokens: int
    chunk_tokens: int | None
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One prefill batch; see the module."""

    requests: tuple[Work, ...]
    predicted_s: float | None
    attention_s: float | None
    forward_s: float | None
    cut: bool


class TraceWriter:
    """Appends batches to a file; each line is written at once, for a reader that follows.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, header: Header) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._line(asdict(header))

    def write(self, batch: Batch) -> None:
        """Append one.

        Raises:
            OSError: it cannot be written.
        """
        requests = [[work.cached, work.new] for work in batch.requests]
        self._line({**asdict(batch), "requests": requests})

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")


def read_header(path: Path) -> Header | None:
    """The first line, or None as long as there is none."""
    for line in _lines(path):
        return Header(**{**line, "key": ProfileKey(**line["key"])})
    return None


def read_batches(path: Path) -> list[Batch]:
    """All batches so far."""
    batches = []
    for line in _lines(path):
        if "requests" in line:
            works = tuple(Work(cached, new) for cached, new in line["requests"])
            batches.append(Batch(**{**line, "requests": works}))
    return batches


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines alone: the last may be half written."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.split("\n")[:-1]:
        yield json.loads(line)
