"""SGLang's own cache controller, in this process, with the plugin's hooks on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hicache import pools
from tests.support.server import free_port

TOKENS, PAGE_TOKENS = 256, pools.PAGE_TOKENS


@pytest.fixture(scope="module")
def published(model: Callable[..., Path]) -> Iterator[None]:
    """SGLang's runtime, as a scheduler process has it."""
    from sglang.srt.runtime_context import (
        get_parallel,
        publish,
        reset_context,
        restore_context,
        snapshot_context,
    )
    from sglang.srt.server_args import ServerArgs

    before = snapshot_context()
    reset_context()
    args = ServerArgs(
        model_path=str(model("qwen3")), device="cpu", attention_backend="torch_native",
        page_size=PAGE_TOKENS, enable_hierarchical_cache=True, hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
    )  # fmt: skip
    args.resolve_once()
    publish(args, role="scheduler")
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        yield
    torch.distributed.destroy_process_group()
    restore_context(before)


class Stack:
    """A controller over a device pool and its host pool, with one more pool if it is wanted."""

    def __init__(
        self, *, hybrid: bool = True, side: tuple[str, Any] | None = None, mla: bool = False
    ) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
            HybridCacheController,
        )
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

        page_tokens = 2 * PAGE_TOKENS if mla else PAGE_TOKENS
        if mla:
            self.device: Any = pools.mla_device(page_tokens)
            self.host = pools.mla_pool("page_first_direct", page_tokens=page_tokens, dcp=(1, 2))
        else:
            self.device = pools.mha_device(pages=TOKENS // PAGE_TOKENS)
            pages = 2 * TOKENS // PAGE_TOKENS
            self.host = pools.host_of(self.device, "page_first_direct", pages=pages)
        self.slots = PagedTokenToKVPoolAllocator(
            self.device.size, page_tokens, torch.float32, "cpu", self.device, need_sort=False
        )
        self.pools: Any = self.host
        self.hybrid = hybrid
        if hybrid:
            entries = [PoolEntry(PoolName.KV, self.host, self.device, lambda i: i, True)]
            if side is not None:
                entries.append(PoolEntry(PoolName(side[0]), side[1], self.device, lambda i: i))
            self.pools = HostPoolGroup(entries)
        self.controller: Any = (HybridCacheController if hybrid else HiCacheController)(
            self.slots, self.pools, page_tokens, torch.distributed.group.WORLD, threading.Event(),
            write_policy="write_through", io_backend="direct", model_name="tiny",
        )  # fmt: skip

    def attach(self, root: Path, **extra: Any) -> None:
        arguments = {"host_pools": self.pools.entries} if self.hybrid else {}
        self.controller.attach_storage_backend(
            storage_backend="dualpath",
            prefetch_threshold=PAGE_TOKENS,
            model_name="tiny",
            storage_backend_extra_config={"root": str(root), "capacity": "64MiB", **extra},
            **arguments,
        )


@pytest.fixture
def stack(published: None) -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(*args: Any, **kwargs: Any) -> Stack:
        made.append(Stack(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.controller.detach_storage_backend()


@pytest.mark.parametrize("hybrid", [False, True], ids=["plain", "hybrid"])
def test_the_name_goes_through_sglangs_loader_and_stays_the_name(
    hybrid: bool, stack: Callable[..., Stack], tmp_path: Path
) -> None:
    from dualpath_sglang.hicache import DualPathStorage

    one = stack(hybrid=hybrid)
    one.attach(tmp_path)
    controller = one.controller
    assert isinstance(controller.storage_backend, DualPathStorage)
    assert controller.storage_backend_type == "dualpath"
    assert controller.page_get_func == controller._page_get_zero_copy
    assert controller.page_set_func == controller._page_set_zero_copy


def test_positional_arguments_are_understood(stack: Callable[..., Stack], tmp_path: Path) -> None:
    one = stack(hybrid=False)
    settings = {"root": str(tmp_path), "capacity": "64MiB"}
    one.controller.attach_storage_backend("dualpath", 16, "tiny", settings)
    assert one.controller.storage_backend_type == "dualpath"
    assert settings == {"root": str(tmp_path), "capacity": "64MiB"}


def test_another_backend_is_attached_as_if_dualpath_were_not_there(
    stack: Callable[..., Stack], tmp_path: Path
) -> None:
    one = stack(hybrid=False)
    settings = {"file_storage_path": str(tmp_path)}
    one.controller.attach_storage_backend("file", 16, "tiny", settings)
    assert type(one.controller.storage_backend).__name__ == "HiCacheFile"
    assert one.controller.storage_backend_type == "file"
    assert one.controller.page_get_func == one.controller._generic_page_get


def test_attach_and_detach_twice(stack: Callable[..., Stack], tmp_path: Path) -> None:
    one = stack()
    before = {thread.name for thread in threading.enumerate() if "dualpath" in thread.name}
    for _ in range(2):
        one.attach(tmp_path)
        assert one.controller.enable_storage
        one.controller.detach_storage_backend()
        assert one.controller.storage_backend is None
        after = {thread.name for thread in threading.enumerate() if "dualpath" in thread.name}
        assert after == before


@pytest.mark.parametrize("hybrid", [False, True], ids=["plain", "hybrid"])
def test_a_malformed_setting_fails_the_attach_and_leaves_it_possible(
    hybrid: bool, stack: Callable[..., Stack], tmp_path: Path
) -> None:
    one = stack(hybrid=hybrid)
    with pytest.raises(ValueError, match=r'"capacty".*did you mean "capacity"'):
        one.attach(tmp_path, capacty="1GiB")
    assert not one.controller.enable_storage
    one.attach(tmp_path)
    assert one.controller.enable_storage


def test_a_refused_side_pool_leaves_no_half_attach(
    stack: Callable[..., Stack], tmp_path: Path
) -> None:
    class PageInterleaveHostPool:
        """Only its name matters to DualPath; the rest is for the group."""

        can_use_write_back_jit = False
        page_size = PAGE_TOKENS

    one = stack(side=("swa", PageInterleaveHostPool()))
    with pytest.raises(Exception, match="striped over ranks"):
        one.attach(tmp_path)
    assert not one.controller.enable_storage
    assert one.controller.storage_backend is None


def test_a_decode_context_passes_sglangs_check_with_its_shard_named(
    stack: Callable[..., Stack], tmp_path: Path
) -> None:
    from sglang.srt.runtime_context import get_parallel

    one = stack(hybrid=False, mla=True)
    sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "dcp_size": 2, "attn_dcp_size": 2}
    with get_parallel().override(**sizes, tp_rank=1, attn_dcp_rank=1):
        one.attach(tmp_path)
    assert one.controller.storage_backend_type == "dualpath"
    assert one.controller.page_get_func == one.controller._page_get_zero_copy
    geometry = one.controller.storage_backend._pages.get("kv").pool.geometry
    assert (geometry.shard, geometry.page_tokens) == ("dcp1/2", 8)


def test_pages_go_from_the_device_to_storage_and_back(
    stack: Callable[..., Stack], tmp_path: Path
) -> None:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    one = stack(hybrid=False)
    one.attach(tmp_path)
    controller, count = one.controller, 8 * PAGE_TOKENS
    tokens = list(range(count))
    slots = one.slots.alloc(count)
    layers = (*one.device.k_buffer, *one.device.v_buffer)
    for buffer in layers:
        buffer[slots] = torch.randn(count, pools.HEADS, pools.DIM)
    expected = [buffer[slots].clone() for buffer in layers]

    written = controller.write(slots, node_id=1)
    names = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    controller.write_storage(written, tokens, hash_value=names, prefix_keys=[])
    assert controller.ack_backup_queue.get(timeout=30).completed_tokens == count
    one.host.free(written)
    one.host.kv_buffer.zero_()
    one.slots.free(slots)
    for buffer in layers:
        buffer.zero_()

    controller.prefetch("request", tokens)
    found = controller.prefetch_hit_queue.get(timeout=30)
    assert found.storage_hit_count == count
    found.host_indices = one.host.alloc(count)
    controller.prefetch_buffer.put(found)
    while not controller.ack_prefetch_queue.get(timeout=30).completed_req:
        pass
    loaded = controller.load(found.host_indices, node_id=2)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    got = [one.device.get_key_buffer(i)[loaded] for i in range(pools.LAYERS)]
    got += [one.device.get_value_buffer(i)[loaded] for i in range(pools.LAYERS)]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_replaced_weights_suspend_storage_until_they_have_a_name(
    stack: Callable[..., Stack], tmp_path: Path
) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    one = stack()
    one.attach(tmp_path)
    storage = one.controller.storage_backend
    indices = pools.host_indices([0])
    assert storage.batch_set_v1(pools.keys(1), indices) == [True]
    tree = SimpleNamespace(cache_controller=one.controller)
    updater = SimpleNamespace(
        scheduler=SimpleNamespace(tree_cache=tree), flush_cache=lambda **_: True
    )
    request = SimpleNamespace(flush_cache=False, torch_empty_cache=False)
    SchedulerWeightUpdaterManager.flush_cache_after_weight_update(updater, request, True, "done")
    assert storage.batch_exists(pools.keys(1)) == 0

    one.controller.detach_storage_backend()
    with pytest.raises(ValueError, match="weights_revision set to a text that names them"):
        one.attach(tmp_path)
    one.attach(tmp_path, weights_revision="step-100")
    assert one.controller.storage_backend.batch_exists(pools.keys(1)) == 0


def test_a_rank_backs_up_its_heads_of_a_draft(stack: Callable[..., Stack], tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    one = stack(side=("draft", pools.mha_pool("page_first_direct")))
    one.attach(tmp_path)
    config = one.controller.storage_config
    config.is_mla_model, config.tp_rank, config.tp_size = True, 1, 2
    storage = one.controller.storage_backend
    storage._pages._rank = type(storage._pages._rank).of(config)
    draft, kv = PoolTransfer(PoolName.DRAFT), PoolTransfer(PoolName.KV)
    assert one.controller.should_backup(draft)
    assert not one.controller.should_backup(kv)


def test_the_tree_is_told_to_hand_over_prefix_keys() -> None:
    from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

    for backend, expected in (("dualpath", True), ("file", False)):
        cache = SimpleNamespace(enable_storage=True, page_size=16)
        StorageAttachment(cache).apply_runtime_config(
            storage_backend=backend,
            prefetch_threshold=16,
            prefetch_timeout_base=1.0,
            prefetch_timeout_per_ki_token=0.1,
            hicache_storage_pass_prefix_keys=False,
            enable_storage=True,
            enable_storage_metrics=False,
            extra_metric_labels=None,
        )
        assert cache.hicache_storage_pass_prefix_keys is expected
