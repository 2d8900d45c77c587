"""Where a PE's Layer Blocks land: they are counted and looked at, and then forgotten.

Memory for the contexts of many agents would be more than a machine has, and nobody reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.cluster.model import Contents
from dualpath_sglang.streaming.landing import DONE, Landed, Staged


@dataclass(slots=True)
class Tally:
    """What has landed at a PE. Thread-safe.

    Args:
        landed_bytes: payload whose checksums were right.
        wrong: Layer Blocks that are not the ones that were asked for.
    """

    landed_bytes: int = 0
    wrong: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, landed_bytes: int, wrong: int = 0) -> None:
        """So much more."""
        with self._lock:
            self.landed_bytes += landed_bytes
            self.wrong += wrong


class CheckedSink:
    """See :class:`~dualpath_sglang.streaming.landing.Landing`: pages of one hit.

    Args:
        names: key of each page.
    """

    def __init__(self, contents: Contents, names: Sequence[bytes], tally: Tally) -> None:
        self._contents = contents
        self._names = names
        self._tally = tally

    def target(self, pages: Sequence[int], after: object | None = None) -> CheckedTarget:
        assert after is None
        if pages and not 0 <= min(pages) <= max(pages) < len(self._names):
            raise ValueError(f"there are {len(self._names)} pages, not page {max(pages)}")
        return CheckedTarget(self._contents, [self._names[page] for page in pages], self._tally)


class CheckedTarget:
    """See :class:`~dualpath_sglang.streaming.landing.Target`."""

    def __init__(self, contents: Contents, names: Sequence[bytes], tally: Tally) -> None:
        self._contents = contents
        self._names = names
        self._tally = tally

    def land(self, staged: Staged) -> Landed:
        shape = staged.shape
        size = shape.geometry.layer_bytes
        layers = range(shape.first, shape.end)
        wrong = 0
        for i in range(staged.count):
            name, at = self._names[staged.begin + i], i * shape.stride + shape.lead
            for layer in layers:
                wrong += self._contents.wrong(name, layer, staged.memory[at : at + size])
                at += size
        self._tally.add(staged.count * len(layers) * size, wrong)
        return DONE
