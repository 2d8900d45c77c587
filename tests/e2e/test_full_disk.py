"""A disk that fills up under a running server, and then fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_store_faults import KINDS, PROMPT, Served, dualpath
from tests.support.mounts import break_down, fill_up, needs_root, small_disk
from tests.support.server import Server, random_tokens

pytestmark = pytest.mark.e2e


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_and_then_fails(
    kind: str, model: Callable[..., Path], start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with small_disk(tmp_path, 48 << 20) as disk:
        server = start_server(
            model(kind), dualpath(disk / "store", capacity="100%", segment_size="1MiB")
        )
        served = Served(server, disk / "store", server.generate(PROMPT))
        served.recovers()
        fill_up(disk)
        for seed in range(20, 26):  # more pages than there is room for
            prompt = random_tokens(900, seed=seed)
            cold = server.generate(prompt)
            server.flush()
            assert server.generate(prompt).tokens == cold.tokens
        served.ask()
        break_down(disk)  # read-only from now on, as after an error of the device
        for _ in range(3):
            served.ask()
        assert server.alive
        server.kill9()
