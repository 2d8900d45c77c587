"""A store, and a process that has it open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache, WriteResult
from dualpath_storage import StoreOptions
from tests.cli.stores import ALL, PAGES, write


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("DUALPATH_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with twelve pages: two pools of one model, another model, another tenant."""
    root = tmp_path / "store"
    with KVCache(StoreOptions(root, capacity_bytes=64 << 20)) as cache:
        for geometry in ALL:
            assert write(cache, geometry, range(PAGES)) == [WriteResult.STORED] * PAGES
    return root


@pytest.fixture
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store open as a writer; says 'yes' to each line it is sent."""
    code = (
        "import sys; from tests.cli.stores import *\n"
        "with KVCache(StoreOptions(Path(sys.argv[1]), capacity_bytes=64 << 20)) as cache:\n"
        "    pools = [cache.attach(g) for g in ALL]\n"
        "    print('ready', flush=True)\n"
        "    for line in sys.stdin:\n"
        "        print(eval(line), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        process.wait(20)
