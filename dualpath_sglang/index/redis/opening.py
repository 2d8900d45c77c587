"""Opening the index of a store in Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualpath_sglang.index.base import IndexUnavailableError
from dualpath_sglang.index.owners import Owner
from dualpath_sglang.index.redis.settings import RedisSettings

if TYPE_CHECKING:
    from dualpath_sglang.index.redis.index import RedisIndex


def open_redis_index(
    settings: RedisSettings,
    store: str,
    *,
    lookup_timeout_s: float = 0.005,
    read_only: bool = False,
    timeout_s: float = 5.0,
    watch: Callable[[], None] = lambda: None,
    owner: Owner | None = None,
) -> RedisIndex:
    """The index of a store, begun when there is none.

    An index that is not :meth:`RedisIndex.filled` lacks what the store has: somebody must fill it.

    Args:
        store: the store's name, see :func:`store_id`.
        lookup_timeout_s: how long a lookup may take, for each 1024 keys of it.
        read_only: never write; the index must exist.
        timeout_s: how long Redis may take to answer now.
        watch: called in the index's upkeep; raises when the store is not that store any more.
        owner: this process, as an owner of segments; by default one that is like no other.

    Raises:
        RedisMisconfiguredError: Redis is set up so that it would lose parts of the index.
        IndexUnavailableError: it does not answer, or the package ``redis`` is not installed.
    """
    try:
        from dualpath_sglang.index.redis.access import Access
        from dualpath_sglang.index.redis.client import Client
        from dualpath_sglang.index.redis.index import RedisIndex
        from dualpath_sglang.index.redis.topology import topology
    except ImportError as error:
        raise IndexUnavailableError(
            "The index in Redis needs the Python package redis, as in pip install "
            "'dualpath-sglang[redis]'"
        ) from error
    client = Client(topology(settings))
    try:
        access = Access(
            client,
            store,
            read_only=read_only,
            deadline=time.monotonic() + timeout_s,
        )
    except BaseException:
        client.close()
        raise
    owner = owner or Owner(secrets.token_bytes(16))
    return RedisIndex(access, lookup_timeout_s, watch, owner=owner)
