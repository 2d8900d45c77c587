"""The order of use when many scripts share one moment, and when many processes write at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import FOREVER_S, INDEXER, KV, OTHER, records
from tests.support.blocks import chain
from tests.support.redis_server import RedisServer

ONE = {g.id_bytes: 1 for g in (KV, INDEXER, OTHER)}


@pytest.mark.parametrize("touched", [False, True])
def test_a_long_chain_is_in_order_though_time_stands_still(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch, touched: bool
) -> None:
    monkeypatch.setattr(RedisIndex, "_now", lambda _: 1000)
    keys = chain("long", 3000)
    index.publish(KV, records(keys), FOREVER_S)
    if touched:
        index.touch(KV.unit, keys, FOREVER_S)
    used = {entry.key: entry.last_used_us for entry in index.entries(KV)}
    uses = [used[key] for key in keys]
    assert uses == sorted(set(uses), reverse=True)
    freed = index.evict(ONE, 2990, FOREVER_S)
    assert [row.slot.slot for row in freed] == list(range(2999, 9, -1))


def test_clients_that_write_at_once_leave_every_count_right(
    server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    """Chains with one trunk and two pools, so that most scripts meet on the same rows."""
    wrong: list[object] = []
    trunk = chain("trunk", 20)

    def work(seed: int) -> None:
        try:
            index = open_at(server.url)
            for i in range(25):
                keys = [*trunk, *chain((seed % 3, i), 10)]
                index.publish(KV, records(keys, segment=seed, slot=30 * i), FOREVER_S)
                index.publish(INDEXER, records(keys, segment=seed, slot=30 * i), FOREVER_S)
                index.remove(KV, [(trunk[i % 20], 1)], FOREVER_S)
                index.touch(KV.unit, keys, FOREVER_S)
                if i % 5 == 0:
                    index.evict(ONE, 40, FOREVER_S, prefer={(KV.id_bytes, seed)})
                if i % 10 == 0:
                    index.evict_segment(INDEXER.id_bytes, seed, FOREVER_S)
                    index.drop_segments(KV, [seed], FOREVER_S)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    index = open_at(server.url)
    index.check()
    assert index.counts()
    while index.evict(ONE, 1000, FOREVER_S):
        pass
    assert index.counts() == {}
    index.check()
