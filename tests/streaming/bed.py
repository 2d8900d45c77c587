"""A cache on a directory, blocks of known bytes in it, and a streamer that reads them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.throttle import HookedBackend
from dualpath_sglang.index.source import IndexSource
from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_sglang.pool import Pool
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.streaming.landing import MemoryLanding
from dualpath_sglang.streaming.load import Load, LoadRequest, LoadResult, PoolLoad
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_sglang.streaming.other_paths import OtherPaths
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_storage import Geometry, StoreOptions, pieces_of

MIB = 1 << 20
FILLER = 0xA5
"""What pages hold before anything is loaded into them."""


def geometry(pool: str = "kv", layers: int = 8, layer_bytes: int = 8192, **more: Any) -> Geometry:
    """A geometry whose size is all that matters."""
    return Geometry(
        model="m",
        weights="w",
        pool=pool,
        dtype="bf16",
        page_tokens=16,
        layers=layers,
        layer_bytes=layer_bytes,
        form="test",
        **more,
    )


def chain(seed: int, count: int) -> list[bytes]:
    """Keys of a chain of pages."""
    return [random.Random(f"{seed}/{i}").randbytes(32) for i in range(count)]


def block_bytes(pool: Pool, key: bytes) -> bytes:
    """What a block holds: a function of its name alone."""
    seed = pool.geometry.id_bytes + key
    return random.Random(seed).randbytes(pool.geometry.block_bytes)


class Pages:
    """Pages in plain memory, ``parts`` pieces a layer (2 as MHA has them, 1 as MLA)."""

    def __init__(self, pool: Pool, count: int, parts: int = 1) -> None:
        self.pool = pool
        size = pool.geometry.block_bytes
        self.memory = bytearray([FILLER]) * (size * count)
        self._size = size
        view = memoryview(self.memory)
        step = pool.geometry.layer_bytes // parts
        cuts = [
            (i, min(i + step, end))
            for end in range(pool.geometry.layer_bytes, size + 1, pool.geometry.layer_bytes)
            for i in range(end - pool.geometry.layer_bytes, end, step)
        ]
        self.landing = MemoryLanding(
            [[view[p * size + a : p * size + b] for a, b in cuts] for p in range(count)]
        )

    def page(self, page: int) -> bytes:
        """What is in a page."""
        return bytes(self.memory[page * self._size : (page + 1) * self._size])

    def layer(self, page: int, layer: int) -> bytes:
        """What is in a layer of a page."""
        size = self.pool.geometry.layer_bytes
        return self.page(page)[layer * size : (layer + 1) * size]

    def untouched(self, page: int) -> bool:
        """Whether nobody has written to the page."""
        return set(self.page(page)) == {FILLER}


@dataclass
class Hit:
    """One request's hit in one pool, and where it goes."""

    rid: str
    pool: Pool
    keys: Sequence[bytes]
    pages: Pages
    numbers: Sequence[int]
    gates: Sequence[int]
    hint: ReadHint | None = None

    @property
    def part(self) -> PoolLoad:
        return PoolLoad(self.pool, self.pages.landing, self.keys, self.numbers, self.gates)

    @property
    def request(self) -> LoadRequest:
        return LoadRequest(self.rid, [self.part], hint=self.hint)

    def wrong_pages(self) -> list[int]:
        """Pages that do not hold what they should."""
        return [
            number
            for key, number in zip(self.keys, self.numbers, strict=True)
            if self.pages.page(number) != block_bytes(self.pool, key)
        ]


@dataclass
class Reads:
    """Every read that the backend saw, and what it should do to it."""

    seen: list[tuple[float, Path, int, int]] = field(default_factory=list)
    also: Any = None

    def __call__(self, path: Path, offset: int, size: int) -> None:
        self.seen.append((time.monotonic(), path, offset, size))
        if self.also is not None:
            self.also(path, offset, size)

    @property
    def total_bytes(self) -> int:
        return sum(size for *_, size in self.seen)


class Bed:
    """See the module. Use as a context."""

    def __init__(
        self,
        root: Path,
        options: StreamOptions | None = None,
        *,
        index: IndexSource | None = None,
        paths: Callable[[KVCache], OtherPaths] | None = None,
        **store: Any,
    ) -> None:
        store.setdefault("capacity_bytes", 256 * MIB)
        store.setdefault("direct_io", "off")
        store.setdefault("segment_bytes", 1 * MIB)
        self.reads = Reads()
        self.backend = HookedBackend(root, self.reads)
        self.cache = KVCache(StoreOptions(root=root, **store), self.backend, index=index)
        self.streamer = LayerStreamer(
            self.cache,
            options or StreamOptions(staging_bytes=4 * MIB, queue_depth=4, probe_s=0),
            paths=None if paths is None else paths(self.cache),
        )

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.reads.also = None
        self.streamer.close()
        self.cache.close()

    def write(self, pool: Pool, keys: Sequence[bytes]) -> None:
        """Store a chain, a few blocks at a time, as an engine does."""
        for i in range(0, len(keys), 8):
            part = keys[i : i + 8]
            blocks = [
                pieces_of(memoryview(bytearray(block_bytes(pool, key))), pool.geometry)
                for key in part
            ]
            parent = keys[i - 1] if i else None
            results = self.cache.write(pool, part, blocks, parent=parent)
            assert set(results) <= {WriteResult.STORED, WriteResult.PRESENT}

    def hit(
        self,
        rid: str,
        pool: Pool,
        count: int,
        *,
        seed: int = 1,
        parts: int = 1,
        stored: bool = True,
    ) -> Hit:
        """A stored chain, and pages for it, the first of the pages left out."""
        keys = chain(seed, count)
        if stored:
            self.write(pool, keys)
        pages = Pages(pool, count + 1, parts)
        numbers = list(range(1, count + 1))
        random.Random(seed).shuffle(numbers)
        return Hit(rid, pool, keys, pages, numbers, range(pool.geometry.layers))

    def start(
        self, *hits: Hit, layers: int | None = None, seconds: float = 20.0, **more: Any
    ) -> Load:
        """Begin to load; each hit is a request of its own."""
        return self.streamer.start(
            [hit.request for hit in hits],
            layers=layers or max(max(hit.gates) for hit in hits) + 1,
            deadline=time.monotonic() + seconds,
            **more,
        )

    def load(self, *hits: Hit, **more: Any) -> dict[str, LoadResult]:
        """Load, and wait for the end."""
        return self.start(*hits, **more).wait(30.0)

    def segment_files(self) -> list[Path]:
        """The segments on disk."""
        return sorted(self.cache.root.glob("*/seg-*"))


class Gate:
    """A read hook that holds every read back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waiting = threading.Semaphore(0)

    def __call__(self, path: Path, offset: int, size: int) -> None:
        self.waiting.release()
        assert self.opened.wait(60.0)

    def await_reads(self, count: int) -> None:
        """Until that many reads have come to the gate."""
        for _ in range(count):
            assert self.waiting.acquire(timeout=20.0)


def eventually(condition: Any, what: str) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)
