"""The source patch: applied to a copy of the installed SGLang that then runs without the plugin."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ServerError
from tests.support.server import Server, hicache_flags, random_tokens

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
(PATCH,) = sorted((ROOT / "patches" / "sglang-0.5.23").glob("*.patch"))
PREFIX = "python/"  # of SGLang's repository, before the package


def touched() -> list[str]:
    """The files that the patch changes, relative to the folder of the package."""
    lines = PATCH.read_text().splitlines()
    starts = [line.removeprefix("--- a/") for line in lines if line.startswith("--- a/")]
    assert starts and all(name.startswith(PREFIX) for name in starts)
    return [name.removeprefix(PREFIX) for name in starts]


def copy_of_sglang(folder: Path) -> Path:
    """SGLang as installed, in links, except that the touched files are copies."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    files = {package.parent / name for name in touched()}
    opened = {parent for file in files for parent in file.parents}

    def link(source: Path, target: Path) -> None:
        if source in files:
            target.write_bytes(source.read_bytes())
        elif source in opened:
            target.mkdir()
            for child in source.iterdir():
                if child.name != "__pycache__":
                    link(child, target / child.name)
        else:
            target.symlink_to(source)

    folder.mkdir()
    link(package, folder / "sglang")
    return folder


@pytest.fixture
def start(
    model: Callable[..., Path], tmp_path: Path, start_server: Callable[..., Server]
) -> Callable[[], Server]:
    """`start()`: a server from the copy, with the CPU helper's plugin and no other."""
    copy = copy_of_sglang(tmp_path / "copy")
    settings = {"root": str(tmp_path / "store"), "capacity": "1GiB", "prefetch_threshold": 16}
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_PLUGINS": "sglang_cpu"}

    def start() -> Server:
        return start_server(
            model("qwen3"), hicache_flags("dualpath", settings), env=env, warm=False
        )

    return start


@pytest.mark.slow
def test_a_patched_sglang_stores_and_restores_without_the_plugin(
    start: Callable[[], Server], tmp_path: Path
) -> None:
    subprocess.run(["git", "apply", "-p2", str(PATCH)], cwd=tmp_path / "copy", check=True)
    server = start()
    prompt = random_tokens(300, seed=1)
    cold = server.generate(prompt)
    server.flush()
    again = server.generate(prompt)
    assert (cold.cached_tokens, again.cached.storage) == (0, 288)
    assert again.tokens == cold.tokens
    log = server.log.read_text()
    assert "DualPath stores the pool kv" in log
    # SGLang's registry made it; the plugin would have gone through the loader for "dynamic".
    assert "Creating storage backend 'dualpath' (dualpath_sglang.hicache.DualPathStorage)" in log


def test_an_unpatched_sglang_without_the_plugin_does_not_know_the_name(
    start: Callable[[], Server],
) -> None:
    with pytest.raises(ServerError, match="invalid choice: 'dualpath'"):
        start()


def test_the_patch_applies_to_sglangs_repository_and_is_small() -> None:
    added = [line for line in PATCH.read_text().splitlines() if line.startswith("+")]
    assert len(added) - len(touched()) <= 15
    assert all("Copyright" not in line for line in PATCH.read_text().splitlines())
