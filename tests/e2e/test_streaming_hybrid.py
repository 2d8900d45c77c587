"""Streaming mode on a model with a sliding window: restored where all its pools are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prompts import NO_OVERLAP, PROMPT, Models
from tests.support import stores
from tests.support.index_choice import index_of
from tests.support.streaming import PAGE_TOKENS, StreamingServer

pytestmark = pytest.mark.e2e


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([], id="overlap"),
        pytest.param(NO_OVERLAP, id="no_overlap", marks=pytest.mark.slow),
    ],
)
def hybrid(
    request: pytest.FixtureRequest, model: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StreamingServer]:
    with StreamingServer(
        model("mellum"), tmp_path_factory.mktemp("mellum"), *request.param
    ) as server:
        yield server


def test_a_sliding_window_model_is_restored_where_all_its_pools_are(
    hybrid: StreamingServer,
) -> None:
    wanted = hybrid.uncached(PROMPT)
    cold = hybrid.generate(PROMPT)
    device = hybrid.generate(PROMPT)
    assert wanted.tokens == cold.tokens == device.tokens
    hybrid.flush()
    restored = hybrid.generate(PROMPT)
    assert restored.tokens == wanted.tokens
    assert restored.cached.storage > 0
    assert sorted(stores.geometries(hybrid.root)) == ["kv", "swa"]


def test_a_sliding_window_that_is_gone_shortens_the_hit(hybrid: StreamingServer) -> None:
    wanted = hybrid.uncached(PROMPT)
    hybrid.store(PROMPT)
    geometry = stores.geometries(hybrid.root)["swa"]
    with index_of(hybrid.root) as index:
        keys = [k for k in stores.keys_of(PROMPT, PAGE_TOKENS) if index.lookup(geometry, [k])[0]]
    stores.corrupt(hybrid.root, keys[-1], layer=2, pool="swa")
    answer = hybrid.generate(PROMPT)
    assert answer.tokens == wanted.tokens
    hybrid.flush()
    assert hybrid.generate(PROMPT).tokens == wanted.tokens
