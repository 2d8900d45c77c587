"""The faults of HiCache mode's store, and SIGKILL, once more in streaming mode."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_store_faults import FAULTS, PAGE_TOKENS, PROMPT, Fault, Served
from tests.support import stores
from tests.support.mounts import break_down, fill_up, needs_root, small_disk
from tests.support.server import random_tokens
from tests.support.streaming import Background, StreamingServer

pytestmark = pytest.mark.e2e

KILLS = 3
# What a store does when it is damaged does not depend on attention.
KINDS = ["qwen3", pytest.param("deepseek_v2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(f"streaming-{request.param}")
    settings = {"capacity": "64MiB", "segment_size": "4MiB"}
    with StreamingServer(model(request.param), folder, settings=settings) as server:
        one = Served(server, server.root, server.generate(PROMPT))
        one.recovers()
        yield one
        assert server.alive


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_answer_stays_right_and_the_store_is_repaired(served: Served, fault: Fault) -> None:
    served.recovers()
    served.server.flush()
    fault(served)
    served.ask()
    served.recovers()


def test_without_faults_the_bytes_do_come_from_the_store(served: Served) -> None:
    """The control of all of the above."""
    served.recovers()
    served.server.flush()
    stores.corrupt(served.root, served.key(5), layer=0)
    assert served.ask().cached.storage == 5 * PAGE_TOKENS
    served.recovers()


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
