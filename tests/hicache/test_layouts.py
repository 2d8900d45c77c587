from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dualpath_sglang import host_pools
from dualpath_sglang.host_layout import DirectLayout, ExtentLayout, FlatLayout, StagedLayout
from dualpath_sglang.host_pages import KV
from dualpath_storage import StoreError
from tests.hicache import pools
from tests.hicache.pools import keys

PoolMaker = Callable[..., Any]

KINDS: dict[str, tuple[PoolMaker, tuple[str, ...]]] = {
    "mha": (pools.mha_pool, ("page_first_direct", "layer_first", "page_first", "page_head")),
    "mla": (pools.mla_pool, ("page_first_direct", "layer_first", "page_first")),
    "asymmetric": (
        lambda layout: pools.mha_pool(layout, v_head_dim=pools.V_DIM),
        ("page_first_direct", "page_first"),
    ),
}
CASES = [(kind, layout) for kind, (_, layouts) in KINDS.items() for layout in layouts]
PAIRS = [
    (kind, written, read)
    for kind, (_, layouts) in KINDS.items()
    for written in layouts
    for read in layouts
]
WRITTEN = [5, 0, 7]
READ = [1, 8, 3]


def make(kind: str, layout: str, seed: int = 1) -> Any:
    pool = KINDS[kind][0](layout)
    pools.fill(pool, seed)
    return pool


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_block_is_layer_by_layer_k_before_v_whatever_the_layout(kind: str, layout: str) -> None:
    pool = make(kind, layout)
    described = host_pools.describe(pool)
    assert described is not None
    with described.window(WRITTEN, fill=True) as window:
        blocks = [b"".join(bytes(piece) for piece in pieces) for pieces in window.pieces]
    assert blocks == [pools.block_bytes(pool, page) for page in WRITTEN]
    assert all(len(pieces) % pool.layer_num == 0 for pieces in window.pieces)


@pytest.mark.parametrize(("kind", "written", "read"), PAIRS)
def test_what_is_written_under_one_layout_is_read_under_another(
    kind: str, written: str, read: str, open_storage: Callable[..., Any]
) -> None:
    source, target = make(kind, written), make(kind, read, seed=2)
    names = keys(3)
    assert open_storage(source).batch_set_v1(names, pools.host_indices(WRITTEN)) == [True] * 3
    storage = open_storage(target)
    assert storage.batch_exists(names) == 3
    untouched = {p: pools.block_bytes(target, p) for p in range(pools.PAGES) if p not in READ}
    assert storage.batch_get_v1(names, pools.host_indices(READ)) == [True] * 3
    for there, here in zip(WRITTEN, READ, strict=True):
        assert pools.block_bytes(target, here) == pools.block_bytes(source, there)
    assert all(pools.block_bytes(target, page) == was for page, was in untouched.items())


@pytest.mark.parametrize(
    ("kind", "layout", "expected"),
    [
        ("mha", "page_first_direct", DirectLayout),
        ("mha", "layer_first", DirectLayout),
        ("mha", "page_first", StagedLayout),
        ("mha", "page_head", StagedLayout),
        ("mla", "page_first_direct", DirectLayout),
        ("mla", "layer_first", DirectLayout),
        ("mla", "page_first", StagedLayout),
        ("asymmetric", "page_first_direct", DirectLayout),
    ],
)
def test_pages_are_copied_only_where_their_layers_are_interleaved(
    kind: str, layout: str, expected: type
) -> None:
    pool = make(kind, layout)
    described = host_pools.describe(pool)
    assert isinstance(described, expected)
    with described.window([4], fill=False) as window:
        for piece in window.pieces[0]:
            piece[:] = bytes(len(piece))
    zeroed = not any(pools.block_bytes(pool, 4))
    assert zeroed == (expected is DirectLayout)  # a staged page arrives when it is committed
    window.commit([True])
    assert not any(pools.block_bytes(pool, 4))


def test_a_page_that_failed_leaves_its_staged_destination_alone() -> None:
    pool = make("mha", "page_first")
    described = host_pools.describe(pool)
    assert described is not None
    before = pools.block_bytes(pool, 4)
    with described.window([4, 5], fill=False) as window:
        for pieces in window.pieces:
            for piece in pieces:
                piece[:] = bytes(len(piece))
        window.commit([False, True])
    assert pools.block_bytes(pool, 4) == before
    assert not any(pools.block_bytes(pool, 5))


def test_a_staged_batch_larger_than_the_staging_memory_goes_through_it_in_turns(
    monkeypatch: pytest.MonkeyPatch, open_storage: Callable[..., Any]
) -> None:
    monkeypatch.setattr("dualpath_sglang.host_layout.STAGING_BYTES", 2 * 4096)
    source, target = make("mha", "page_first"), make("mha", "page_first", seed=2)
    names, pages = keys(7), list(range(7))
    storage = open_storage(source)
    assert storage._pages.get(KV).layout.window_pages == 2
    assert storage.batch_set_v1(names, pools.host_indices(pages)) == [True] * 7
    assert open_storage(target).batch_get_v1(names, pools.host_indices(pages)) == [True] * 7
    assert [pools.block_bytes(target, p) for p in pages] == [
        pools.block_bytes(source, p) for p in pages
    ]


