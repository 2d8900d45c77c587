"""Redis Cluster and Sentinel with nothing but TLS: to us, among the servers and the Sentinels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath_sglang.index import IndexUnavailableError
from tests.index.records import FOREVER_S, records
from tests.index.redis import test_failover
from tests.index.redis.test_failover import (
    USER,
    models,
    opened,
    survives_its_master,
    under_load,
)
from tests.index.redis.test_security import SECRET, at, but, certified, everything, files
from tests.support.blocks import chain
from tests.support.redis_server import RedisServer, cluster, sentinels, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ASK = "sentinel|get-master-addr-by-name"
WATCHERS_USERS = [
    f"user default on nopass ~* &* +@all -{ASK}",
    f"user cache on >{SECRET} -@all +{ASK}",
]
AUTH = {"sentinel_auth": "on"}
REFUSAL_S = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the certificates."""
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def options(folder: Path) -> list[str]:
    """Of every server, Sentinels included."""
    return certified(folder)


@pytest.fixture(scope="module")
def servers(options: list[str]) -> Iterator[list[RedisServer]]:
    with cluster(options=[USER, *options]) as servers:
        yield servers


@pytest.fixture
def watched(options: list[str]) -> Iterator[tuple[list[RedisServer], list[RedisServer]]]:
    """The Sentinels tell our user alone who is the master."""
    watching = [*WATCHERS_USERS, *options]
    with sentinels(options=[USER, *options], watching=watching) as watched:
        yield watched


def cluster_url(servers: list[RedisServer]) -> str:
    return test_failover.cluster_url(servers).replace("redis+", "rediss+")


def sentinel_url(watched: tuple[list[RedisServer], list[RedisServer]]) -> str:
    return test_failover.sentinel_url(watched).replace("redis+", "rediss+")


def users(server: RedisServer) -> set[str]:
    """Who is connected."""
    with server.admin(decode_responses=True) as admin:
        return {client["user"] for client in admin.client_list()}


def assert_strangers_are_refused(
    url: str, ours: dict[str, object], theirs: dict[str, object]
) -> None:
    """Each of them by the deadline; who has the right files is not.

    Args:
        ours: options of the address.
        theirs: files by another authority.
    """
    nobody = but(but(ours, "cert_file"), "key_file")
    for address in (
        at(url, ours | {"ca_file": theirs["ca_file"]}),
        at(url, ours | theirs | {"ca_file": ours["ca_file"]}),
        at(url, but(ours, "ca_file")),
        at(url, nobody),
        at(url, but(nobody, "ca_file")),
        at(url.replace("127.0.0.1", "localhost"), ours),
        at(url.replace("rediss+", "redis+"), but(nobody, "ca_file")),
    ):
        began = time.monotonic()
        with pytest.raises(IndexUnavailableError) as error:
            opened(address, timeout_s=REFUSAL_S)
        assert time.monotonic() - began < REFUSAL_S + 0.5, address
        assert SECRET not in str(error.value)
    opened(at(url, ours)).close()


def test_models_spread_over_a_cluster(servers: list[RedisServer], folder: Path) -> None:
    index = opened(at(cluster_url(servers[:1]), files(folder)))
    for model in models(12):
        index.publish(model, records(chain(model.model, 500)), FOREVER_S)
        assert index.prefix(model, chain(model.model, 500)) == 500
    index.check()
    for server in servers[:3]:
        assert "cache" in users(server)
        with server.admin(decode_responses=True) as admin:
            assert admin.dbsize(), "every master has some"
    everything(index)
    index.close()


def test_strangers_at_a_cluster_are_refused(
    servers: list[RedisServer], folder: Path, tmp_path: Path
) -> None:
    certified(tmp_path)
    assert_strangers_are_refused(cluster_url(servers), files(folder), files(tmp_path))


def test_a_master_of_a_cluster_dies_under_load(servers: list[RedisServer], folder: Path) -> None:
    index = opened(at(cluster_url(servers), files(folder)), lookup_timeout_s=0.5)
    load = under_load(index, models(12), servers[0].kill)
    assert not load.wrong
    assert load.longest_s < 0.5 + 0.5 + 0.5
    index.check()
    index.upkeep()
    with servers[3].admin(decode_responses=True) as admin:
        assert admin.role()[0] == "master"
    assert "cache" in users(servers[3])
    servers[0].start()
    with servers[0].admin(decode_responses=True) as admin:
        wait_for(lambda: admin.role()[0] == "slave", what="the old master's return")
    everything(index)
    index.close()


def test_all_calls_reach_the_master_of_sentinels(
    watched: tuple[list[RedisServer], list[RedisServer]], folder: Path, tmp_path: Path
) -> None:
    index = opened(at(sentinel_url(watched), files(folder) | AUTH))
    everything(index)
    assert ["cache" in users(server) for server in watched[0]] == [True, False]
    index.close()
    with pytest.raises(IndexUnavailableError, match="No Sentinel names a master"):
        opened(at(sentinel_url(watched), files(folder)), timeout_s=3.0)
    certified(tmp_path)
    assert_strangers_are_refused(sentinel_url(watched), files(folder) | AUTH, files(tmp_path))


@pytest.mark.parametrize("hangs", [False, True])
def test_the_master_of_sentinels_fails_under_load(
    watched: tuple[list[RedisServer], list[RedisServer]], folder: Path, hangs: bool
) -> None:
    masters = watched[0]
    index = opened(at(sentinel_url(watched), files(folder) | AUTH), lookup_timeout_s=0.5)
    survives_its_master(index, masters, hangs)
