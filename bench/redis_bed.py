"""A cache on Redis behind a proxy, in use: chains are looked up, blocks written and read.

Every answer is judged: a lookup is told the length of a whole chain or nothing, and the bytes of a
block are those that its key says.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from bench.measure import BenchError
from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from tests.kvcache.caches import MIB, PENDING, STORED, WrongBytesError, options, read, write
from tests.support.blocks import chain, geometry, key
from tests.support.toxic_proxy import Toxic, ToxicProxy

DEADLINE_S = 0.005
"""The default of ``index_timeout_s``."""
CHAIN = 256
"""Pages of one conversation."""
CHAINS = 4
_PAUSE_S = 0.001
_WRITE_EVERY_S, _WRITE_PAGES = 0.1, 4
_GIVE_UP_S = 120.0


class Proxy:
    """A :class:`ToxicProxy` in a process of its own, which does not take our turns to run."""

    def __init__(self, target: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, target), daemon=True)
        self._process.start()
        theirs.close()
        self.url = str(self._pipe.recv())

    def set(self, toxic: Toxic) -> None:
        """From now on."""
        self._pipe.send(toxic)
        self._pipe.recv()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10.0)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, target: int) -> None:
    with (
        ToxicProxy(target) as proxy,
        contextlib.suppress(EOFError, OSError, KeyboardInterrupt),
    ):
        pipe.send(proxy.url)
        while True:
            proxy.set(pipe.recv())
            pipe.send(None)


class Crashes(logging.Handler):
    """Counts what the cache's own threads have caught and logged; lets nothing through."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.exc_info is not None


class Bed:
    """A cache with some chains in it, and two threads that use it.

    Attributes:
        stored: the chains; those that were written later come last.
        wrong: answers that are neither the whole chain nor a miss, and wrong bytes.
        failed: exceptions.
        pending: blocks that were stored without the index.
        took_ms: of each lookup.
        late_ms: how late the looking thread woke from each of its pauses.
    """

    def __init__(self, root: Path, url: str) -> None:
        source = RedisSource(RedisSettings.parse(url), DEADLINE_S)
        self.cache = KVCache(options(root, capacity_bytes=256 * MIB), index=source)
        self.pool = self.cache.attach(geometry("mla"))
        self.stored = [chain(number, CHAIN) for number in range(CHAINS)]
        for keys in self.stored:
            write(self.pool, self.cache, keys)
        self.hits = self.misses = self.wrong = self.failed = self.pending = 0
        self.took_ms: list[float] = []
        self.late_ms: list[float] = []
        self._writing, self._looking = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._run, args=(self._writing, self._store))
        self._looker = threading.Thread(target=self._run, args=(self._looking, self._look))

    def start(self) -> None:
        """Begin to use it."""
        self._writer.start()
        self._looker.start()

    def end_writing(self) -> None:
        """No more blocks; lookups go on."""
        self._writing.set()
        self._writer.join()

    def close(self) -> None:
        """End all of it."""
        for end, thread in ((self._writing, self._writer), (self._looking, self._looker)):
            end.set()
            if thread.is_alive():
                thread.join()
        self.cache.close()

    def recover(self) -> None:
        """Wait until every block that is said to be stored is found and has its bytes.

        Raises:
            BenchError: that takes too long.
        """
        began = time.monotonic()
        while not self._complete():
            if time.monotonic() - began > _GIVE_UP_S:
                raise BenchError(f"Not everything is found within {_GIVE_UP_S:.0f} s")
            time.sleep(0.05)

    def _complete(self) -> bool:
        cache, pool = self.cache, self.pool
        keys = [key for part in self.stored for key in part]
        parts = [keys[i : i + CHAIN] for i in range(0, len(keys), CHAIN)]
        try:
            return all(all(cache.lookup(pool, part)) for part in parts) and all(
                all(read(pool, cache, part)) for part in parts
            )
        except WrongBytesError:
            self.wrong += 1
            return False

    def _run(self, end: threading.Event, once: Callable[[int], None]) -> None:
        number = 0
        while not end.is_set():
            try:
                once(number)
            except WrongBytesError:
                self.wrong += 1
            except Exception:  # noqa: BLE001 - whatever it is, a request has failed
                self.failed += 1
            number += 1

    def _look(self, number: int) -> None:
        keys = [*self.stored[number % CHAINS], key("never stored", number)]
        began = time.perf_counter()
        try:
            run = sum(self.cache.lookup(self.pool, keys))  # a prefix would be remembered
        finally:
            ended = time.perf_counter()
            self.took_ms.append(1000 * (ended - began))
        self.hits += run == CHAIN
        self.misses += run == 0
        self.wrong += run not in (0, CHAIN)
        time.sleep(_PAUSE_S)
        self.late_ms.append(1000 * (time.perf_counter() - ended - _PAUSE_S))

    def _store(self, number: int) -> None:
        keys = chain(("new", number), _WRITE_PAGES)
        results = write(self.pool, self.cache, keys)
        self.stored.append(
            [k for k, result in zip(keys, results, strict=True) if result in (STORED, PENDING)]
        )
        self.pending += results.count(PENDING)
        read(self.pool, self.cache, self.stored[number % CHAINS][:_WRITE_PAGES])
        self._writing.wait(_WRITE_EVERY_S)
