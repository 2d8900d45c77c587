"""The faults of HiCache mode's store, and SIGKILL, once more in streaming mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_store_faults import FAULTS, PAGE_TOKENS, PROMPT, Fault, Served
from tests.support import stores
from tests.support.streaming import StreamingServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KINDS = ["qwen3", "deepseek_v2"]


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
