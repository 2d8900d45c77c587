"""Device pools as Full Blocks: the same geometry and the same bytes as SGLang's host pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dualpath_sglang import device_pools, host_pools
from dualpath_sglang.device_pages import TensorPages
from dualpath_sglang.geometries import PoolFacts, pool_geometry
from dualpath_sglang.identity import Identity
from dualpath_sglang.shards import Rank
from dualpath_storage import StoreError
from dualpath_storage.memory import aligned
from tests.hicache import pools
from tests.hicache.conftest import sglang_plugins  # noqa: F401 -- an autouse fixture

PAGE = pools.PAGE_TOKENS


def described(pool: Any, *components: str, page_tokens: int = PAGE, **params: Any) -> Any:
    """As SGLang's loader would ask for it."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    fields = {
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: pool),
        "page_size": page_tokens,
        "mtp_draft_device_pools": (),
        "sidecar_draft_device_pools": (),
    }
    names = {ComponentType[name] for name in (components or ("FULL",))}
    return device_pools.describe(SimpleNamespace(**{**fields, **params}), names)


def facts_of_host(name: str, host: Any) -> PoolFacts:
    layout = host_pools.describe(host)
    assert layout is not None
    layers = host_pools.layer_range(host)
    return PoolFacts(name, layout.form, host_pools.is_head_sharded(host), layers)


def geometry(facts: PoolFacts) -> Any:
    identity = Identity("model", "weights")
    return pool_geometry(
        facts, identity=identity, rank=Rank(), namespace="default", page_tokens=PAGE
    )


