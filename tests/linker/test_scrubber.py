"""Damage is found all at once."""

from __future__ import annotations

import time

from dualpath_sglang import scrubber
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.pool import Pool
from dualpath_sglang.scrubber import Scrubber
from tests.linker.conftest import chain, put
from tests.support import stores


def test_every_damaged_block_of_a_suspect_chain_leaves_the_index(
    cache: KVCache, pool: Pool, monkeypatch: object
) -> None:
    names = chain(9)
    put(cache, pool, names)
    for page in (2, 3, 7):
        stores.corrupt(cache.root, bytes.fromhex(names[page]), layer=1)
    keys = [bytes.fromhex(name) for name in names]
    watch = Scrubber(cache)
    watch.suspect(pool, keys)
    end = time.monotonic() + 20
    while cache.lookup(pool, keys).count(True) > 6 and time.monotonic() < end:
        time.sleep(0.01)
    watch.close()
    assert [i for i, there in enumerate(cache.lookup(pool, keys)) if not there] == [2, 3, 7]


def test_long_chains_go_through_little_memory(cache: KVCache, pool: Pool) -> None:
    names = chain(40)
    put(cache, pool, names)
    stores.corrupt(cache.root, bytes.fromhex(names[-1]), layer=0)
    keys = [bytes.fromhex(name) for name in names]
    original, scrubber.SCRATCH_BYTES = scrubber.SCRATCH_BYTES, 3 * 4096
    try:
        Scrubber(cache)._check(pool, keys)
    finally:
        scrubber.SCRATCH_BYTES = original
    assert cache.lookup(pool, keys).count(False) == 1
