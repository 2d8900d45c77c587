"""Everything at once to one store that holds a tenth of the data.

No wrong byte, no thread or process that gets stuck, and at no moment more than the capacity.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from tests.kvcache.caches import read, used_bytes, write
from tests.kvcache.processes import CRASHED, Hammer, hammer_chains, small
from tests.support import blocks
from tests.support.index_choice import source
from tests.support.zygote import Zygote

CAPACITY = 4 << 20
SHORT_S = 6.0
LONG_S = 60.0  # what the project promises to survive


class Gauge:
    """Watches how much a store takes, as fast as it can."""

    def __init__(self, root: Path) -> None:
        self.most = 0
        self.samples = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, used_bytes(self._root))
            self.samples += 1
            self._stop.wait(0.002)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return seed


def threads_on_one_store(
    root: Path, seconds: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The right contents are compared, not computed, under the hammer.
    known = {}
    real = blocks.content

    def content(of: object, key: bytes) -> bytes:
        name = (of, key)
        if name not in known:
            known[name] = real(of, key)  # type: ignore[arg-type]
        return known[name]

    monkeypatch.setattr(blocks, "content", content)
    with Gauge(root) as gauge, KVCache(small(str(root), CAPACITY), index=source()) as cache:
        hammer = Hammer(cache, CRASHED, hammer_chains(CRASHED, CAPACITY), pages=32)
        hammer.run(16, seconds, seed)
        stats = cache.stats()
    print(hammer.counts, stats, gauge.most, gauge.samples)
    assert not hammer.wrong, hammer.wrong[:3]
    assert hammer.counts["hits"] > 100
    assert stats.evicted_blocks > 100
    assert stats.failed_blocks == 0
    assert CAPACITY // 2 < gauge.most <= CAPACITY
    assert gauge.samples > 100


def processes_on_one_store(root: Path, seconds: float, seed: int, children: Zygote) -> None:
    with Gauge(root) as gauge:
        running = [children.fork("hammer", root, CAPACITY, seconds, seed + i) for i in range(4)]
        ends = [child.wait(seconds + 120) for child in running]
    print([child.text() for child in running], gauge.most, gauge.samples)
    assert ends == [0] * 4, [child.text() for child in running]
    assert all("{'reads'" in child.text() for child in running)
    assert CAPACITY // 2 < gauge.most <= CAPACITY
    with KVCache(small(str(root), CAPACITY), index=source()) as cache:
        cache.index.check()
        found = 0
        for of in CRASHED:
            pool = cache.attach(of)
            keys = [entry.key for entry in cache.index.entries(of)]
            assert read(pool, cache, keys) == [True] * len(keys)
            found += len(keys)
        assert found


def test_sixteen_threads(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_on_one_store(root, SHORT_S, seed, monkeypatch)


def test_four_processes(root: Path, seed: int, children: Zygote) -> None:
    processes_on_one_store(root, SHORT_S, seed, children)


@pytest.mark.slow
def test_sixteen_threads_for_a_minute(
    root: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_on_one_store(root, LONG_S, seed, monkeypatch)


@pytest.mark.slow
def test_four_processes_for_a_minute(root: Path, seed: int, children: Zygote) -> None:
    processes_on_one_store(root, LONG_S, seed, children)


def test_the_gauge_sees_a_store_that_is_too_large(root: Path) -> None:
    """Control: it does look at the files."""
    with Gauge(root) as gauge, KVCache(small(str(root), CAPACITY), index=source()) as cache:
        pool = cache.attach(CRASHED[0])
        for i in range(2 * CAPACITY // CRASHED[0].slot_bytes // 8):
            write(pool, cache, blocks.chain(i, 8))
        (root / CRASHED[0].id / "seg-too-much").write_bytes(bytes(CAPACITY))
        while gauge.most <= CAPACITY and gauge.samples < 100_000:
            pass
    assert gauge.most > CAPACITY


def test_the_hammer_sees_a_wrong_byte(
    root: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: its reads are compared with what the keys say."""
    real: Callable[..., bytes] = blocks.content
    with KVCache(small(str(root), CAPACITY), index=source()) as cache:
        hammer = Hammer(cache, CRASHED, chains=4, pages=16)
        monkeypatch.setattr(blocks, "content", lambda of, key: real(of, key + b"!"))
        for pool in hammer.pools:
            for keys in hammer.chains:
                write(pool, cache, keys)
        monkeypatch.undo()
        hammer.run(2, 1.0, seed)
    assert hammer.wrong
    assert "WrongBytes" in hammer.wrong[0]
