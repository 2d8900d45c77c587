"""Redis Cluster and Sentinel: every call on the right server, and a server that dies under load."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dualpath_sglang.index import Index, IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.redis import LEAST_RIGHTS, RedisSettings, open_redis_index
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_storage import Geometry
from tests.index.records import FOREVER_S, KV, records
from tests.index.redis.test_security import SECRET, everything
from tests.support.blocks import chain, geometry
from tests.support.redis_server import RedisServer, cluster, sentinels, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

USER = f"user cache on >{SECRET} {LEAST_RIGHTS}"
RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    with cluster(options=[USER]) as servers:
        yield servers


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[list[RedisServer], list[RedisServer]]]:
    with sentinels(options=[USER]) as watched:
        yield watched


def opened(url: str, **how: Any) -> RedisIndex:
    settings = RedisSettings.parse(url, password=SECRET)
    how = {"lookup_timeout_s": FOREVER_S, "timeout_s": 20.0, **how}
    return open_redis_index(settings, secrets.token_hex(8), **how)


def cluster_url(servers: list[RedisServer]) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"redis+cluster://cache@{hosts}"


def sentinel_url(watched: tuple[list[RedisServer], list[RedisServer]]) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in watched[1])
    return f"redis+sentinel://cache@{hosts}/main"


def models(count: int) -> list[Geometry]:
    return [geometry("mha", model=f"model {i}") for i in range(count)]


def test_models_spread_over_a_cluster_and_every_call_finds_them(
    servers: list[RedisServer],
) -> None:
    index = opened(cluster_url(servers))
    everything(index)
    index = opened(cluster_url(servers[:1]))
    for model in models(12):
        index.publish(model, records(chain(model.model, 2000)), FOREVER_S)
    for model in models(12):
        assert index.prefix(model, chain(model.model, 2000)) == 2000
    assert sum(index.counts().values()) == 24_000
    size = {model.id_bytes: 1 for model in models(12)}
    assert len(index.evict(size, 3000, FOREVER_S)) == 3000
    assert sum(index.counts().values()) == 21_000
    index.check()
    used = []
    for server in servers[:3]:
        with server.admin() as admin:
            used.append(admin.dbsize())
    assert all(used), "every master has some"
    index.close()


@dataclass
class Load:
    """Publishes and looks up without end, as the cache does, and notes what came of it."""

    index: Index
    models: list[Geometry]
    timeout_s: float
    failed: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    wrong: list[object] = field(default_factory=list)
    longest_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        turn = 0
        while not self.stop.is_set():
            model = self.models[turn % len(self.models)]
            keys = chain((model.model, turn), 20)
            began = time.monotonic()
            try:
                self.index.publish(model, records(keys, slot=20 * turn), self.timeout_s)
                run = self.index.prefix(model, keys)
                if run != 20:
                    self.wrong.append((turn, run))
                self.ended[turn] = turn
            except IndexDamagedError as error:
                self.wrong.append(error)
            except IndexUnavailableError:
                self.failed += 1
            except BaseException as error:
                self.wrong.append(error)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            turn += 1
            self.stop.wait(0.01)


def under_load(index: RedisIndex, geometries: list[Geometry], fail: Callable[[], object]) -> Load:
    """What came of a load through which a server failed, and until all was well again."""
    load = Load(index, geometries, timeout_s=0.5)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        wait_for(lambda: len(load.ended) > 50, what="the load")
        fail()
        wait_for(lambda: load.failed, what="the failure")

        def well() -> bool:
            before = load.failed
            time.sleep(1.0)
            return load.failed == before

        wait_for(well, RECOVERY_S, what="recovery")
    finally:
        load.stop.set()
        thread.join()
    return load


def test_a_master_of_a_cluster_dies_under_load(servers: list[RedisServer]) -> None:
    index = opened(cluster_url(servers), lookup_timeout_s=0.5)
    load = under_load(index, models(12), servers[0].kill)
    assert not load.wrong
    assert load.longest_s < 0.5 + 0.5 + 0.5
    before = len(load.ended)
    assert before > 50
    index.check()
    index.upkeep()
    with servers[3].admin(decode_responses=True) as admin:
        assert admin.role()[0] == "master"
    # The old master comes back, empty, as a replica.
    servers[0].start()
    with servers[0].admin(decode_responses=True) as admin:
        wait_for(lambda: admin.role()[0] == "slave", what="the old master's return")
    index.upkeep()
    index.check()
    index.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_the_master_of_sentinels_fails_under_load(hangs: bool) -> None:
    with sentinels(options=[USER]) as watched:
        masters = watched[0]
        index = opened(sentinel_url(watched), lookup_timeout_s=0.5)
        survives_its_master(index, masters, hangs)


def survives_its_master(index: RedisIndex, masters: list[RedisServer], hangs: bool) -> None:
    """Sentinels replace a master that hangs or dies under load; then the index is closed."""
    load = under_load(index, [KV], masters[0].stop if hangs else masters[0].kill)
    assert not load.wrong
    assert load.longest_s < 0.5 + 0.5 + 0.5
    with masters[1].admin(decode_responses=True) as admin:
        assert admin.role()[0] == "master"
    index.check()
    index.upkeep()
    if hangs:
        masters[0].cont()
    index.close()


def test_all_calls_reach_the_master_of_sentinels(
    watched: tuple[list[RedisServer], list[RedisServer]],
) -> None:
    index = opened(sentinel_url(watched))
    everything(index)
    index.close()
    with pytest.raises(IndexUnavailableError, match="No Sentinel names a master"):
        opened(sentinel_url(watched).replace("/main", "/other"), timeout_s=3.0)


def test_one_sentinel_is_enough(watched: tuple[list[RedisServer], list[RedisServer]]) -> None:
    masters, watchers = watched
    url = f"redis+sentinel://cache@127.0.0.1:1,127.0.0.1:2,127.0.0.1:{watchers[0].port}/main"
    index = opened(url)
    index.publish(KV, records(chain("a", 3)), FOREVER_S)
    with masters[0].admin() as admin:
        assert admin.dbsize()
    index.close()
