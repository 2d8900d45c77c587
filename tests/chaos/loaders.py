"""The two ways in which a server loads a hit, behind one call, and the pages it goes to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.paths.host_reader import HostReader
from dualpath_sglang.pool import Pool
from dualpath_sglang.streaming.landing import MemoryLanding
from dualpath_sglang.streaming.load import LoadRequest, PoolLoad
from dualpath_sglang.streaming.other_paths import OtherPaths
from dualpath_sglang.streaming.streamer import LayerStreamer
from tests.chaos.blocks import BLOCKS, LAYER_BYTES, LAYERS, Bytes

FILLER = 0xA5


class Room:
    """Pages for one load."""

    def __init__(self) -> None:
        self._memory = bytearray(BLOCKS * LAYERS * LAYER_BYTES)
        view = memoryview(self._memory)
        at = range(0, len(view), LAYER_BYTES)
        layers = [view[begin : begin + LAYER_BYTES] for begin in at]
        self.pages = [layers[i : i + LAYERS] for i in range(0, len(layers), LAYERS)]
        self._array = np.frombuffer(self._memory, np.uint8).reshape(BLOCKS, -1)
        self.clear()

    def clear(self) -> None:
        """Forget what was loaded."""
        self._array[:] = FILLER

    @property
    def clean(self) -> bool:
        """Whether nobody has written to it since."""
        return bool((self._array == FILLER).all())

    def wrong(self, right: Bytes) -> list[int]:
        """Pages that do not hold what they should."""
        return [i for i in range(BLOCKS) if not np.array_equal(self._array[i], right[i])]


class Loader(Protocol):
    """One way."""

    def load(self, pool: Pool, keys: Sequence[bytes], room: Room, seconds: float) -> str:
        """How it ended: ``ok``, or why not."""
        ...

    @property
    def replaced(self) -> int:
        """Sides that were late so far."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Streaming:
    """As :class:`dualpath_sglang.linker.DualPathLinker` does."""

    def __init__(self, cache: KVCache, config: DualPathConfig, others: OtherPaths) -> None:
        self._streamer = LayerStreamer(cache, config.stream_options(), paths=others)

    def load(self, pool: Pool, keys: Sequence[bytes], room: Room, seconds: float) -> str:
        """See :class:`Loader`."""
        part = PoolLoad(
            pool, MemoryLanding(room.pages), keys, range(BLOCKS), range(pool.geometry.layers)
        )
        deadline = time.monotonic() + seconds
        load = self._streamer.start(
            [LoadRequest("r", [part])], layers=pool.geometry.layers, deadline=deadline
        )
        result = load.wait(seconds + 30.0).get("r")
        return "never" if result is None else result.outcome.value

    @property
    def replaced(self) -> int:
        """See :class:`Loader`."""
        return self._streamer.stats().hedges

    def close(self) -> None:
        """See :class:`Loader`."""
        self._streamer.close()


class Host:
    """As :class:`dualpath_sglang.hicache.DualPathStorage` does."""

    def __init__(self, cache: KVCache, config: DualPathConfig, others: OtherPaths) -> None:
        self._reader = HostReader(cache, others, config.hedge_after)

    def load(self, pool: Pool, keys: Sequence[bytes], room: Room, seconds: float) -> str:
        """See :class:`Loader`."""
        good = self._reader.read(pool, keys, room.pages, timeout_s=seconds)
        return "ok" if all(good) else "miss"

    @property
    def replaced(self) -> int:
        """See :class:`Loader`."""
        return self._reader.hedges

    def close(self) -> None:
        """See :class:`Loader`."""
