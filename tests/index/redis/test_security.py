"""Users with the least rights, encryption, and secrets that stay secret."""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

import pytest
import redis

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.redis import LEAST_RIGHTS, RedisSettings, open_redis_index
from dualpath_sglang.index.redis.index import RedisIndex
from tests.index.records import FOREVER_S, INDEXER, KV, OTHER, records
from tests.support.blocks import chain, key
from tests.support.certificates import authority, certificate
from tests.support.redis_server import RedisServer, tls_options

SECRET = "hunter2-very-secret"
ONE = {g.id_bytes: 1 for g in (KV, INDEXER, OTHER)}
STORE = "0123456789abcdef"


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    """A server with one user, who may do the least."""
    with RedisServer(["user default off", f"user cache on >{SECRET} {LEAST_RIGHTS}"]) as server:
        yield server


def everything(index: RedisIndex) -> None:
    """Every call there is."""
    keys = chain("a", 20)
    index.publish(KV, records(keys), FOREVER_S)
    index.publish(KV, records(chain("b", 3), parent=key("absent"), slot=100), FOREVER_S)
    index.publish(INDEXER, records(keys, segment=2), FOREVER_S)
    index.publish(OTHER, records(keys), FOREVER_S)
    index.publish(KV, records([key("absent")], slot=200), FOREVER_S)
    assert index.prefix(KV, keys) == 20
    assert None not in index.lookup(KV, keys)
    assert index.present(KV.unit, keys[0])
    index.touch(KV.unit, keys, FOREVER_S)
    freed = index.remove(KV, [(keys[0], 1)], FOREVER_S)
    assert index.freed(KV, [1]) == freed
    index.publish(KV, records(keys[:1]), FOREVER_S)
    assert index.freed(KV, [1]) == []
    keep = (KV.unit, keys[-1])
    assert index.evict(ONE, 1, FOREVER_S, keep=keep, prefer={(KV.id_bytes, 1)})
    index.forget_freed(index.freed(KV, [1]), FOREVER_S)
    assert index.evict_segment(INDEXER.id_bytes, 2, FOREVER_S)
    assert index.wanted(INDEXER) == [2]
    index.forget_segments(INDEXER.id_bytes, [2], FOREVER_S)
    assert index.counts()[OTHER.id_bytes] == len(list(index.entries(OTHER)))
    assert index.segment_uses()
    assert index.chain_segments(OTHER.unit, keys[3])
    index.drop_segments(OTHER, [1], FOREVER_S)
    index.clear(KV, FOREVER_S)
    assert index.ownership.keep(KV.id_bytes, [1, 2], FOREVER_S) == [True, True]
    assert index.ownership.take(KV.id_bytes, [1], FOREVER_S) == [True]
    index.ownership.give_up(KV.id_bytes, [1], FOREVER_S)
    assert len(index.ownership.owners(FOREVER_S)) == 2
    index.forget_segments(KV.id_bytes, [1, 2], FOREVER_S)
    assert index.ownership.inherit("nobody", 0.0, FOREVER_S) == []
    index.set_filled()
    assert index.filled()
    index.upkeep()
    state = index.cluster
    assert state.claim(KV, keys, "one", 60.0) == [True] * 20
    state.release(KV, keys, "one")
    state.report("here", {}, 0.001)
    state.report("there", {}, 60.0)
    assert state.nodes()
    assert state.secret(b"one") == state.secret(b"another") == index.secret() == b"one"
    assert state.lease("janitor", "one", 60.0)
    state.end_lease("janitor", "one")
    index.start_over()


def test_the_least_rights_are_enough(guarded: RedisServer) -> None:
    url = guarded.url.replace("://", "://cache@")
    settings = RedisSettings.parse(url, password=SECRET)
    for _ in range(2):
        index = open_redis_index(settings, STORE, lookup_timeout_s=FOREVER_S)
        everything(index)
        index.close()


def test_the_nodes_share_the_secret_of_the_first(
    index: RedisIndex, server: RedisServer, open_at: Callable[..., RedisIndex]
) -> None:
    assert index.secret() == b"", "who only looks makes none"
    assert index.secret(b"first") == b"first"
    other = open_at(server.url)
    assert other.secret() == other.secret(b"mine") == b"first"
    assert open_at(server.url, secrets.token_hex(8)).secret(b"elsewhere") == b"elsewhere"
    with server.admin() as admin:
        admin.flushall()
    assert other.secret() == b""
    assert other.secret(b"first") == b"first", "who knows it brings it back"
    assert index.secret(b"too late") == b"first"


