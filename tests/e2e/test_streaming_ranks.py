"""Streaming mode on two ranks: they agree on every hit and on every failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prompts import NO_OVERLAP, OTHER, PROMPT, WHOLE, Models
from tests.support import stores
from tests.support.streaming import PAGE_TOKENS, StreamingServer

pytestmark = pytest.mark.e2e


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", []), id="mha"),
        pytest.param(("deepseek_v2", NO_OVERLAP), id="mla", marks=pytest.mark.slow),
    ],
)
def two_ranks(
    request: pytest.FixtureRequest, model: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StreamingServer]:
    kind, flags = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-tp2")
    settings = {"load_timeout_s": 3}
    with StreamingServer(
        model(kind), folder, "--tp-size", "2", *flags, settings=settings
    ) as server:
        yield server


def test_two_ranks_restore_what_they_stored(two_ranks: StreamingServer) -> None:
    two_ranks.faults.clear()
    wanted = [two_ranks.uncached(prompt).tokens for prompt in (PROMPT, OTHER)]
    two_ranks.store(PROMPT, OTHER)
    answers = two_ranks.generate_together([PROMPT, OTHER])
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached.storage for answer in answers] == [WHOLE, 288]
    sharded = {g.shard for g in stores.geometries(two_ranks.root).values()}
    assert sharded in ({""}, {"tp0/2", "tp1/2"})  # replicas are stored once


def test_a_fault_on_one_rank_is_recomputed_on_both(two_ranks: StreamingServer) -> None:
    wanted = [two_ranks.uncached(prompt).tokens for prompt in (PROMPT, OTHER)]
    two_ranks.store(PROMPT, OTHER)
    pool = sorted(stores.geometries(two_ranks.root))[-1]  # the last rank's
    key = stores.keys_of(PROMPT, PAGE_TOKENS)[10]
    stores.corrupt(two_ranks.root, key, layer=1, pool=pool)
    before = two_ranks.metric("dualpath_recomputes_total")
    answers = two_ranks.generate_together([PROMPT, OTHER])
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached.storage for answer in answers] == [160, 288]
    assert two_ranks.metric("dualpath_recomputes_total") > before
    two_ranks.flush()
    answers = two_ranks.generate_together([PROMPT, OTHER])
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached.storage for answer in answers] == [WHOLE, 288]


def test_slow_lookups_do_not_part_the_ranks(two_ranks: StreamingServer) -> None:
    wanted = two_ranks.uncached(PROMPT)
    two_ranks.store(PROMPT)
    two_ranks.faults.on("lookup_delay", 0.1)
    answer = two_ranks.generate(PROMPT)
    two_ranks.faults.clear()
    assert answer.tokens == wanted.tokens
    assert answer.cached.storage == WHOLE
