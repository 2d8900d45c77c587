"""How a PE loads a hit: one class a system, all behind one interface.

| system | |
|---|---|
| ``basic`` | all layers of all pages with :meth:`KVCache.read`, and then the compute |
| ``layerwise`` | a :class:`LayerStreamer` on the PE's own storage NIC |
| ``dualpath`` | the same, each hit read by whoever has the shorter read queue |
| ``split`` | the same, each hit split over both sides |
| ``oracle`` | nothing is read at all |
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.cluster.landing import CheckedSink, Tally
from bench.cluster.model import Contents
from bench.cluster.spec import DSCP, SECRET, HostSpec
from bench.measure import BenchError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.paths.peers import PathOptions, Peers, Policy
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.load import Load, LoadRequest, PoolLoad
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_storage import pieces_of

SYSTEMS = ("basic", "layerwise", "dualpath", "split", "oracle")
LOAD_S = 60.0
_POLICIES: Mapping[str, Policy] = {"dualpath": "shorter_queue", "split": "split"}
_FLOOR_BYTES = 1 << 20


class Hit(Protocol):
    """A hit that is being loaded."""

    def landed(self, layer: int) -> float:
        """Wait for a layer; the monotonic second at which it was there, or given up."""
        ...

    def wait(self) -> bool:
        """Wait for all; whether it is there."""
        ...


class System(Protocol):
    """Loads hits. Thread-safe."""

    def load(self, names: Sequence[bytes]) -> Hit:
        """Begin; may take as long as the whole load."""
        ...

    def close(self) -> None:
        """No load is under way any more."""
        ...


def make_system(spec: HostSpec, cache: KVCache, pool: Pool, tally: Tally) -> System:
    """The one place where the name of a system becomes something that loads.

    Args:
        spec: ``system``, and ``peers``, the agents that may be asked.

    Raises:
        BenchError: there is no such system, or an agent cannot be reached.
    """
    if spec.system == "oracle":
        return Oracle()
    if spec.system == "basic":
        return Basic(cache, pool, tally)
    if spec.system == "layerwise":
        return Streaming(LayerStreamer(cache, spec.stream_options()), pool, tally)
    peers = _reached(spec, cache)
    return Streaming(LayerStreamer(cache, spec.stream_options(), paths=peers), pool, tally, peers)


def _reached(spec: HostSpec, cache: KVCache) -> Peers:
    """The agents of the DEs, all of them connected.

    Raises:
        BenchError: there is no such system, or one does not answer.
    """
    policy = _POLICIES.get(spec.system)
    if policy is None:
        raise BenchError(f"There is no system {spec.system}")
    peers = Peers(cache.nodes, PathOptions(policy, _FLOOR_BYTES, lambda _: SECRET, dscp=DSCP))
    end = time.monotonic() + LOAD_S
    while peers.usable < len(spec.peers):
        if time.monotonic() > end:
            peers.close()
            raise BenchError(f"{spec.name} does not reach all {len(spec.peers)} agents")
        time.sleep(0.05)
    return peers


class Oracle:
    """See the module."""

    def load(self, names: Sequence[bytes]) -> Hit:
        del names
        return _There(time.monotonic(), ok=True)

    def close(self) -> None:
        pass


class _There:
    """A hit whose layers all came at once."""

    def __init__(self, at: float, *, ok: bool) -> None:
        self._at = at
        self._ok = ok

    def landed(self, layer: int) -> float:
        del layer
        return self._at

    def wait(self) -> bool:
        return self._ok


class Basic:
    """See the module."""

    def __init__(self, cache: KVCache, pool: Pool, tally: Tally) -> None:
        self._cache = cache
        self._pool = pool
        self._tally = tally
        self._contents = Contents(pool.geometry)
        self._local = threading.local()

    def load(self, names: Sequence[bytes]) -> Hit:
        geometry = self._pool.geometry
        pieces = [
            pieces_of(block, geometry) for block in self._memory(len(names), geometry.block_bytes)
        ]
        good = self._cache.read(self._pool, names, pieces, timeout_s=LOAD_S)
        wrong = sum(
            self._contents.wrong(name, layer, view)
            for name, block, ok in zip(names, pieces, good, strict=True)
            for layer, view in enumerate(block)
            if ok
        )
        self._tally.add(sum(good) * geometry.block_bytes, wrong)
        return _There(time.monotonic(), ok=all(good))

    def _memory(self, count: int, size: int) -> list[memoryview]:
        """Of this thread, used again and again."""
        memory: memoryview = getattr(self._local, "memory", memoryview(b""))
        if len(memory) < count * size:
            memory = self._local.memory = memoryview(bytearray(count * size))
        return [memory[i * size : (i + 1) * size] for i in range(count)]

    def close(self) -> None:
        pass


class Streaming:
    """See the module."""

    def __init__(
        self, streamer: LayerStreamer, pool: Pool, tally: Tally, peers: Peers | None = None
    ) -> None:
        self._streamer = streamer
        self._peers = peers
        self._pool = pool
        self._tally = tally
        self._contents = Contents(pool.geometry)
        self._numbers = itertools.count()

    def load(self, names: Sequence[bytes]) -> Hit:
        layers = self._pool.geometry.layers
        sink = CheckedSink(self._contents, names, self._tally)
        rid = f"hit-{next(self._numbers)}"
        part = PoolLoad(self._pool, sink, names, range(len(names)), range(layers))
        deadline = time.monotonic() + LOAD_S
        load = self._streamer.start([LoadRequest(rid, [part])], layers=layers, deadline=deadline)
        return _Streamed(load, rid)

    def close(self) -> None:
        self._streamer.close()
        if self._peers is not None:
            self._peers.close()


class _Streamed:
    """A load of the streamer, which ends by itself at its deadline."""

    def __init__(self, load: Load, rid: str) -> None:
        self._load = load
        self._rid = rid

    def landed(self, layer: int) -> float:
        if not self._load.wait_layer(layer, 2 * LOAD_S):
            raise BenchError(f"Layer {layer} was not announced by the deadline")
        return self._load.began + self._load.ready_s[layer]

    def wait(self) -> bool:
        result = self._load.wait(2 * LOAD_S).get(self._rid)
        return result is not None and result.ok
