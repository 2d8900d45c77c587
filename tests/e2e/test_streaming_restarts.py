"""Streaming mode on a disk that fills up and fails, and killed at any moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_store_faults import PROMPT, Served
from tests.support.mounts import break_down, fill_up, needs_root, small_disk
from tests.support.server import random_tokens
from tests.support.streaming import Background, StreamingServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KILLS = 3
KINDS = ["qwen3", "deepseek_v2"]


@needs_root
def test_a_disk_that_fills_up_and_then_fails(model: Callable[..., Path], tmp_path: Path) -> None:
    settings = {"capacity": "100%", "segment_size": "1MiB"}
    with (
        small_disk(tmp_path, 48 << 20) as disk,
        StreamingServer(
            model("qwen3"), tmp_path / "server", root=disk / "store", settings=settings
        ) as server,
    ):
        served = Served(server, server.root, server.generate(PROMPT))
        served.recovers()
        fill_up(disk)
        for seed in range(20, 26):
            prompt = random_tokens(900, seed=seed)
            cold = server.generate(prompt)
            server.flush()
            assert server.generate(prompt).tokens == cold.tokens
        served.ask()
        break_down(disk)
        for _ in range(3):
            served.ask()
        assert server.alive
        server.kill9()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment_it_is_never_wrong_afterwards(
    kind: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [PROMPT[: 64 * n] + random_tokens(200, seed=n) for n in range(1, 5)]
    source = random.Random(7)
    with StreamingServer(model(kind), tmp_path / "server") as server:
        wanted = [server.uncached(prompt).tokens for prompt in prompts]
        for _ in range(KILLS):
            for prompt in prompts:
                Background(server.generate, prompt)
            time.sleep(source.uniform(0.0, 0.6))
            server.restart()  # SIGKILL to all its processes
            answers = server.generate_together(prompts)
            assert [answer.tokens for answer in answers] == wanted
        server.flush()
        answers = server.generate_together(prompts)
        assert [answer.tokens for answer in answers] == wanted
        assert all(answer.cached.storage > 0 for answer in answers)
