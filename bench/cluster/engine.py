"""A process of a prefill host: the stand-in of an engine.

``python -m bench.cluster.engine SPEC``. A request names a trajectory; the engine looks its prefix
up, loads the hit over the real cache, and computes the rest layer by layer: layer i begins when
layer i of the hit has landed and layer i - 1 is done, and takes the time that the model says, in
which the processor is free. Requests compute one at a time, in the order in which their first
layers came; a few of them load at a time, in the order in which they were asked for.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bench.cluster.landing import Tally
from bench.cluster.lines import Answer, Driver, Message
from bench.cluster.model import keys
from bench.cluster.spec import HostSpec, open_cache
from bench.cluster.systems import Hit, make_system


class Turns:
    """A lock that is given in the order in which it was asked for."""

    def __init__(self) -> None:
        self.asked = 0
        """How many have asked so far."""
        self._served = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            mine = self.asked
            self.asked += 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


class Engine:
    """Answers the driver."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._model = spec.computed
        self._opened = open_cache(spec, writer=False)
        self._pool = self._opened.cache.attach(self._model.geometry, writer=False)
        self._tally = Tally()
        self._system = make_system(spec, self._opened.cache, self._pool, self._tally)
        self._loads = ThreadPoolExecutor(spec.loads, "load")
        self._compute = Turns()
        self._streaming = threading.Event()
        self._streams: list[threading.Thread] = []
        self._began = self._ended = 0.0
        self._missed = 0

    # -- turns of trajectories --------------------------------------------------------------

    def prefill(self, request: Message, answer: Answer) -> None:
        """A turn: ``trajectory``, ``context`` and ``append`` in tokens."""
        self._loads.submit(self._prefill, request, answer, time.monotonic())

    def _prefill(self, request: Message, answer: Answer, arrived: float) -> None:
        try:
            answer(
                self._turn(request["trajectory"], request["context"], request["append"], arrived)
            )
        except Exception as error:
            logging.exception("A turn failed")
            answer({"error": repr(error)})

    def _turn(self, trajectory: str, context: int, append: int, arrived: float) -> Message:
        model = self._model
        names = keys(trajectory, 0, context // model.page_tokens)
        oracle = self._spec.system == "oracle"
        pages = len(names) if oracle else self._opened.cache.prefix(self._pool, names)
        cached = pages * model.page_tokens
        new = context + append - cached
        hit = self._system.load(names[:pages]) if pages else None
        if hit is not None:
            hit.landed(0)
        with self._compute:
            end = self._run(hit, new, cached)
            ok = hit is None or hit.wait()
            if not ok:  # as an engine does: all of it is computed
                end = time.monotonic() + model.layers * model.layer_s(context + append, 0)
            time.sleep(max(0.0, end - time.monotonic()))
        return {
            "ttft_s": time.monotonic() - arrived,
            "hit_pages": pages,
            "short_pages": len(names) - pages,
            "ok": ok,
        }

    def _run(self, hit: Hit | None, new: int, cached: int) -> float:
        """When the last layer is computed, monotonic seconds; returns once it has landed."""
        end = time.monotonic()
        for layer in range(self._model.layers):
            landed = 0.0 if hit is None else hit.landed(layer)
            end = max(end, landed) + self._model.layer_s(new, cached)
        return end

    # -- reading alone ----------------------------------------------------------------------

    def stream(self, request: Message, answer: Answer) -> None:
        """Read whole trajectories back to back, some at a time, until :meth:`halt`.

        Args:
            request: ``hits``: for each reader, rows of a trajectory and its pages.
        """
        self._streaming.set()
        self._began = time.monotonic()
        for number, hits in enumerate(request["hits"]):
            thread = threading.Thread(target=self._stream, args=(hits,), name=f"stream-{number}")
            thread.start()
            self._streams.append(thread)
        answer({})

    def _stream(self, hits: list[tuple[str, int]]) -> None:
        for trajectory, pages in itertools.cycle(hits):
            if not self._streaming.is_set():
                break
            if not self._system.load(keys(trajectory, 0, pages)).wait():
                self._missed += 1
        self._ended = time.monotonic()

    def halt(self, request: Message, answer: Answer) -> None:
        """End the readers; what they are at is waited for, and counts."""
        del request
        self._halt()
        answer({"missed": self._missed, "took_s": self._ended - self._began})

    def _halt(self) -> None:
        self._streaming.clear()
        for thread in self._streams:
            thread.join()
        self._streams.clear()

    def stats(self, request: Message, answer: Answer) -> None:
        """What has landed by now, and the bytes that came over the storage network."""
        del request
        answer(
            {
                "landed_bytes": self._tally.landed_bytes,
                "wrong": self._tally.wrong,
                "read_bytes": self._opened.read_bytes,
            }
        )

    def close(self) -> None:
        """End everything."""
        self._halt()
        self._loads.shutdown(cancel_futures=True)
        self._system.close()
        self._opened.close()


def main() -> None:
    """Run until the driver is gone."""
    logging.basicConfig(level=logging.WARNING)
    driver = Driver()
    engine = Engine(HostSpec.from_json(sys.argv[1]))
    driver.ready()
    driver.serve(
        {
            "prefill": engine.prefill,
            "stream": engine.stream,
            "halt": engine.halt,
            "stats": engine.stats,
        }
    )
    engine.close()


if __name__ == "__main__":
    main()
