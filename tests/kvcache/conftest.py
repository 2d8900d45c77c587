"""Caches of their own roots, and children to share them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry
from tests.kvcache.caches import open_cache
from tests.support.blocks import geometry
from tests.support.zygote import Zygote, zygote


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., KVCache]]:
    """`opened(**options)`: a cache on this test's root, closed after the test."""
    caches: list[KVCache] = []

    def make(at: Path = root, **changes: object) -> KVCache:
        caches.append(open_cache(at, **changes))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture(autouse=True)
def _sound_at_a_glance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the child process that walks an index before it is opened: 0.3 s each time."""
    if "next_run" not in request.node.name:
        monkeypatch.setattr("dualpath_sglang.index.recovery.sound", lambda *_: True)


@pytest.fixture(params=["mha", "mla"])
def of(request: pytest.FixtureRequest) -> Geometry:
    """A geometry of many layers with K and V pieces, then one of latent pages."""
    return geometry(request.param)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks processes that call functions of tests/kvcache/processes.py."""
    with zygote("tests.kvcache.processes", tmp_path_factory.mktemp("children")) as parent:
        yield parent
