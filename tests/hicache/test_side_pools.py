"""Pools beside KV: stored under the page's key, reported with the page as one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from dualpath_sglang import host_pools
from tests.hicache import pools
from tests.hicache.pools import keys

ROW_POOLS: dict[str, Callable[[str], Any]] = {
    "indexer": pools.indexer_pool,
    "deepseek_v4_c4": pools.paged_pool,
}
PAGE_FIRST = ["page_first", "page_first_direct"]


def buffers(pool: Any) -> list[torch.Tensor]:
    found = pool.get_hybrid_pool_buffer()
    return [buffer for buffer in found if buffer.numel()]


def fill(pool: Any, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=source))


def page_bytes(pool: Any, page: int) -> bytes:
    step = host_pools.indices_per_page(pool)
    return bytes(pool.get_data_page(page * step).contiguous().view(torch.uint8).numpy().tobytes())


def transfer(name: str, names: list[str], pool: Any, pages: list[int], **fields: Any) -> Any:
    step = host_pools.indices_per_page(pool)
    indices = pools.host_indices(pages, step)
    return PoolTransfer(name=PoolName(name), keys=names, host_indices=indices, **fields)


@pytest.mark.parametrize("read", ["layer_first", *PAGE_FIRST])
@pytest.mark.parametrize("written", ["layer_first", *PAGE_FIRST])
@pytest.mark.parametrize("name", ROW_POOLS)
def test_rows_written_under_one_layout_are_read_under_another(
    name: str, written: str, read: str, open_storage: Callable[..., Any]
) -> None:
    source, target = ROW_POOLS[name](written), ROW_POOLS[name](read)
    fill(source, 1)
    names = keys(2)
    for pool, pages, call in ((source, [5, 0], "batch_set_v2"), (target, [1, 8], "batch_get_v2")):
        storage = open_storage(pools.mla_pool("layer_first"))
        storage.register_mem_host_pool_v2(pool, PoolName(name))
        answer = getattr(storage, call)([transfer(name, names, pool, pages)])
        assert answer == {name: [True, True]}
    assert [page_bytes(target, p) for p in (1, 8)] == [page_bytes(source, p) for p in (5, 0)]


@pytest.mark.parametrize("side", [False, True], ids=["plain", "with side states"])
@pytest.mark.parametrize("layout", PAGE_FIRST)
def test_states_go_round(layout: str, side: bool, open_storage: Callable[..., Any]) -> None:
    source, target = (pools.mamba_pool(layout, side=side) for _ in range(2))
    fill(source, 1)
    names = keys(2)
    for pool, pages, call in ((source, [5, 0], "batch_set_v2"), (target, [1, 8], "batch_get_v2")):
        storage = open_storage(pools.mha_pool("page_first_direct"))
        storage.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        answer = getattr(storage, call)([transfer("mamba", names, pool, pages)])
        assert answer == {"mamba": [True, True]}
    assert [page_bytes(target, p) for p in (1, 8)] == [page_bytes(source, p) for p in (5, 0)]


@pytest.fixture
def stocked(open_storage: Callable[..., Any]) -> Callable[..., Any]:
    """`stocked(kv, rows)`: KV of pages 0..kv, and rows of the given pages, of eight keys."""

    def stock(kv: int, rows: list[int]) -> Any:
        anchor, side = pools.mha_pool("page_first_direct"), pools.paged_pool("page_first_direct")
        storage = open_storage(anchor)
        storage.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
        names = keys(8)
        assert all(storage.batch_set_v1(names[:kv], pools.host_indices(list(range(kv)))))
        stored = [transfer("deepseek_v4_c4", [names[i] for i in rows], side, rows)]
        assert all(storage.batch_set_v2(stored)["deepseek_v4_c4"])
        return storage

    return stock


def asked(policy: PoolHitPolicy, trailing: int = 1, **fields: Any) -> list[PoolTransfer]:
    names = keys(8)[:trailing] if policy is PoolHitPolicy.TRAILING_PAGES else None
    name = PoolName.DEEPSEEK_V4_C4
    return [PoolTransfer(name=name, keys=names, hit_policy=policy, **fields)]


@pytest.mark.parametrize(
    ("kv", "rows", "usable", "hits"),
    [
        (6, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], {"kv": 6, "deepseek_v4_c4": 6}),
        (6, [0, 1, 2, 4, 5], [1, 2, 3], {"kv": 6, "deepseek_v4_c4": 3}),
        (3, [0, 1, 2, 3, 4], [1, 2, 3], {"kv": 3, "deepseek_v4_c4": 3}),
        (6, [1, 2], [], {"kv": 6}),
        (0, [0, 1], [], {}),
    ],
)
def test_a_page_is_present_only_with_all_its_pools(
    kv: int, rows: list[int], usable: list[int], hits: dict[str, int], stocked: Callable[..., Any]
) -> None:
    result = stocked(kv, rows).batch_exists_v2(keys(8), asked(PoolHitPolicy.ALL_PAGES))
    assert result.kv_hit_pages == (usable[-1] if usable else 0)
    assert result.restorable_prefix_pages == usable
    assert {str(k): v for k, v in result.extra_pool_hit_pages.items()} == hits


@pytest.mark.parametrize(
    ("trailing", "rows", "usable"),
    [
        (1, [1, 3], [2, 4]),  # a state at the end of two nodes
        (2, [0, 1, 2, 4, 5], [1, 2, 3, 6]),  # a window that a short prefix fills alone
        (3, [3, 4], []),
        (1, [], []),
    ],
)
def test_a_trailing_pool_leaves_holes_between_the_usable_prefixes(
    trailing: int, rows: list[int], usable: list[int], stocked: Callable[..., Any]
) -> None:
    transfers = asked(PoolHitPolicy.TRAILING_PAGES, trailing)
    result = stocked(6, rows).batch_exists_v2(keys(8), transfers)
    assert result.restorable_prefix_pages == usable
    assert result.kv_hit_pages == (usable[-1] if usable else 0)
    assert result.extra_pool_hit_pages.get("deepseek_v4_c4", 0) == (usable[-1] if usable else 0)


@pytest.mark.parametrize(
    ("rows", "covered"),
    [([1, 3, 5], 6), ([1, 5], 2), ([3, 5], 0)],
)
def test_groups_of_blocks_report_and_never_gate(
    rows: list[int], covered: int, stocked: Callable[..., Any]
) -> None:
    transfers = asked(PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1)
    result = stocked(6, rows).batch_exists_v2(keys(6), transfers)
    assert result.kv_hit_pages == 6
    assert result.extra_pool_hit_pages["deepseek_v4_c4"] == covered


def test_a_side_pool_that_lost_its_page_shortens_the_hit(stocked: Callable[..., Any]) -> None:
    storage = stocked(4, [0, 1, 2, 3])
    wanted = asked(PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(keys(8), wanted).kv_hit_pages == 4
    geometry = storage._pages.get("deepseek_v4_c4").pool.geometry
    lost = bytes.fromhex(keys(8)[2])
    (place,) = storage._cache.index.lookup(geometry, [lost])
    storage._cache.index.remove(geometry, [(lost, place.generation)], 1.0)
    result = storage.batch_exists_v2(keys(8), wanted)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages["kv"]) == (2, 4)


def test_a_pool_that_was_never_registered_is_never_present(stocked: Callable[..., Any]) -> None:
    result = stocked(4, [0]).batch_exists_v2(keys(8), [PoolTransfer(PoolName.SWA)])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])


def test_an_anchor_without_bytes_leaves_the_verdict_to_its_side_pools(
    open_storage: Callable[..., Any],
) -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    side = pools.paged_pool("page_first_direct")
    fill(side, 1)
    storage = open_storage(LogicalHostPool(36, pools.PAGE_TOKENS))
    storage.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    names, pages = keys(3), [0, 1, 2]
    assert storage.batch_exists(names) == 0
    assert storage.batch_exists_v2(names).kv_hit_pages == 0
    assert storage.batch_exists_v2(names, asked(PoolHitPolicy.ALL_PAGES)).kv_hit_pages == 0
    assert storage.batch_set_v1(names, pools.host_indices(pages)) == [True] * 3
    rows = transfer("deepseek_v4_c4", names[:2], side, pages[:2])
    assert storage.batch_set_v2([rows]) == {"deepseek_v4_c4": [True, True]}
    assert storage.batch_exists_v2(names, asked(PoolHitPolicy.ALL_PAGES)).kv_hit_pages == 2
    assert storage.batch_get_v1(names, pools.host_indices(pages)) == [True] * 3


def test_a_rank_that_keeps_no_copy_of_replicated_pages_defers_to_the_one_that_does(
    open_storage: Callable[..., Any],
) -> None:
    pool = pools.mla_pool("page_first_direct")
    pool._is_dummy = True
    storage = open_storage(pool, tp_rank=1, tp_size=2)
    assert storage.batch_exists(keys(3)) == 3
    assert storage.batch_get_v1(keys(3), pools.host_indices([0, 1, 2])) == [True] * 3


def test_heads_of_a_draft_are_sharded_although_the_model_is_replicated(
    open_storage: Callable[..., Any],
) -> None:
    names = keys(2)
    for rank in (0, 1):
        draft = pools.mha_pool("page_first_direct")
        pools.fill(draft, rank)
        storage = open_storage(pools.mla_pool("page_first_direct"), tp_rank=rank, tp_size=2)
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        assert storage.must_back_up(PoolName.DRAFT)
        assert not storage.must_back_up(PoolName.KV)
        assert (
            storage.batch_set_v2([transfer("draft", names, draft, [0, 1])])["draft"] == [True] * 2
        )
        before = pools.block_bytes(draft, 1)
        pools.fill(draft, 9)
        assert (
            storage.batch_get_v2([transfer("draft", names, draft, [0, 1])])["draft"] == [True] * 2
        )
        assert pools.block_bytes(draft, 1) == before


def test_a_side_pool_that_cannot_be_stored_fails_the_attach(
    open_storage: Callable[..., Any],
) -> None:
    from dualpath_storage import StoreError

    class PageInterleaveHostPool:
        """Only its name matters."""

        page_size = 4

    storage = open_storage(pools.mha_pool("page_first_direct"))
    storage.register_mem_host_pool_v2(PageInterleaveHostPool(), PoolName.SWA)
    with pytest.raises(StoreError, match="striped over ranks"):
        storage.on_host_pools_registered()
    nothing = PoolTransfer(name=PoolName.SWA, keys=keys(2), host_indices=pools.host_indices([0, 1]))
    assert storage.batch_set_v2([nothing]) == {"swa": [False, False]}
    assert storage.batch_get_v2([nothing]) == {"swa": [False, False]}


def test_the_parent_of_a_batch_is_the_last_key_before_it(
    open_storage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.mha_pool("page_first_direct")
    storage = open_storage(pool)
    parents = []
    write = storage._cache.write

    def spy(*args: Any, parent: bytes | None = None, **kwargs: Any) -> Any:
        parents.append(parent)
        return write(*args, parent=parent, **kwargs)

    monkeypatch.setattr(storage._cache, "write", spy)
    names = keys(4)
    storage.batch_set_v1(names[:2], pools.host_indices([0, 1]), HiCacheStorageExtraInfo([]))
    storage.batch_set_v1(names[2:], pools.host_indices([2, 3]), HiCacheStorageExtraInfo(names[:2]))
    assert parents == [None, bytes.fromhex(names[1])]
