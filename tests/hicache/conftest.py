"""Storage backends over temporary stores, with SGLang's own host pools in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def sglang_plugins() -> None:
    """SGLang with its plugins: the CPU helper's pools, and DualPath's hooks on the controller."""
    import sglang.srt.managers.cache_controller  # noqa: F401 -- before the plugins look for it
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def open_storage(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`open_storage(pool=None, extra=None, **config)`: a backend on this test's store.

    `config` are fields of HiCacheStorageConfig; `extra` are DualPath's settings.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from dualpath_sglang.hicache import DualPathStorage

    opened: list[Any] = []

    def open_one(pool: Any = None, extra: dict[str, Any] | None = None, **config: Any) -> Any:
        fields: dict[str, Any] = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1,
            "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": hasattr(pool, "kv_cache_dim"),
            "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "tiny",
        }  # fmt: skip
        settings = {
            "root": str(tmp_path / "store"), "capacity": "64MiB", "weights_revision": "w1",
            "interface_v1": 1, "prefetch_threshold": 16,
        }  # fmt: skip
        fields |= config
        fields["extra_config"] = settings | (extra or {})
        storage = DualPathStorage(HiCacheStorageConfig(**fields))
        opened.append(storage)
        if pool is not None:
            storage.register_mem_pool_host(pool)
            storage.on_host_pools_registered()
        return storage

    yield open_one
    for storage in opened:
        storage.close()
