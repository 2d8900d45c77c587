"""Bytes of storage NICs, as the kernel counts them, and how evenly they are spread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.measure import BenchError

WINDOW_S = 1.0
_LEAST_BYTES = 256 << 10


def received_bytes(text: str, device: str) -> int:
    """Of one device, out of a ``/proc/PID/net/dev``.

    Raises:
        BenchError: it is not there.
    """
    for line in text.splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == device:
            return int(figures.split()[0])
    raise BenchError(f"There is no device {device}")


def max_avg(windows: Sequence[Sequence[int]]) -> float:
    """The busiest NIC's bytes over the mean of all, over windows, each weighing what it moved.

    Args:
        windows: bytes of each NIC in each. What lookups cost is left out: windows that moved
            next to nothing.

    Returns:
        1 for perfectly even ones, the number of NICs when one does it all, 0 when nothing moved.
    """
    counted = [window for window in windows if sum(window) >= _LEAST_BYTES]
    total = sum(sum(window) for window in counted)
    return sum(max(window) * len(window) for window in counted) / total if total else 0.0


class NicSampler:
    """Looks at a device of some processes' namespaces in every window of ``with``.

    Args:
        pids: one process in each namespace.
    """

    def __init__(self, pids: Sequence[int], device: str) -> None:
        self._pids = pids
        self._device = device
        self._samples: list[list[int]] = []
        self._end = threading.Event()
        self._failed: BenchError | None = None
        self._thread = threading.Thread(target=self._run, name="nics", daemon=True)

    def now(self) -> list[int]:
        """Bytes received since the device is there, by process.

        Raises:
            BenchError: a process is gone.
        """
        try:
            texts = [Path(f"/proc/{pid}/net/dev").read_text() for pid in self._pids]
        except OSError as error:
            raise BenchError(f"A process of the bench is gone: {error}") from None
        return [received_bytes(text, self._device) for text in texts]

    def __enter__(self) -> NicSampler:
        self._samples.append(self.now())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        if error is None:
            if self._failed is not None:
                raise self._failed
            self._samples.append(self.now())

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while True:
                due += WINDOW_S
                if self._end.wait(max(0.0, due - time.monotonic())):
                    return
                self._samples.append(self.now())
        except BenchError as error:
            self._failed = error

    @property
    def bytes(self) -> list[int]:
        """Received in all of ``with``, by process."""
        return _difference(self._samples[0], self._samples[-1])

    @property
    def spread(self) -> float:
        """See :func:`max_avg`."""
        pairs = zip(self._samples, self._samples[1:], strict=False)
        return max_avg([_difference(before, after) for before, after in pairs])


def _difference(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]