def test_the_least_rights_are_no_more(guarded: RedisServer) -> None:
    with guarded.admin(username="cache", password=SECRET) as client:
        client.set("dualpath:x", 1)
        for command in (
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("SET", "other", "1"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
            ("SUBSCRIBE", "x"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


ELSEWHERE = ("resetchannels", "-@all", "+role", "+cluster|slots")


@pytest.mark.parametrize("word", [w for w in LEAST_RIGHTS.split() if w not in ELSEWHERE])
def test_every_right_is_needed(word: str) -> None:
    """But for those that Sentinel and Cluster take."""
    rights = LEAST_RIGHTS.replace(f"{word} ", "")
    assert rights != LEAST_RIGHTS
    with RedisServer(["user default off", f"user cache on >{SECRET} {rights}"]) as server:
        settings = RedisSettings.parse(server.url.replace("://", "://cache@"), password=SECRET)
        with pytest.raises(IndexUnavailableError, match="does not permit this user") as error:
            everything(open_redis_index(settings, STORE, lookup_timeout_s=FOREVER_S))
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("user", "password", "complaint"),
    [
        ("cache", "wrong-" + SECRET, "refuses the user name or password"),
        ("nobody", SECRET, "refuses the user name or password"),
        ("", "", "asks for a password"),
    ],
)
def test_who_is_not_let_in_is_told_so_and_tells_nothing(
    guarded: RedisServer,
    caplog: pytest.LogCaptureFixture,
    user: str,
    password: str,
    complaint: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = guarded.url.replace("://", f"://{user}@") if user else guarded.url
    settings = RedisSettings.parse(url, password=password)
    with pytest.raises(IndexUnavailableError, match=complaint) as error:
        open_redis_index(settings, STORE)
    shown = "".join(traceback.format_exception(error.value)) + caplog.text
    assert SECRET not in shown


def certified(folder: Path) -> list[str]:
    """Options of a server that has its certificates, and those of a client, in a folder."""
    ca = authority(folder)
    certificate(ca, "client", "127.0.0.1")
    return tls_options(ca, *certificate(ca, "server", "127.0.0.1"))


def files(folder: Path) -> dict[str, object]:
    """Options of the address for that client."""
    names = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
    return {option: folder / name for option, name in names.items()}


def but(options: Mapping[str, object], name: str) -> dict[str, object]:
    """All options but one."""
    return {option: value for option, value in options.items() if option != name}


def at(url: str, options: Mapping[str, object]) -> str:
    """The address with its options."""
    return f"{url}?{urlencode(options)}"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Path]]:
    """A server that wants to know who calls, and the folder of the certificates."""
    folder = tmp_path_factory.mktemp("tls")
    with RedisServer(certified(folder)) as server:
        yield server, folder


def test_all_calls_go_over_tls(
    encrypted: tuple[RedisServer, Path], open_at: Callable[..., RedisIndex]
) -> None:
    server, folder = encrypted
    index = open_at(at(server.url, files(folder)))
    everything(index)


def test_only_the_authority_that_is_named_counts(
    encrypted: tuple[RedisServer, Path],
    open_at: Callable[..., RedisIndex],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of the system too."""
    server, folder = encrypted
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
    ours = files(folder)
    open_at(at(server.url, but(ours, "ca_file")))
    with pytest.raises(IndexUnavailableError):
        open_at(at(server.url, ours | {"ca_file": authority(tmp_path)}), timeout_s=2.0)


def test_an_impostor_is_not_spoken_to(
    encrypted: tuple[RedisServer, Path], open_at: Callable[..., RedisIndex], tmp_path: Path
) -> None:
    server, folder = encrypted
    ours = files(folder)
    for url in (
        at(server.url, ours | {"ca_file": authority(tmp_path)}),
        at(server.url, but(ours, "ca_file")),
        at(server.url.replace("127.0.0.1", "localhost"), ours),
        at(server.url, {"ca_file": ours["ca_file"]}),
        server.url.replace("rediss", "redis"),
    ):
        with pytest.raises(IndexUnavailableError):
            open_at(url, timeout_s=2.0)
