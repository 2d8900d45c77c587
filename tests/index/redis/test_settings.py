"""Addresses of the index, right and wrong ones, and the name of a store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.index.redis import IndexAddressError, RedisSettings, store_id

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", RedisSettings("single", (("cache", 6379),))),
        ("redis://cache:7000/3", RedisSettings("single", (("cache", 7000),), db=3)),
        ("redis://[::1]:7000", RedisSettings("single", (("::1", 7000),))),
        ("redis://me@cache", RedisSettings("single", (("cache", 6379),), username="me")),
        (
            "redis://me:p%40ss@cache",
            RedisSettings("single", (("cache", 6379),), username="me", password="p@ss"),
        ),
        ("redis://:pw@cache", RedisSettings("single", (("cache", 6379),), password="pw")),
        ("rediss://cache", RedisSettings("single", (("cache", 6379),), tls=True)),
        (
            "redis+sentinel://a,b:26380/main/2",
            RedisSettings("sentinel", (("a", 26379), ("b", 26380)), service="main", db=2),
        ),
        (
            "rediss+sentinel://a/main?sentinel_auth=on",
            RedisSettings(
                "sentinel", (("a", 26379),), service="main", tls=True, sentinel_auth=True
            ),
        ),
        (
            "redis+cluster://a:7000,b:7001",
            RedisSettings("cluster", (("a", 7000), ("b", 7001))),
        ),
    ],
)
def test_an_address_is_taken_apart(url: str, expected: RedisSettings) -> None:
    assert RedisSettings.parse(url) == expected


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("embedded", "must be"),
        ("http://cache", "must be"),
        ("redis+single://cache", "must be"),
        ("redis+ring://cache", "must be"),
        ("redis://[::1", "must be"),
        ("redis://", "no usable host"),
        ("redis://cache:0", "no usable host"),
        ("redis://cache:70000", "no usable host"),
        ("redis://ca che", "no usable host"),
        ("redis://a,b", "several Redis servers"),
        ("redis://cache/first", "no database 'first'"),
        ("redis://cache/-1", "no database"),
        ("redis+cluster://a/1", "only database 0"),
        ("redis+sentinel://a", "name the service"),
        ("redis+sentinel://a/bad name", "name the service"),
        ("redis://cache?timeout=3", "no option 'timeout'"),
        ("redis://cache?ca_file=/etc/passwd", "only with rediss"),
        ("rediss://cache?ca_file=/nowhere/ca.pem", "not a file"),
        ("rediss://cache?key_file=/etc/passwd", "no cert_file"),
        ("redis://cache?sentinel_auth=maybe", "sentinel_auth"),
        ("redis://cache#1", "#"),
    ],
)
def test_a_wrong_address_is_refused_with_a_sentence(url: str, complaint: str) -> None:
    with pytest.raises(IndexAddressError) as error:
        RedisSettings.parse(url.replace("://", f"://me:{SECRET}@"))
    assert complaint in str(error.value)
    assert SECRET not in str(error.value)
    assert str(error.value).endswith(".")


def test_a_password_comes_from_a_file_or_is_given(tmp_path: Path) -> None:
    given = "from the settings"
    assert RedisSettings.parse("redis://me@a", password=given).password == given
    assert RedisSettings.parse("redis://:u@a", password=given).password == given
    file = tmp_path / "password"
    file.write_text("from a file\nand nothing else\n")
    assert RedisSettings.parse("redis://a", file, given).password == "from a file"
    for text in ("", "\n"):
        file.write_text(text)
        with pytest.raises(IndexAddressError, match="is empty"):
            RedisSettings.parse("redis://a", file, given)
    with pytest.raises(IndexAddressError, match="cannot be read"):
        RedisSettings.parse("redis://a", tmp_path / "none", given)


def test_nothing_secret_is_shown() -> None:
    settings = RedisSettings.parse(f"redis://me:{SECRET}@a:1")
    assert settings.password == SECRET
    assert SECRET not in repr(settings) + str(settings)
    assert str(settings) == "a:1"


def test_a_store_has_one_name_whoever_asks_first(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(store_id(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 8
    assert set(names) == {store_id(tmp_path, create=False)}
    assert [path.name for path in tmp_path.iterdir()] == ["store-id"]


@pytest.mark.parametrize(
    "content", ["", "../../etc", "0123456789abcde", "0123456789ABCDEF", "x" * 16]
)
def test_what_is_no_name_is_not_taken_for_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "store-id").write_text(content)
    with pytest.raises(IndexUnavailableError, match="name of a store"):
        store_id(tmp_path)


def test_a_reader_makes_no_name(tmp_path: Path) -> None:
    with pytest.raises(IndexUnavailableError):
        store_id(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []
