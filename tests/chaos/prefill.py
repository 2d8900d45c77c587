"""A process of the prefill host: loads hits without end, and compares every page.

``python -m tests.chaos.prefill SPEC``. It stores the chains, then says so, and then tells of each
load in a line of JSON. On its standard input, lines such as ``{"hang_s": 2}`` have its store hang
for so long; it ends with the input.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.throttle import HookedBackend, Throttle
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import Report
from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.node.report import Node
from dualpath_sglang.node.starter import Membership
from dualpath_sglang.paths import host_fetch
from dualpath_sglang.paths.peers import Peers
from dualpath_sglang.second_path import other_nodes
from dualpath_sglang.streaming import remote_read
from dualpath_sglang.transport.base import Destination, End, Fetching, FetchRequest, Load, Span
from dualpath_storage import Geometry, pieces_of
from tests.chaos import blocks
from tests.chaos.loaders import Host, Loader, Room, Streaming
from tests.chaos.spec import Spec


class Disk:
    """What stands between the host and its store: a rate, and at times nothing passes."""

    def __init__(self, bytes_per_s: float) -> None:
        self.read_bytes = 0
        self._rate = Throttle(bytes_per_s)
        self._hangs_until = 0.0

    def hang(self, seconds: float) -> None:
        """Let nothing pass for so long."""
        self._hangs_until = time.monotonic() + seconds

    def __call__(self, path: Path, offset: int, size: int) -> None:
        """A read is about to be made."""
        self._rate(path, offset, size)
        while (left_s := self._hangs_until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
        self.read_bytes += size


class Counted:
    """Other nodes, and what each of them has brought. Passes everything on."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.bytes: dict[str, int] = {}
        self.lock = threading.Lock()

    def begin(self, side: str, request: FetchRequest, where: Destination, told: Fetching) -> Any:
        peer = self._peers._named(side)
        host = "" if peer is None else peer.where.rpartition(":")[0]
        return self._peers.begin(side, request, where, _Counting(self, host, where, told))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)


class _Counting:
    def __init__(self, all_: Counted, host: str, where: Destination, told: Fetching) -> None:
        self._all, self._host, self._where, self._told = all_, host, where, told

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        with self._all.lock:
            brought = self._all.bytes
            size = span.layer_blocks * self._where.layer_bytes
            brought[self._host] = brought.get(self._host, 0) + size
        self._told.landed(span, checksums)

    def missing(self, numbers: Sequence[int]) -> None:
        self._told.missing(numbers)

    def ended(self, end: End, load: Load | None) -> None:
        self._told.ended(end, load)


def _through_proxies(cache: KVCache, via: dict[str, str]) -> None:
    """Have the agents' reports name the proxies in front of them."""
    plain = cache.nodes

    def nodes() -> dict[str, Report] | None:
        found = plain()
        if found is None:
            return None
        where = {name: str(report.get("address")) for name, report in found.items()}
        return {
            name: {**report, "address": via.get(where[name], where[name])}
            for name, report in found.items()
        }

    vars(cache)["nodes"] = nodes


def _unchecked() -> None:
    """Take whatever comes for right: what the check of this harness is tested with."""
    for module in (remote_read, host_fetch):
        assert "bad_layer_blocks" in vars(module), "it checks in another way by now"
        vars(module)["bad_layer_blocks"] = lambda *_: []


class Prefill:
    """Loads hits until it is told to end."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        config = DualPathConfig.load(spec.settings)
        options = config.store_options()
        self._disk = Disk(spec.store_bytes_per_s)
        self._membership = Membership(config)
        self._cache = KVCache(
            options,
            HookedBackend(options.root, self._disk),
            index=config.index_source(),
            node=Node("streaming", host=config.machine_name, address=spec.address),
            machine=self._membership.queue,
        )
        self._pool = self._cache.attach(blocks.geometry())
        self._contents = [blocks.contents(chain) for chain in range(blocks.CHAINS)]
        self._write()
        _through_proxies(self._cache, spec.via)
        if not spec.checked:
            _unchecked()
        peers = other_nodes(config, self._cache, self._membership.machine)
        assert peers is not None
        self._others = Counted(peers)
        self._loader: Loader = {"streaming": Streaming, "host": Host}[spec.mode](
            self._cache, config, self._others
        )
        self._over = threading.Event()
        self._said = threading.Lock()

    def _write(self) -> None:
        of: Geometry = self._pool.geometry
        for chain in range(blocks.CHAINS):
            names, rows = blocks.keys(chain), self._contents[chain]
            pieces = [pieces_of(memoryview(bytearray(row)), of) for row in rows]
            results = self._cache.write(self._pool, names, pieces)
            assert set(results) <= {WriteResult.STORED, WriteResult.PRESENT}, results

    def say(self, **what: Any) -> None:
        """One line."""
        with self._said:
            print(json.dumps(what), flush=True)

    def run(self) -> None:
        """Load, and do as the lines of the standard input say, until it ends."""
        self.say(ready=True)
        threads = [
            threading.Thread(target=self._work, args=(number,), name=f"load-{number}")
            for number in range(self._spec.workers)
        ]
        for thread in threads:
            thread.start()
        for line in sys.stdin:
            self._disk.hang(float(json.loads(line)["hang_s"]))
        self._over.set()
        for thread in threads:
            thread.join()
        self._others.close()
        self._loader.close()
        self._cache.close()
        self._membership.close()

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        rooms = [Room(), Room()]
        while not self._over.is_set():
            rooms.reverse()
            chain = dice.randrange(blocks.CHAINS)
            try:
                self._load(number, chain, rooms[0])
            except Exception as error:
                logging.exception("A load failed")
                self.say(error=repr(error))
                return

    def _load(self, worker: int, chain: int, room: Room) -> None:
        stray = not room.clean  # by what was given up two loads ago
        room.clear()
        began = time.monotonic()
        names = blocks.keys(chain)
        outcome = "not_found"
        if self._cache.prefix(self._pool, names) == len(names):
            # What is looked up first takes its part of the time, as in a server.
            outcome = self._loader.load(self._pool, names, room, self._spec.deadline_s)
        ended = time.monotonic()
        wrong = room.wrong(self._contents[chain]) if outcome == "ok" else []
        room.clear()
        with self._others.lock:
            brought = {"local": self._disk.read_bytes, **self._others.bytes}
        self.say(
            worker=worker,
            began=began,
            ended=ended,
            outcome=outcome,
            wrong=wrong,
            stray=stray,
            brought=brought,
            counts={**self._others.counts, "replaced": self._loader.replaced},
        )
        if outcome != "ok":
            time.sleep(0.1)  # it would be computed


def main() -> None:
    """Run until the standard input ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    Prefill(Spec.from_json(sys.argv[1])).run()


if __name__ == "__main__":
    main()
