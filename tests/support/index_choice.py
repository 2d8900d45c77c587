"""Which index the tests of the cache and of servers use: the embedded one, or a Redis.

``make test-redis`` runs them on a Redis, by the environment variable that a server takes too.
Tests about the index file itself are marked ``embedded`` and left out there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import EmbeddedIndex, Index
from dualpath_sglang.index.redis import open_redis_index, store_id
from dualpath_sglang.index.source import IndexSource, RedisSource

ON_REDIS = "DUALPATH_INDEX" in os.environ
embedded = pytest.mark.embedded


def source(index: str | None = None) -> IndexSource:
    """What a server of this test run uses, or one with that setting."""
    extra = {} if index is None else {"index": index, "index_timeout_s": 10.0}
    return DualPathConfig.load(extra).index_source()


@contextmanager
def index_of(root: Path, setting: str | None = None) -> Iterator[Index]:
    """The index of a store, seen from outside; of this test run, or by that setting."""
    index: Index
    chosen = source(setting)
    if isinstance(chosen, RedisSource):
        index = open_redis_index(
            chosen.settings, store_id(root), lookup_timeout_s=10.0, read_only=True
        )
    else:
        index = EmbeddedIndex(root / "index.lmdb", read_only=True)
    try:
        yield index
    finally:
        index.close()


def remove_index(root: Path) -> None:
    """Lose the index of a store: whoever has it open finds out, and the next makes it anew."""
    chosen = source()
    if isinstance(chosen, RedisSource):
        with closing(open_redis_index(chosen.settings, store_id(root))) as index:
            index.start_over()
        return
    for path in root.glob("index.lmdb*"):
        path.unlink()


def let_go(index: Index | None) -> None:
    """Close it as the kernel does for a killed process: without a last word."""
    if isinstance(index, EmbeddedIndex):
        index._env.release()
    elif index is not None:
        index.close()
