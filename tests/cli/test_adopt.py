"""``dualpath adopt``: a node that lives is left alone, one that is gone leaves its blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.cli import adopt as command
from dualpath_sglang.index.owners import Owner
from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from tests.kvcache.caches import STORED, killed, options, read, rescan, write
from tests.support.blocks import chain, geometry
from tests.support.redis_server import RedisServer

OF = geometry("mha")
KEYS = chain("a", 12)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def node(server: RedisServer, root: Path) -> Iterator[Callable[..., KVCache]]:
    """`node(host, start)`: a cache on another machine."""
    caches: list[KVCache] = []

    def make(host: str, start: str = "abcd") -> KVCache:
        source = RedisSource(RedisSettings.parse(server.url), lookup_timeout_s=5.0)
        source.owner = Owner(f"{host} {start}".encode().ljust(16), f"{host}:77:{start}")
        caches.append(KVCache(options(root), index=source))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture
def dualpath(
    server: RedisServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dualpath_sglang.cli", "adopt", *arguments, "-r", str(root)],
            env={**os.environ, "DUALPATH_INDEX": server.url, "DUALPATH_INDEX_TIMEOUT_S": "5"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    return run


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def gone(server: RedisServer) -> None:
    """Let time pass since any owner was heard of."""
    with server.admin() as admin:
        long_ago = int(1000 * (time.time() - command.ALIVE_S - 5))
        for alive in admin.keys("dualpath:*:alive"):
            for owner in admin.hkeys(alive):
                admin.hset(alive, owner, long_ago.to_bytes(8, "big"))


def test_owners_are_listed(node: Callable[..., KVCache], dualpath: Run) -> None:
    a, b = node("one"), node("two")
    for cache, name in ((a, "a"), (b, "b")):
        assert write(cache.attach(OF), cache, chain(name, 3)) == [STORED] * 3
    b.close()
    shown = dualpath()
    assert shown.returncode == 0, shown.stderr
    assert "one:77" in shown.stdout
    assert "nobody" in shown.stdout
    rows = json.loads(dualpath("--json").stdout)["owners"]
    assert [row["node"] for row in rows] == ["", "one:77:abcd"]
    assert [row["segments"] for row in rows] == [1, 1]
    assert rows[0]["silent_s"] is None
    assert 0 <= rows[1]["silent_s"] < 30


def test_a_node_that_lives_is_left_alone(node: Callable[..., KVCache], dualpath: Run) -> None:
    a = node("one")
    write(a.attach(OF), a, KEYS)
    for how in ((), ("--free", "--yes")):
        refused = dualpath("one:77", *how)
        assert refused.returncode == 2
        assert "it lives" in refused.stderr
    unknown = dualpath("two")
    assert unknown.returncode == 2
    assert "there are: one:77:abcd" in unknown.stderr
    assert read(a.attach(OF), a, KEYS) == [True] * 12


def test_a_node_that_is_gone_leaves_its_blocks(
    node: Callable[..., KVCache], dualpath: Run, server: RedisServer
) -> None:
    a, b = node("one"), node("two")
    pool = a.attach(OF)
    write(pool, a, KEYS)
    whole = chain("whole", 3)
    assert write(pool, a, whole) == [STORED] * 3
    a.index.remove(
        OF,
        [
            (key, e.placement.generation)
            for e in a.index.entries(OF)
            for key in whole
            if e.key == key
        ],
        5.0,
    )
    a.index.forget_freed(a.index.freed(OF, pool.store.slots.owned()), 5.0)
    killed(a)
    assert b.attach(OF).store.slots.owned() == []
    gone(server)
    done = dualpath("one", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["adopted"], found["locked"], found["published_blocks"]) == (1, 0, 3)
    pool = b.attach(OF)
    assert len(pool.store.slots.owned()) == 1
    assert read(pool, b, [*KEYS, *whole]) == [True] * 15


def test_its_blocks_can_be_removed_with_it(
    node: Callable[..., KVCache], dualpath: Run, server: RedisServer, root: Path
) -> None:
    a, b = node("one"), node("two")
    write(a.attach(OF), a, KEYS)
    write(b.attach(OF), b, chain("b", 3))
    killed(a)
    gone(server)
    refused = dualpath("one:77:abcd", "--free")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert len(list(root.glob("*/seg-*"))) == 2
    b.maintain()
    done = dualpath("one:77:abcd", "--free", "--yes")
    assert done.returncode == 0, done.stderr
    assert "1 removed; 0 blocks published, 12 removed" in done.stdout
    assert len(list(root.glob("*/seg-*"))) == 1
    assert rescan(b, OF) == set(chain("b", 3))
    assert b.prefix(b.attach(OF), KEYS) == 0
    assert read(b.attach(OF), b, chain("b", 3)) == [True] * 3


def test_files_that_stay_locked_are_said_to_be(
    node: Callable[..., KVCache], dualpath: Run, server: RedisServer, root: Path
) -> None:
    """As by a mount that has not yet noticed that the machine is gone."""
    a = node("one")
    a._upkeep.stop()
    write(a.attach(OF), a, KEYS)
    gone(server)
    done = dualpath("one")
    assert done.returncode == 0, done.stderr
    assert "1 segment still locked" in done.stdout
    assert read(a.attach(OF), a, KEYS) == [True] * 12
    rows = json.loads(dualpath("--json").stdout)["owners"]
    assert [row["node"] for row in rows] == [""]


def test_a_store_of_one_machine_needs_none(root: Path) -> None:
    with KVCache(options(root)):
        pass
    shown = subprocess.run(
        [sys.executable, "-m", "dualpath_sglang.cli", "adopt", "-r", str(root)],
        env={k: v for k, v in os.environ.items() if not k.startswith("DUALPATH_")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 2
    assert "locks say which writer lives" in shown.stderr


def test_no_name_is_nobodys_name(node: Callable[..., KVCache], dualpath: Run, root: Path) -> None:
    a = node("one")
    write(a.attach(OF), a, KEYS)
    a.close()
    for arguments in (("", "--free", "--yes"), ("--free", "--yes"), ("one:", "--free", "--yes")):
        assert dualpath(*arguments).returncode == 2, arguments
    assert len(list(root.glob("*/seg-*"))) == 1


def test_of_two_that_bear_one_name_the_dead_one_is_meant(
    node: Callable[..., KVCache], dualpath: Run, server: RedisServer
) -> None:
    """As in containers, where every server is process 1."""
    dead, other = node("one"), node("two")
    write(dead.attach(OF), dead, KEYS)
    write(other.attach(OF), other, chain("b", 3))
    killed(dead)
    gone(server)
    living = node("one", "ef01")
    write(living.attach(OF), living, chain("living", 3))
    done = dualpath("one:77", "--json")
    assert done.returncode == 0, done.stderr
    assert [owner.name for owner in other.index.ownership.owners(5.0).values()].count("") == 1
    assert read(other.attach(OF), other, [*KEYS, *chain("living", 3)]) == [True] * 15


def test_what_others_took_meanwhile_is_theirs(
    node: Callable[..., KVCache],
    server: RedisServer,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look and the deed another server may adopt, or the node wake up."""
    a, b = node("one"), node("two")
    write(a.attach(OF), a, KEYS)
    killed(a)
    gone(server)
    chosen = command._chosen

    def slow(name: str, owners: Any) -> list[str]:
        found = chosen(name, owners)
        assert b.index.ownership.inherit("one:77:abcd", 30.0, 5.0)
        assert len(b.attach(OF).store.slots.owned()) == 1
        write(b.attach(OF), b, chain("b", 12))
        return found

    monkeypatch.setattr(command, "_chosen", slow)
    monkeypatch.setenv("DUALPATH_INDEX", server.url)
    monkeypatch.setenv("DUALPATH_INDEX_TIMEOUT_S", "5")
    command.adopt("one", free=True, yes=True, root=root)
    assert len(list(root.glob("*/seg-*"))) == 2
    assert read(b.attach(OF), b, [*KEYS, *chain("b", 12)]) == [True] * 24
