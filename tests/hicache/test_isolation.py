"""Nothing is shared by accident: whatever changes the bytes of a page separates its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hicache import pools
from tests.hicache.pools import keys

NAMES = keys(2)


def write(storage: Any, step: int = pools.PAGE_TOKENS) -> None:
    assert storage.batch_set_v1(NAMES, pools.host_indices([0, 1], step)) == [True, True]
    assert storage.batch_exists(NAMES) == 2


OTHERS: dict[str, dict[str, Any]] = {
    "tensor-parallel rank": {"tp_rank": 1, "tp_size": 2},
    "tensor-parallel size": {"tp_rank": 0, "tp_size": 4},
    "pipeline stage": {"tp_size": 2, "pp_rank": 1, "pp_size": 2},
    "context-parallel rank": {"tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2},
    "weights": {"tp_size": 2, "extra": {"weights_revision": "w2"}},
    "model": {"tp_size": 2, "extra": {"model_id": "other"}},
    "namespace": {"tp_size": 2, "extra": {"namespace": "tenant-b"}},
}


@pytest.mark.parametrize("what", OTHERS)
def test_pages_are_not_shared_across(what: str, open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    pools.fill(pool, 1)
    write(open_storage(pool, tp_rank=0, tp_size=2))
    other = open_storage(pools.mha_pool("page_first_direct"), **OTHERS[what])
    assert other.batch_exists(NAMES) == 0
    assert other.batch_get_v1(NAMES, pools.host_indices([0, 1])) == [False, False]
    assert open_storage(pool, tp_rank=0, tp_size=2).batch_exists(NAMES) == 2


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("dtype", {"dtype": torch.bfloat16}),
        ("dtype of the same size", {"dtype": torch.int32}),
        ("page size", {"page_size": 8}),
        ("layers", {"layer_num": 2}),
        ("head dim", {"v_head_dim": pools.V_DIM}),
    ],
)
def test_pools_of_another_form_do_not_share(
    what: str, change: dict[str, Any], open_storage: Callable[..., Any]
) -> None:
    write(open_storage(pools.mha_pool("page_first_direct")))
    assert open_storage(pools.mha_pool("page_first_direct", **change)).batch_exists(NAMES) == 0


def test_data_parallel_replicas_share(open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    write(open_storage(pool, dp_rank=0))
    assert open_storage(pool, dp_rank=1).batch_exists(NAMES) == 2


def test_replicated_kv_is_written_by_one_rank_and_read_by_all(
    open_storage: Callable[..., Any],
) -> None:
    source, target = pools.mla_pool("page_first_direct"), pools.mla_pool("layer_first")
    pools.fill(source, 1)
    indices = pools.host_indices([0, 1])
    other = open_storage(target, tp_rank=1, tp_size=2)
    assert other.batch_set_v1(NAMES, indices) == [True, True]  # left to the writer
    assert other.batch_exists(NAMES) == 0
    write(open_storage(source, tp_rank=0, tp_size=2))
    assert other.batch_exists(NAMES) == 2
    assert other.batch_get_v1(NAMES, indices) == [True, True]
    assert pools.block_bytes(target, 1) == pools.block_bytes(source, 1)


def test_clear_removes_its_own_namespace_only(open_storage: Callable[..., Any]) -> None:
    pool = pools.mha_pool("page_first_direct")
    ours, theirs = open_storage(pool), open_storage(pool, {"namespace": "tenant-b"})
    write(ours)
    write(theirs)
    ours.clear()
    assert (ours.batch_exists(NAMES), theirs.batch_exists(NAMES)) == (0, 2)
    write(ours)


def test_a_store_is_named_by_content_not_by_path(
    open_storage: Callable[..., Any], model: Callable[..., Path], tmp_path: Path
) -> None:
    home = model("qwen3", seed=0)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in home.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    pool = pools.mha_pool("page_first_direct")
    by_content = {"weights_revision": None}
    write(open_storage(pool, by_content, model_name=str(home)))
    assert open_storage(pool, by_content, model_name=str(moved)).batch_exists(NAMES) == 2
    retrained = open_storage(pool, by_content, model_name=str(model("qwen3", seed=1)))
    assert retrained.batch_exists(NAMES) == 0
