"""The stand-in copies move exactly the named slots, between every pair of layouts."""

from __future__ import annotations

import pytest
import torch
from sgl_kernel import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu, kvcacheio

LAYERS, SLOTS, HEADS, DIM, PAGE = 3, 32, 2, 8, 4
ITEM_BYTES = HEADS * DIM * 4
DEVICE_SLOTS = torch.tensor([8, 9, 10, 11, 4, 5, 6, 7])
HOST_SLOTS = torch.tensor([20, 21, 22, 23, 0, 1, 2, 3])


def device_layers(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)]


def addresses(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def host_pool(layout: str) -> torch.Tensor:
    pages = SLOTS // PAGE
    shapes = {
        "layer_first": (LAYERS, SLOTS, HEADS, DIM),
        "page_first": (SLOTS, LAYERS, HEADS, DIM),
        "page_first_direct": (pages, LAYERS, PAGE, HEADS, DIM),
        "page_head": (pages, HEADS, PAGE, LAYERS, DIM),
    }
    return torch.zeros(shapes[layout])


def host_rows(pool: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """The host pool's rows of a layer, as [slot, head, dim]."""
    if layout == "layer_first":
        return pool[layer]
    if layout == "page_first":
        return pool[:, layer]
    if layout == "page_first_direct":
        return pool[:, layer].reshape(SLOTS, HEADS, DIM)
    return pool[:, :, :, layer].transpose(1, 2).reshape(SLOTS, HEADS, DIM)


def back_up(layout: str, io: str, k: list[torch.Tensor], v: list[torch.Tensor], mla: bool):
    """Device to host; returns the host pools of K and V (MLA: of K alone)."""
    pools = [host_pool(layout) for _ in range(1 if mla else 2)]
    at = {"src_indices": DEVICE_SLOTS, "dst_indices": HOST_SLOTS}
    if io == "direct":
        sources = k if mla else [*k, *v]
        if layout == "page_first_direct":
            kvcacheio.transfer_kv_all_layer_direct_lf_pf(sources, pools, **at, page_size=PAGE)
        else:
            targets = [layer for pool in pools for layer in pool]
            kvcacheio.transfer_kv_direct(sources, targets, **at, page_size=PAGE)
        return pools
    at |= {"item_size": ITEM_BYTES, "num_layers": LAYERS}
    if layout == "layer_first":
        tables = [addresses(list(pool)) for pool in pools]
        if mla:
            kvcacheio.transfer_kv_all_layer_mla(addresses(k), tables[0], **at)
        else:
            kvcacheio.transfer_kv_all_layer(addresses(k), tables[0], addresses(v), tables[1], **at)
        return pools
    at |= {"dst_layout_dim": ITEM_BYTES * LAYERS}
    if mla:
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(addresses(k), pools[0], **at)
    elif layout == "page_first":
        kvcacheio.transfer_kv_all_layer_lf_pf(addresses(k), pools[0], addresses(v), pools[1], **at)
    else:
        at |= {"page_size": PAGE, "head_num": HEADS}
        kvcacheio.transfer_kv_all_layer_lf_ph(addresses(k), pools[0], addresses(v), pools[1], **at)
    return pools


def load(layout: str, io: str, pools: list[torch.Tensor], layer: int, into: list[torch.Tensor]):
    """Host to device, one layer, K and V (MLA: one buffer)."""
    at = {"src_indices": HOST_SLOTS, "dst_indices": DEVICE_SLOTS}
    pairs = [tensor for pair in zip(pools, into, strict=True) for tensor in pair]
    mla = "_mla" if len(pools) == 1 else ""
    if io == "direct":
        if layout == "page_first_direct":
            kvcacheio.transfer_kv_per_layer_direct_pf_lf(
                pools, into, **at, layer_id=layer, page_size=PAGE
            )
        else:
            kvcacheio.transfer_kv_direct(
                [pool[layer] for pool in pools], into, **at, page_size=PAGE
            )
        return
    at |= {"item_size": ITEM_BYTES}
    if layout == "layer_first":
        pairs[::2] = [pool[layer] for pool in pools]
        getattr(kvcacheio, f"transfer_kv_per_layer{mla}")(*pairs, **at)
        return
    at |= {"layer_id": layer, "src_layout_dim": ITEM_BYTES * LAYERS}
    if layout == "page_first":
        getattr(kvcacheio, f"transfer_kv_per_layer{mla}_pf_lf")(*pairs, **at)
    else:
        kvcacheio.transfer_kv_per_layer_ph_lf(*pairs, **at, page_size=PAGE, head_num=HEADS)


FORMS = [
    ("direct", "layer_first", False),
    ("direct", "page_first_direct", False),
    ("kernel", "layer_first", False),
    ("kernel", "page_first", False),
    ("kernel", "page_head", False),
    ("direct", "layer_first", True),
    ("direct", "page_first_direct", True),
    ("kernel", "layer_first", True),
    ("kernel", "page_first", True),
]


@pytest.mark.parametrize(("io", "layout", "mla"), FORMS)
def test_a_backup_puts_each_device_slot_into_its_host_slot(io, layout, mla):
    k, v = device_layers(1), device_layers(2)
    pools = back_up(layout, io, k, v, mla)
    for pool, layers in zip(pools, (k, v), strict=False):
        for layer in range(LAYERS):
            rows = host_rows(pool, layout, layer)
            assert torch.equal(rows[HOST_SLOTS], layers[layer][DEVICE_SLOTS])
            untouched = torch.ones(SLOTS, dtype=torch.bool)
            untouched[HOST_SLOTS] = False
            assert not rows[untouched].any()


@pytest.mark.parametrize(("io", "layout", "mla"), FORMS)
def test_a_load_brings_back_what_was_backed_up_and_touches_no_other_slot(io, layout, mla):
    k, v = device_layers(1), device_layers(2)
    pools = back_up(layout, io, k, v, mla)
    for layer in range(LAYERS):
        into = [torch.zeros(SLOTS, HEADS, DIM) for _ in pools]
        load(layout, io, pools, layer, into)
        for target, layers in zip(into, (k, v), strict=False):
            expected = torch.zeros(SLOTS, HEADS, DIM)
            expected[DEVICE_SLOTS] = layers[layer][DEVICE_SLOTS]
            assert torch.equal(target, expected)


def test_kernels_accept_no_slots_at_all():
    empty, k = torch.empty(0, dtype=torch.int64), device_layers(1)
    pool = host_pool("page_first")
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(
        addresses(k), pool, empty, empty, ITEM_BYTES, ITEM_BYTES * LAYERS, LAYERS
    )
    assert not pool.any()


def test_token_slots_are_assigned_to_the_span_of_each_request():
    table = torch.zeros(4, 10, dtype=torch.int32)
    assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        table,
        torch.tensor([3, 0]),
        torch.tensor([5, 3]),
        torch.tensor([70, 71, 80, 81, 82]),
        table.shape[1],
    )
    assert table[2].tolist() == [0, 0, 0, 70, 71, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [80, 81, 82, 0, 0, 0, 0, 0, 0, 0]
    assert not table[[1, 3]].any()


def test_rows_move_as_if_all_were_read_first():
    buffer = torch.arange(12, dtype=torch.float32).view(4, 3)
    before = buffer.clone()
    copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr()], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * 4]),
        torch.tensor([1, 2]),
        torch.tensor([0, 1]),
    )
    assert torch.equal(buffer, before[[0, 0, 1, 3]])


def test_an_operator_without_stand_in_says_so_when_called():
    import sgl_kernel

    with pytest.raises(NotImplementedError, match="silu_and_mul"):
        sgl_kernel.silu_and_mul()
