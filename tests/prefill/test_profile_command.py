"""``dualpath profile``: from the flags of a server to a profile that it serves with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualpath_sglang.cli import app
from dualpath_sglang.prefill.profile import ProfileKey, load
from dualpath_sglang.prefill.trace import Header, TraceWriter
from tests.prefill.servers import SHORT, answers, batches, recorded
from tests.support.processes import BASE_ENVIRONMENT
from tests.support.server import DEFAULT_FLAGS

RUNNER = CliRunner()
pytestmark = pytest.mark.timeout(600)  # a cold start, on a busy machine


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Say either the flags of a server"),
        (["--url", "http://h", "--trace", "t", "--", "--model-path", "m"], "Say either the flags"),
        (["--url", "http://h"], "--url and --trace go together"),
        (["--trace", "t", "--", "--model-path", "m"], "--url and --trace go together"),
        (["--url", "http://h", "--trace", "/nowhere/t"], "needs prefill_trace set to it"),
    ],
)
def test_what_cannot_be_done_is_told(arguments: list[str], sentence: str) -> None:
    done = RUNNER.invoke(app, ["profile", *arguments])
    assert done.exit_code == 2
    assert sentence in done.output


def test_a_server_that_does_not_answer_is_told(tmp_path: Path) -> None:
    key = ProfileKey("m", "d", "b", 1, "f", "v")
    TraceWriter(tmp_path / "t", Header(key, 16, 64, 1000))
    arguments = ["--url", "http://127.0.0.1:9", "--trace", str(tmp_path / "t")]
    done = RUNNER.invoke(app, ["profile", *arguments])
    assert done.exit_code == 2
    assert "The server at http://127.0.0.1:9 does not answer" in done.output


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dualpath_sglang.cli", "profile", *arguments],
        env={**os.environ, **BASE_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.slow
def test_a_server_serves_with_what_was_measured(model: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "root"
    flags = [x for k, v in DEFAULT_FLAGS.items() if k != "--host" for x in (k, v)]
    done = profile(
        *("--root", str(root), "--most-context", "1500", "--rounds", "1", "--json"),
        *("--most-error", "10"),  # how busy the machine is, is not what this is about
        *("--", "--model-path", str(model("qwen3")), *flags),
        *("--chunked-prefill-size", "512", "--hicache-storage-backend", "file"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    made = load(Path(told["path"]))
    assert Path(told["path"]).parent == root / "profiles"
    assert made.points > 20
    assert made.held_out > 5
    assert 1000 < made.most_tokens <= 1500
    quota = str(2 * made.model.predict([]) + 0.005)
    env = {"DUALPATH_PREFILL_QUOTA_S": quota, "DUALPATH_ROOT": str(root)}
    with recorded(model("qwen3"), tmp_path, env=env) as server:
        assert all(len(a.tokens) == 8 for a in answers(server, SHORT))
    assert all(b.predicted_s is not None for b in batches(tmp_path))


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    done = profile("--root", str(tmp_path), "--", "--model-path", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "The server ended while it was starting" in done.stderr
    assert not list(tmp_path.rglob("*.json"))
