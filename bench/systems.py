"""The storage backends under test, each behind the calls that SGLang's cache controller makes.

SGLang moves pages in batches of 128. Backends with the zero-copy interface (dualpath, nixl) get
``batch_set_v1`` and ``batch_get_v1``; ``file`` has flat pages only, and the controller copies
them out of and into the host pool, which is therefore part of its time. LMCache's ``fs_native``
has no HiCache backend: its native client is driven here as SGLang drives nixl, two objects a page.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.measure import BenchError, sync_file_system
from bench.pages import Case, PagePool

BATCH = 128
"""Pages of one call, as in SGLang."""

_WAIT_S = 120


class System(Protocol):
    """One backend with one open store."""

    def set(self, keys: list[str], indices: Any) -> bool:
        """Store one batch; whether every page was taken."""
        ...

    def settle(self) -> None:
        """Make what was stored durable."""
        ...

    def get(self, keys: list[str], indices: Any) -> list[bool]:
        """Load one batch."""
        ...

    def exists(self, keys: list[str]) -> int:
        """Length of the leading run that is there."""
        ...

    def close(self) -> None:
        """Release everything but the files."""
        ...


Opener = Callable[[Path, PagePool], System]


def _config(extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench/model",
        extra_config=extra,
    )


class ZeroCopy:
    """A ``HiCacheStorage`` with the v1 interface.

    Args:
        directory: of its files; None when each set is durable by itself.
    """

    def __init__(self, storage: Any, pool: PagePool, directory: Path | None) -> None:
        self._storage = storage
        self._directory = directory
        storage.register_mem_pool_host(pool.host)
        storage.on_host_pools_registered()

    def set(self, keys: list[str], indices: Any) -> bool:
        return all(self._storage.batch_set_v1(keys, indices))

    def settle(self) -> None:
        if self._directory is not None:
            sync_file_system(self._directory)

    def get(self, keys: list[str], indices: Any) -> list[bool]:
        results: list[bool] = self._storage.batch_get_v1(keys, indices)
        return results

    def exists(self, keys: list[str]) -> int:
        found: int = self._storage.batch_exists(keys)
        return found

    def close(self) -> None:
        self._storage.close()


class FlatPages:
    """A ``HiCacheStorage`` without the v1 interface: whole pages as flat tensors."""

    def __init__(self, storage: Any, pool: PagePool, directory: Path) -> None:
        self._storage = storage
        self._host = pool.host
        self._page_tokens = pool.case.page_tokens
        self._directory = directory
        storage.register_mem_pool_host(pool.host)

    def set(self, keys: list[str], indices: Any) -> bool:
        pages = [self._host.get_data_page(i) for i in indices[:: self._page_tokens]]
        return bool(self._storage.batch_set(keys, pages))

    def settle(self) -> None:
        sync_file_system(self._directory)

    def get(self, keys: list[str], indices: Any) -> list[bool]:
        targets = [self._host.get_dummy_flat_data_page() for _ in keys]
        pages = self._storage.batch_get(keys, targets)
        for index, page in zip(indices[:: self._page_tokens], pages, strict=True):
            if page is not None:
                self._host.set_from_flat_data_page(index, page)
        return [page is not None for page in pages]

    def exists(self, keys: list[str]) -> int:
        found: int = self._storage.batch_exists(keys)
        return found

    def close(self) -> None:
        pass


class LMCacheNative:
    """LMCache's C++ file system client, O_DIRECT: a file for K and one for V of each page."""

    def __init__(self, client: Any, pool: PagePool, directory: Path) -> None:
        self._client = client
        self._host = pool.host
        self._directory = directory
        self._completion = select.poll()
        self._completion.register(client.event_fd(), select.POLLIN)

    def set(self, keys: list[str], indices: Any) -> bool:
        return all(self._run(self._client.submit_batch_set, keys, self._views(indices)))

    def settle(self) -> None:
        sync_file_system(self._directory)

    def get(self, keys: list[str], indices: Any) -> list[bool]:
        halves = self._run(self._client.submit_batch_get, keys, self._views(indices))
        return [k and v for k, v in zip(halves[::2], halves[1::2], strict=True)]

    def exists(self, keys: list[str]) -> int:
        halves = self._run(self._client.submit_batch_exists, keys)
        return (halves.index(False) if False in halves else len(halves)) // 2

    def close(self) -> None:
        self._client.close()

    def _views(self, indices: Any) -> list[memoryview]:
        pointers, sizes = self._host.get_page_buffer_meta(indices)
        return [
            memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes, strict=True)
        ]

    def _run(self, submit: Callable[..., int], keys: Sequence[str], *rest: Any) -> list[bool]:
        names = [f"bench@00000000@0@{key}_{half}" for key in keys for half in "kv"]
        future = submit(names, *rest)
        while True:
            if not self._completion.poll(1000 * _WAIT_S):
                raise BenchError("LMCache does not answer")
            for done, ok, error, results in self._client.drain_completions():
                if done == future:
                    if results is None and not ok:
                        raise BenchError(f"LMCache: {error}")
                    return list(results) if results is not None else [ok] * len(names)


def _dualpath(directory: Path, pool: PagePool) -> System:
    from dualpath_sglang.hicache import DualPathStorage

    extra = {
        "backend_name": "dualpath",
        "interface_v1": 1,
        "root": str(directory),
        "durability": "fdatasync",
        "model_id": "bench",
        "weights_revision": "bench",
    }
    return ZeroCopy(DualPathStorage(_config(extra), {}), pool, None)


def _file(directory: Path, pool: PagePool) -> System:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    _refuse("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
    return FlatPages(HiCacheFile(_config({}), str(directory)), pool, directory)


def _nixl(directory: Path, pool: PagePool) -> System:
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    _refuse("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR")
    extra = {
        "plugin": {"posix": {"use_uring": "true", "active": True}},
        "use_direct_io": True,
        "l3_cleaner_enabled": False,
    }
    return ZeroCopy(HiCacheNixl(_config(extra), str(directory)), pool, directory)


def _lmcache(directory: Path, pool: PagePool) -> System:
    module = importlib.import_module(_NEEDS["lmcache"])
    client = module.LMCacheFSClient(str(directory), num_workers=4, use_odirect=True)
    return LMCacheNative(client, pool, directory)


def _refuse(variable: str) -> None:
    if variable in os.environ:
        raise BenchError(f"{variable} is set and would put the files elsewhere")


OPENERS: dict[str, Opener] = {
    "dualpath": _dualpath,
    "file": _file,
    "nixl": _nixl,
    "lmcache": _lmcache,
}
"""Every backend by the name it has in the rows."""

_NEEDS = {"nixl": "nixl._api", "lmcache": "lmcache.lmcache_fs"}


def why_missing(name: str) -> str | None:
    """Why a backend cannot run here, or None when it can."""
    module = _NEEDS.get(name)
    if module is None:
        return None
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def chain(case: Case, turn: int, count: int) -> list[str]:
    """Page names of one chain, as SGLang makes them: 64 hex digits each."""
    import hashlib

    keys, parent = [], f"{case.name} {turn}".encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        keys.append(parent.hex())
    return keys