class UnknownPoolHost:
    """Stands for a pool class that DualPath has never heard of: extents, and flat pages."""

    dtype = torch.uint8
    layout = "spiral"
    page_size = 1
    start_layer, end_layer, layer_num = 0, 1, 1

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.size = 6
        self.kv_buffer = torch.randint(0, 256, (6, 48), dtype=torch.uint8, generator=source)
        self.other = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=source)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers = [b[i].data_ptr() for i in indices.tolist() for b in (self.kv_buffer, self.other)]
        return pointers, [48, 16] * len(indices)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([self.kv_buffer[index], self.other[index]])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(64, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[index], self.other[index] = page[:48], page[48:]


@pytest.mark.parametrize(("interface_v1", "expected"), [(1, ExtentLayout), (0, FlatLayout)])
def test_a_pool_of_unknown_order_is_stored_as_it_is(
    interface_v1: int, expected: type, open_storage: Callable[..., Any]
) -> None:
    source, target = UnknownPoolHost(1), UnknownPoolHost(2)
    names, extra = keys(2), {"interface_v1": interface_v1}
    writer, reader = open_storage(source, extra), open_storage(target, extra)
    assert isinstance(writer._pages.get(KV).layout, expected)
    assert writer.batch_set_v1(names, torch.tensor([3, 4])) == [True] * 2
    assert reader.batch_get_v1(names, torch.tensor([0, 5])) == [True] * 2
    assert torch.equal(target.kv_buffer[0], source.kv_buffer[3])
    assert torch.equal(target.other[5], source.other[4])


def test_pages_of_unknown_order_are_not_shared_across_layouts(
    open_storage: Callable[..., Any],
) -> None:
    names = keys(1)
    assert open_storage(UnknownPoolHost(1)).batch_set_v1(names, torch.tensor([0])) == [True]
    other = UnknownPoolHost(2)
    other.layout = "zigzag"
    assert open_storage(UnknownPoolHost(2)).batch_exists(names) == 1
    assert open_storage(other).batch_exists(names) == 0


def test_a_subclass_of_a_known_pool_is_not_taken_for_it() -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    class Richer(MHATokenToKVPoolHost):  # type: ignore[misc]
        """May keep scales, or anything, beside K and V."""

    described = host_pools.describe(pools.mha_pool("page_first_direct", cls=Richer))
    assert isinstance(described, ExtentLayout)
    assert "Richer" in described.form.form


def test_a_pool_that_cannot_be_addressed_is_refused_with_a_sentence(
    open_storage: Callable[..., Any],
) -> None:
    class Sealed(UnknownPoolHost):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            raise NotImplementedError

        def get_dummy_flat_data_page(self) -> Any:
            raise NotImplementedError("no pages here")

    with pytest.raises(StoreError, match=r"cannot address the pages of the host pool Sealed"):
        open_storage(Sealed(1))


def test_each_decode_context_rank_stores_its_part_of_a_page(
    open_storage: Callable[..., Any],
) -> None:
    names, logical = keys(2), 8
    for rank in (0, 1):
        pool = pools.mla_pool("page_first_direct", page_tokens=logical, dcp=(rank, 2))
        pools.fill(pool, rank)
        ranks = {"tp_rank": rank, "tp_size": 2, "dcp_rank": rank, "dcp_size": 2}
        storage = open_storage(pool, logical_page_size=logical, **ranks)
        assert storage.batch_exists(names) == 0  # the other rank's part is no hit
        assert storage.batch_set_v1(names, pools.host_indices([2, 0], logical)) == [True] * 2
        before = [pools.block_bytes(pool, page) for page in (2, 0)]
        pools.fill(pool, 7)
        assert storage.batch_get_v1(names, pools.host_indices([1, 2], logical)) == [True] * 2
        assert [pools.block_bytes(pool, page) for page in (1, 2)] == before


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first", "page_first"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_flat_pages_and_pages_in_place_are_the_same_blocks(
    kind: str, layout: str, open_storage: Callable[..., Any]
) -> None:
    pool = make(kind, layout)
    storage = open_storage(pool, {"interface_v1": 0})
    names, indices = keys(4), pools.host_indices([1, 2, 3, 4])
    flat = [pool.get_data_page(i * pools.PAGE_TOKENS) for i in (1, 2)]
    assert storage.batch_set(names[:2], flat)
    assert storage.batch_set_v1(names[2:], indices[2 * pools.PAGE_TOKENS :]) == [True] * 2
    blocks = [pools.block_bytes(pool, page) for page in (1, 2, 3, 4)]

    got = storage.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    pools.fill(pool, 9)
    for i, page in enumerate(got):
        assert page is not None
        pool.set_from_flat_data_page((i + 5) * pools.PAGE_TOKENS, page)
    assert [pools.block_bytes(pool, page) for page in (5, 6, 7, 8)] == blocks
    assert storage.batch_get_v1(names, indices) == [True] * 4
    assert [pools.block_bytes(pool, page) for page in (1, 2, 3, 4)] == blocks
    assert storage.get(keys(1, seed=9)[0]) is None
    assert storage.exists(names[0]) and not storage.exists("something else")
