"""A process of a decode host: the node's agent, and what writes new pages to the store.

``python -m bench.cluster.decode SPEC``. On the storage host, where nobody needs an agent, it only
writes: so the pages of a run are there before it begins.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.cluster.lines import Answer, Driver, Message
from bench.cluster.model import Contents, key, keys
from bench.cluster.spec import DSCP, SECRET, HostSpec, open_cache
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import WriteResult
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.server import Server, ServerOptions

_WRITERS = 2
_BATCH = 16
_REPORT_S, _REPORT_TTL_S = 0.5, 5.0
_THERE = (WriteResult.STORED, WriteResult.PRESENT)


class Decode:
    """Answers the driver."""

    def __init__(self, spec: HostSpec) -> None:
        self._opened = open_cache(spec, writer=True)
        self._pool = self._opened.cache.attach(spec.computed.geometry)
        self._contents = Contents(spec.computed.geometry)
        self._executor = ThreadPoolExecutor(_WRITERS, "write")
        self._began = time.monotonic()
        self._over = threading.Event()
        self._agent: Agent | None = None
        self._server: Server | None = None
        if spec.blocks is not None:
            self._agent = Agent(self._opened.cache, spec.agent_bytes, spec.stream_options())
            listen = ServerOptions(host=spec.address, secret=SECRET, dscp=DSCP)
            self._server = Server(self._agent, listen)
            self._report(spec.name, f"{spec.address}:{self._server.port}")  # before anybody asks
            threading.Thread(
                target=self._go_on_reporting,
                args=(spec.name, f"{spec.address}:{self.port}"),
                name="report",
                daemon=True,
            ).start()

    @property
    def port(self) -> int:
        """Where the agent listens."""
        return 0 if self._server is None else self._server.port

    def _go_on_reporting(self, name: str, address: str) -> None:
        while not self._over.wait(_REPORT_S):
            with contextlib.suppress(IndexUnavailableError):
                self._report(name, address)

    def _report(self, name: str, address: str) -> None:
        """Tell all nodes what ``dualpath node`` tells."""
        queue = self._opened.cache.read_queue
        self._opened.cache.index.report(
            f"{name}:node:{name}",
            {
                "role": "node",
                "host": name,
                "node_id": name,
                "address": address,
                "protocol": VERSION,
                "up_s": round(time.monotonic() - self._began, 3),
                "read_rate": round(self._agent.read_rate or 0.0) if self._agent else 0,
                "read_queue_bytes": queue.bytes,
                "read_queue_tokens": queue.tokens,
            },
            _REPORT_TTL_S,
        )

    def write(self, request: Message, answer: Answer) -> None:
        """Store pages of a trajectory: ``trajectory``, ``first``, ``end``."""
        self._executor.submit(self._write, request, answer)

    def _write(self, request: Message, answer: Answer) -> None:
        try:
            done = sum(
                self._write_batch(request["trajectory"], begin, min(begin + _BATCH, request["end"]))
                for begin in range(request["first"], request["end"], _BATCH)
            )
            answer({"written": done})
        except Exception as error:  # noqa: BLE001 - the driver is told
            answer({"error": repr(error)})

    def _write_batch(self, trajectory: str, first: int, end: int) -> int:
        names = keys(trajectory, first, end)
        parent = key(trajectory, first - 1) if first else None
        memory = self._contents.of(names)
        results = self._opened.cache.write(self._pool, names, memory, parent=parent)
        return sum(result in _THERE for result in results)

    def stats(self, request: Message, answer: Answer) -> None:
        """Bytes read over the storage network, and what the agent had in memory already."""
        del request
        figures: dict[str, Any] = {"read_bytes": self._opened.read_bytes, "hits": 0, "sent": 0}
        if self._agent is not None and self._server is not None:
            figures["hits"] = self._agent.blocks.hits
            figures["sent"] = self._server.counts["bytes"]
        answer(figures)

    def close(self) -> None:
        """End everything."""
        self._over.set()
        self._executor.shutdown(cancel_futures=True)
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            self._agent.close()
        self._opened.close()


def main() -> None:
    """Run until the driver is gone."""
    logging.basicConfig(level=logging.WARNING)
    driver = Driver()
    decode = Decode(HostSpec.from_json(sys.argv[1]))
    driver.ready(port=decode.port)
    driver.serve({"write": decode.write, "stats": decode.stats})
    decode.close()


if __name__ == "__main__":
    main()
