"""HiCache's copies between device and host pools, as torch indexing ("device" is the CPU too).

Names and parameters are those of `sgl_kernel.kvcacheio`. The name says what is copied:

    transfer_kv_{per,all}_layer[_direct][_mla][_<from>_<to>]

    lf   layer first: one tensor a layer, [token, ...]; the device pools, and a host layout
    pf   page first: kernel I/O [token, layer, ...], direct I/O [page, layer, token, ...]
    ph   page head: [page, head, token, layer, dim]
    mla  one latent buffer instead of K and V
    *_layers with an all-layer kernel: an integer tensor of base addresses, rows of item_size bytes

Indices are token slots, one an element, source and destination of equal length; the direct forms
may rely on whole pages but do not need to here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _slots(indices: Tensor) -> Tensor:
    return indices.to(device="cpu", dtype=torch.int64)


def _rows_at(address: Any, rows: int, row_bytes: int) -> Tensor:
    """The memory at an address as a uint8 tensor [rows, row_bytes]."""
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(int(address))
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


def _as_bytes(rows: Tensor, leading: int) -> Tensor:
    """A contiguous tensor as uint8, all dimensions after the first `leading` made one."""
    return rows.view(torch.uint8).flatten(leading)


def _set(destination: Tensor, at: Tensor, rows: Tensor) -> None:
    destination[at] = rows.reshape(-1, *destination.shape[1:])


# ---- direct I/O: lists of tensors


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        _set(dst, target, src[source])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _set(dst, target, src[source // page_size, layer_id, source % page_size])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """`src_ptrs` holds the layers of K, then of V (MLA: of the one buffer)."""
    source, target = _slots(src_indices), _slots(dst_indices)
    page, offset = target // page_size, target % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        dst = dst_ptrs[i // layers]
        dst[page, i % layers, offset] = src[source].reshape(-1, *dst.shape[3:])


# ---- kernel I/O, host to device, one layer


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    _set(dst, _slots(dst_indices), src[_slots(src_indices)])


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **_: Any,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    _set(dst, _slots(dst_indices), src[_slots(src_indices), layer_id])


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    at = (src_indices, dst_indices, layer_id, item_size, src_layout_dim)
    transfer_kv_per_layer_mla_pf_lf(src_k, dst_k, *at)
    transfer_kv_per_layer_mla_pf_lf(src_v, dst_v, *at)


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    page, offset = source // page_size, source % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        _set(dst, target, src[page, :, offset, layer_id])


# ---- kernel I/O, device to host, all layers


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    if not len(source):
        return
    src_rows, dst_rows = int(source.max()) + 1, int(target.max()) + 1
    for layer in range(num_layers):
        rows = _rows_at(src_layers[layer], src_rows, item_size)[source]
        _rows_at(dst_layers[layer], dst_rows, item_size)[target] = rows


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    at = (src_indices, dst_indices, item_size, num_layers)
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, *at)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, *at)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    if not len(source):
        return
    src_rows, out = int(source.max()) + 1, _as_bytes(dst, 2)
    for layer in range(num_layers):
        out[target, layer] = _rows_at(src_layers[layer], src_rows, item_size)[source]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    at = (src_indices, dst_indices, item_size, dst_layout_dim, num_layers)
    transfer_kv_all_layer_mla_lf_pf(src_k_layers, dst_k, *at)
    transfer_kv_all_layer_mla_lf_pf(src_v_layers, dst_v, *at)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    source, target = _slots(src_indices), _slots(dst_indices)
    if not len(source):
        return
    page, offset = target // page_size, target % page_size
    src_rows, head_bytes = int(source.max()) + 1, item_size // head_num
    for src_layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        out = _as_bytes(dst, 4)  # [page, head, token, layer, head_bytes]
        for layer in range(num_layers):
            rows = _rows_at(src_layers[layer], src_rows, item_size)[source]
            out[page, :, offset, layer] = rows.view(-1, head_num, head_bytes)
