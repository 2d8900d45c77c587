"""The entry point, and the versions of SGLang that it does not know."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap

import pytest

from dualpath_sglang import plugin


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own that loads SGLang's plugins."""
    setup = """
        import sys
        from dualpath_sglang import plugin
        from sglang.srt.plugins import load_plugins
    """
    program = textwrap.dedent(setup) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "dualpath"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_sglang_finds_the_entry_point() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="dualpath")
    assert [entry.value for entry in found] == ["dualpath_sglang.plugin:register"]


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.5.23", True), ("0.5.23.post1", True), ("0.5.23+cpu", True), ("0.5.24", False),
     ("0.5.2", False), ("0.5.230", False), ("", False)],
)  # fmt: skip
def test_which_versions_are_known(version: str, known: bool) -> None:
    assert plugin.known(version) is known
    assert plugin.known(plugin.sglang_version())


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--hicache-storage-backend", "dualpath"], True),
        (["--hicache-storage-backend=dualpath", "--port", "1"], True),
        (["--hicache-storage-back", "dualpath"], True),
        (["--hicache-storage-backend", "file"], False),
        (["--served-model-name", "dualpath"], False),
        (["--hicache-storage-backend", "dualpath2"], False),
    ],
)
def test_who_asks_for_it(argv: list[str], asked: bool) -> None:
    assert plugin.asked_for(argv) is asked


def test_an_unknown_version_is_refused_at_once_when_it_is_asked_for() -> None:
    done = run(
        """
        plugin.sglang_version = lambda: "9.9.9"
        load_plugins()
        print("not reached")
        """,
        "--hicache-storage-backend",
        "dualpath",
    )
    assert done.returncode == 1
    assert "not reached" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("DualPath does not know SGLang 9.9.9: it works with 0.5.23.")
    assert "Traceback" not in done.stderr


def test_an_unknown_version_serves_everybody_else_untouched_and_refuses_an_engine() -> None:
    done = run(
        """
        plugin.sglang_version = lambda: "9.9.9"
        load_plugins()
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.server_args import ServerArgs
        assert not HookRegistry._patched
        common = dict(model_path="dummy", device="cpu")
        ServerArgs(**common).resolve_once()
        try:
            ServerArgs(**common, hicache_storage_backend="dualpath").resolve_once()
        except ValueError as error:
            print("refused:", error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "refused: DualPath does not know SGLang 9.9.9" in done.stdout


def test_a_process_without_a_scheduler_imports_no_scheduler() -> None:
    done = run(
        """
        load_plugins()
        assert "sglang.srt.managers.cache_controller" not in sys.modules
        from sglang.srt.plugins.hook_registry import HookRegistry
        print(sorted(HookRegistry._patched))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
