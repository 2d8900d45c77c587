"""Nothing reaches SGLang as an exception, and nothing wrong as a hit."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from dualpath_sglang.config import ConfigError
from dualpath_storage import StoreError
from tests.hicache import pools
from tests.hicache.pools import keys

GARBAGE: list[Any] = [
    None,
    [],
    [None],
    [1, 2],
    ["x"],
    "not a list",
    keys(3),
    [keys(1)[0].replace("0", " ")],
    torch.zeros(3),
    {"a": 1},
    -1,
    object(),
]
INDICES: list[Any] = [
    None,
    [],
    torch.tensor([]),
    torch.arange(3),
    torch.arange(12) + 1,
    torch.arange(12) + 1_000_000,
    torch.arange(12) - 400,
    torch.arange(12).float(),
    "indices",
]


def calls(storage: Any, what: Any) -> list[tuple[Callable[[], Any], Any]]:
    """Every call with a piece of garbage, and the type that its answer must have."""
    found: list[tuple[Callable[[], Any], Any]] = [
        (lambda: storage.batch_exists(what), int),
        (lambda: storage.batch_exists_v2(what), PoolTransferResult),
        (lambda: storage.batch_exists_v2(keys(2), what), PoolTransferResult),
        (lambda: storage.batch_exists(keys(2), what), int),
        (lambda: storage.batch_get_v2(what), dict),
        (lambda: storage.batch_set_v2(what), dict),
        (lambda: storage.exists(what), bool),
        (lambda: storage.get(what), type(None)),
        (lambda: storage.get(keys(1)[0], what), type(None)),
        (lambda: storage.batch_get(what, what), list),
        (lambda: storage.set(what, what), bool),
        (lambda: storage.batch_set(what, what), bool),
        (lambda: storage.batch_set_v1(keys(3), pools.host_indices([0, 1, 2]), what), list),
        (lambda: storage.register_mem_host_pool_v2(what, "swa"), type(None)),
    ]
    for indices in INDICES:
        found.append((lambda i=indices: storage.batch_get_v1(what, i), list))
        found.append((lambda i=indices: storage.batch_set_v1(what, i), list))
        transfer = PoolTransfer(name=PoolName.KV, keys=what, host_indices=indices)
        found.append((lambda t=transfer: storage.batch_get_v2([t]), dict))
        found.append((lambda t=transfer: storage.batch_set_v2([t]), dict))
    return found


@pytest.mark.parametrize("what", GARBAGE, ids=lambda what: repr(what)[:24])
def test_garbage_is_answered_with_nothing(what: Any, open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    storage = open_storage(pool)
    for call, expected in calls(storage, what):
        assert isinstance(call(), expected)
    indices = pools.host_indices([0])
    name = keys(1, seed=5)
    assert storage.batch_set_v1(name, indices) == [True]
    assert storage.batch_get_v1(name, indices) == [True]


def test_a_kind_of_failure_is_logged_once(
    open_storage: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(pools.mha_pool("page_first_direct"))
    with caplog.at_level(logging.WARNING, logger="dualpath_sglang"):
        for _ in range(50):
            storage.batch_get_v1(keys(2), torch.arange(3))
    assert len([r for r in caplog.records if "batch_get_v1" in r.getMessage()]) == 1


def test_after_close_everything_misses(open_storage: Callable[..., Any]) -> None:
    storage = open_storage(pools.mha_pool("page_first_direct"))
    indices = pools.host_indices([0, 1])
    assert storage.batch_set_v1(keys(2), indices) == [True, True]
    storage.close()
    storage.close()
    assert storage.batch_exists(keys(2)) == 0
    assert storage.batch_get_v1(keys(2), indices) == [False, False]
    assert storage.batch_exists_v2(keys(2)).kv_hit_pages == 0
    storage.clear()
    assert storage.get_stats() is None


def test_a_store_removed_under_it_is_a_miss_and_not_a_failure(
    open_storage: Callable[..., Any], tmp_path: Path
) -> None:
    storage = open_storage(pools.mha_pool("page_first_direct"))
    indices = pools.host_indices([0, 1])
    assert storage.batch_set_v1(keys(2), indices) == [True, True]
    shutil.rmtree(tmp_path / "store")
    assert len(storage.batch_get_v1(keys(2), indices)) == 2
    assert len(storage.batch_set_v1(keys(2, seed=1), indices)) == 2
    assert storage.batch_exists(keys(2)) in range(3)


def test_a_constructor_that_fails_leaves_nothing_behind(
    open_storage: Callable[..., Any], tmp_path: Path
) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match='"capcity"'):
        open_storage(None, {"capcity": "1GiB"})
    with pytest.raises(StoreError, match="no weight files of tiny"):
        open_storage(None, {"weights_revision": None})
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match=r"cannot be used|not a directory"):
        open_storage(None, {"root": str(tmp_path / "file")})
    assert {thread.name for thread in threading.enumerate()} == before
    assert not (tmp_path / "store").exists()


def test_a_full_store_is_a_success(open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    pools.fill(pool, 1)
    storage = open_storage(pool, {"capacity": "64KiB", "segment_size": "16KiB"})
    for i in range(40):
        assert storage.batch_set_v1(keys(3, seed=i), pools.host_indices([0, 1, 2])) == [True] * 3
    assert sum(storage.batch_exists(keys(3, seed=i)) for i in range(40)) < 120
    assert storage.batch_exists(keys(3, seed=39)) > 0


def test_a_read_only_store_serves_hits_and_drops_writes(open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    pools.fill(pool, 1)
    indices = pools.host_indices([0, 1])
    open_storage(pool).batch_set_v1(keys(2), indices)
    reader = open_storage(pool, {"read_only": True})
    assert reader.batch_get_v1(keys(2), indices) == [True, True]
    assert reader.batch_set_v1(keys(2, seed=1), indices) == [True, True]
    assert reader.batch_exists(keys(2, seed=1)) == 0


def test_a_suspended_backend_restores_and_stores_nothing(open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    storage, indices = open_storage(pool), pools.host_indices([0, 1])
    storage.batch_set_v1(keys(2), indices)
    storage.suspend("for a test")
    assert storage.batch_exists(keys(2)) == 0
    assert storage.batch_get_v1(keys(2), indices) == [False, False]
    assert storage.batch_set_v1(keys(2, seed=1), indices) == [True, True]
    assert open_storage(pool).batch_exists(keys(2, seed=1)) == 0


def test_sizes_and_speeds_are_handed_over_once(open_storage: Callable[..., Any]) -> None:
    storage = open_storage(pools.mha_pool("page_first_direct"), enable_storage_metrics=True)
    indices = pools.host_indices([0, 1, 2])
    storage.batch_set_v1(keys(3), indices)
    storage.batch_get_v1(keys(2), indices[: 2 * pools.PAGE_TOKENS])
    storage.batch_get_v1(keys(3, seed=1), indices)
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert all(speed > 0 for speed in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().backup_pgs == []


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_three_threads_under_sglangs_failure_injector_never_get_a_wrong_byte(
    kind: str, tmp_path: Path
) -> None:
    """SGLang's own injector around the backend, made by SGLang's own factory."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    from dualpath_sglang.controller_hooks import LOADER

    make = {"mha": pools.mha_pool, "mla": pools.mla_pool}[kind]
    source, target = make("page_first_direct"), make("page_first")
    pools.fill(source, 1)
    settings = {"root": str(tmp_path / "store"), "capacity": "1MiB", "weights_revision": "w"}
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=kind == "mla", enable_storage_metrics=False, is_page_first_layout=False,
        model_name="tiny", extra_config={**settings, **LOADER},
    )  # fmt: skip
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.2),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.002),
    ):
        writer, reader = (
            StorageBackendFactory.create_backend("dynamic", config, pool)
            for pool in (source, target)
        )
    writer.register_mem_pool_host(source)
    reader.register_mem_pool_host(target)
    blocks = [pools.block_bytes(source, page) for page in range(pools.PAGES)]
    chains = [keys(pools.PAGES, seed=i) for i in range(30)]
    pages = list(range(pools.PAGES))
    wrong: list[str] = []
    hits = [0]

    def write() -> None:
        for names in chains:
            writer.batch_set_v1(names, pools.host_indices(pages), HiCacheStorageExtraInfo([]))

    def read() -> None:
        for names in chains * 2:
            found = reader.batch_exists(names)
            if not found:
                continue
            got = reader.batch_get_v1(names[:found], pools.host_indices(pages[:found]))
            for page, ok in enumerate(got):
                hits[0] += ok
                if ok and pools.block_bytes(target, page) != blocks[page]:
                    wrong.append(names[page])

    def look() -> None:
        for names in chains * 3:
            assert 0 <= reader.batch_exists(names) <= len(names)

    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, read, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read()
    writer.close()
    reader.close()
    assert (errors, wrong) == ([], [])
    assert hits[0] > 0