def fill(tensors: list[torch.Tensor], seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        whole = tensor.view(torch.uint8)
        whole.copy_(torch.randint(0, 100, whole.shape, generator=source, dtype=torch.uint8))


def gathered(pool: Any, pages: list[int]) -> list[bytes]:
    source = TensorPages(pool.blocks, pool.page_rows)
    memory = aligned(len(pages) * source.block_bytes)
    source.gather(pages, memory, source.block_bytes)
    size = source.block_bytes
    return [bytes(memory[i * size : (i + 1) * size]) for i in range(len(pages))]


def test_an_mha_pool_is_what_its_host_pool_is() -> None:
    device = pools.mha_device()
    fill([*device.k_buffer, *device.v_buffer])
    group = described(device)
    (kv,) = group.pools
    assert (group.layers, group.replicated) == (pools.LAYERS, False)
    assert geometry(kv.facts) == geometry(facts_of_host("kv", pools.mha_pool("page_first_direct")))
    assert kv.gates == (0, 1, 2)
    rows = slice(2 * PAGE, 3 * PAGE)
    wanted = b"".join(
        buffer[rows].contiguous().view(torch.uint8).numpy().tobytes()
        for layer in range(pools.LAYERS)
        for buffer in (device.k_buffer[layer], device.v_buffer[layer])
    )
    assert gathered(kv, [2])[0] == wanted


def test_an_mla_pool_is_what_its_host_pool_is() -> None:
    device = pools.mla_device()
    group = described(device)
    (kv,) = group.pools
    assert group.replicated
    assert geometry(kv.facts) == geometry(facts_of_host("kv", pools.mla_pool("page_first_direct")))
    fill(device.kv_buffer)
    wanted = b"".join(
        buffer[PAGE : 2 * PAGE].contiguous().view(torch.uint8).numpy().tobytes()
        for buffer in device.kv_buffer
    )
    assert gathered(kv, [3, 1])[1] == wanted


def test_heads_of_two_sizes_keep_their_order() -> None:
    device = pools.mha_device(v_head_dim=pools.V_DIM)
    host = pools.host_of(device, "page_first_direct")
    (kv,) = described(device).pools
    assert geometry(kv.facts) == geometry(facts_of_host("kv", host))


def test_a_sparse_attention_model_has_an_indexer_beside_its_latent_pool() -> None:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    page_tokens = 64
    with get_parallel().override(attn_dcp_size=1):
        device = DSATokenToKVPool(
            size=2 * page_tokens, page_size=page_tokens, kv_lora_rank=pools.LATENT,
            layer_num=pools.LAYERS, dtype=torch.bfloat16, qk_rope_head_dim=pools.ROPE,
            device="cpu", index_head_dim=128, enable_memory_saver=False,
            kv_cache_dim=pools.LATENT + pools.ROPE,
        )  # fmt: skip
    group = described(device, page_tokens=page_tokens)
    kv, indexer = group.pools
    assert (kv.name, indexer.name, indexer.source) == ("kv", "indexer", "kv")
    host = facts_of_host("indexer", pools.indexer_pool("page_first_direct"))
    ours = indexer.facts.form
    assert (ours.dtype, ours.form) == (host.form.dtype, host.form.form)
    assert ours.layer_bytes == host.form.layer_bytes
    indices = torch.arange(page_tokens, 3 * page_tokens)
    assert kv.pages(indices, 2) == indexer.pages(indices, 2) == [1, 2]
    fill(device.index_k_with_scale_buffer)
    row = device.index_k_with_scale_buffer[0][2].contiguous().view(torch.uint8)
    assert gathered(indexer, [2])[0].startswith(row.numpy().tobytes())


def test_a_sliding_window_model_has_two_pools_of_layers() -> None:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    device = SWAKVPool(
        size=8 * PAGE, size_swa=4 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=2,
        head_dim=16, swa_attention_layer_ids=[0, 1, 3], full_attention_layer_ids=[2],
        device="cpu",
    )  # fmt: skip
    group = described(device, "FULL", "SWA")
    full, window = group.pools
    assert group.layers == 4
    assert (full.name, full.gates, full.source) == ("kv", (2,), "kv")
    assert (window.name, window.gates, window.source) == ("swa", (0, 1, 3), "swa")


def test_states_are_one_block_of_all_layers() -> None:
    host = facts_of_host("mamba", pools.mamba_pool("page_first"))
    slots = 4
    components = [
        [torch.zeros(slots, 2, 5) for _ in range(pools.LAYERS)],
        [torch.zeros(slots, 7, dtype=torch.bfloat16) for _ in range(pools.LAYERS)],
        [torch.zeros(slots, 3, dtype=torch.bfloat16) for _ in range(pools.LAYERS)],
    ]
    entry = SimpleNamespace(
        name="mamba", components=components, layer_mapping={1: 0, 3: 1, 4: 2}, page_size=1,
        _row_span=1, device_pool=object(), indices_from_pool="mamba",
        translate_indices=lambda indices: indices,
    )  # fmt: skip
    pool = device_pools._pool(entry, SimpleNamespace(start_layer=0, end_layer=5))
    assert pool.facts.form == host.form
    assert pool.gates == (1,)
    assert pool.facts.head_sharded
    assert pool.pages(torch.tensor([3]), 1) == [3]
    fill([tensor for component in components for tensor in component])
    wanted = b"".join(
        tensor[3].contiguous().view(torch.uint8).numpy().tobytes()
        for component in components
        for tensor in component
    )
    assert gathered(pool, [3])[0] == wanted


def test_a_draft_pool_follows_the_target_and_is_told_apart() -> None:
    group = described(pools.mha_device(), sidecar_draft_device_pools=(pools.mha_device(),))
    kv, draft = group.pools
    assert (draft.name, draft.source) == ("draft", "kv")
    assert geometry(draft.facts) != geometry(kv.facts)


@pytest.mark.parametrize(
    "indices",
    [
        torch.arange(1, PAGE + 1),
        torch.arange(PAGE - 1),
        torch.arange(100 * PAGE, 101 * PAGE),
        torch.arange(-PAGE, 0),
    ],
    ids=["not aligned", "not whole", "beyond the end", "before the start"],
)
def test_indices_that_are_no_pages_are_refused(indices: torch.Tensor) -> None:
    (kv,) = described(pools.mha_device()).pools
    with pytest.raises(ValueError, match="kv"):
        kv.pages(indices, 1)


def test_pools_that_cannot_be_streamed_into_say_what_to_do_instead() -> None:
    device = pools.mha_device()
    device.kv_cache_layout = "hnd"
    with pytest.raises(StoreError, match="Start SGLang with --enable-hierarchical-cache"):
        described(device)
