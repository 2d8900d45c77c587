"""What streaming mode costs everybody else on the scheduler, and what it says about itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.server import random_tokens
from tests.support.streaming import PAGE_TOKENS, Background, StreamingServer, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
DECODER = random_tokens(40, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
DECODED = 500
STALL_BUDGET_S = 0.1
READ_DELAY_S = STALL_BUDGET_S  # a layer takes the whole budget, and the model has several


@pytest.fixture(scope="module")
def server(
    model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StreamingServer]:
    settings = {"stall_budget_s": STALL_BUDGET_S, "stream_queue_depth": 2}
    folder = tmp_path_factory.mktemp("scheduler")
    with StreamingServer(model("qwen3"), folder, settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def calm(server: StreamingServer) -> None:
    server.faults.clear()
    server.flush()


def decoding(server: StreamingServer) -> Background:
    """A request that decodes for a while, and is at it."""
    call = Background(server.generate, DECODER, DECODED)
    wait_for(lambda: server.metric("sglang:num_running_reqs") > 0)
    return call


def test_a_slow_hit_is_loaded_in_full_when_nobody_else_waits(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.faults.on("read_delay", READ_DELAY_S)
    answer = server.generate(PROMPT)
    assert (answer.tokens, answer.cached.storage) == (wanted.tokens, WHOLE)


def test_a_slow_hit_is_cut_down_while_others_decode(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    alone = server.uncached(DECODER, DECODED)
    server.store(PROMPT)
    server.faults.on("read_delay", READ_DELAY_S)
    for _ in range(5):  # how slow it is has to be seen, and for longer than a moment
        server.generate(PROMPT, 1)
        server.flush()
    call = decoding(server)
    answer = server.generate(PROMPT)
    cut = sum(
        server.metric("dualpath_admissions_total", decision=decision)
        for decision in ("shortened", "recompute")
    )
    assert cut > 0
    assert answer.tokens == wanted.tokens
    assert answer.cached.storage < WHOLE
    assert call.result().tokens == alone.tokens


def test_a_slow_lookup_holds_up_its_own_request_alone(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.faults.on("lookup_delay", 0.3)
    call = Background(server.generate, PROMPT)
    other = server.uncached(random_tokens(10, seed=5), 4)  # less than a page: nothing to look up
    answer = call.result()
    assert (answer.tokens, answer.cached.storage) == (wanted.tokens, WHOLE)
    assert other.tokens


def test_an_index_that_does_not_answer_is_a_miss(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.faults.on("lookup_delay", 4)
    answer = server.generate(PROMPT)
    assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
    server.faults.clear()
    server.flush()

    def found() -> bool:
        server.flush()
        return server.generate(PROMPT, 1).cached.storage == WHOLE

    wait_for(found)


def test_a_queued_request_is_looked_up_once(server: StreamingServer) -> None:
    server.store(PROMPT)
    before = server.metric("dualpath_lookups_total", source="index")
    prompts = [PROMPT[: 480 - 16 * i] + random_tokens(400, seed=60 + i) for i in range(8)]
    calls = [Background(server.generate, prompt, 60) for prompt in prompts]
    for call in calls:
        call.result()

    def settled() -> bool:
        asked = server.metric("dualpath_lookups_total", source="index") - before
        return 0 < asked <= 3 * len(prompts)

    wait_for(settled)


def test_bytes_that_were_read_are_counted_once(server: StreamingServer) -> None:
    prompt = random_tokens(320, seed=72)
    server.store(prompt)
    time.sleep(2.5)  # whatever was read before is published
    before = server.metric("dualpath_read_bytes_total")
    assert server.generate(prompt, 1).cached.storage == 304
    geometry = stores.geometries(server.root)["kv"]
    wait_for(lambda: server.metric("dualpath_read_bytes_total") > before)
    time.sleep(1.5)
    read = server.metric("dualpath_read_bytes_total") - before
    assert read == 304 // PAGE_TOKENS * geometry.block_bytes


def test_the_metrics_tell_what_happened(server: StreamingServer) -> None:
    names = {
        "dualpath_hit_tokens_total": {},
        "dualpath_miss_tokens_total": {"reason": "absent"},
        "dualpath_read_bytes_total": {"mode": "streaming", "rank": "0"},
        "dualpath_read_seconds_total": {},
        "dualpath_written_bytes_total": {},
        "dualpath_loads_total": {"outcome": "ok"},
        "dualpath_load_seconds_count": {},
        "dualpath_layer_wait_seconds_count": {},
        "dualpath_lookups_total": {"source": "index"},
        "dualpath_admissions_total": {"decision": "full"},
        "dualpath_store_used_bytes": {},
        "dualpath_staging_peak_bytes": {},
    }
    before = {name: server.metric(name, **labels) for name, labels in names.items()}
    server.faults.on("read_delay", 0.01)
    prompt = random_tokens(300, seed=71)
    server.store(prompt)
    server.generate(prompt, 1)

    def counted() -> bool:
        return all(
            server.metric(name, **labels) > before[name] or name.endswith("_bytes")
            for name, labels in names.items()
        )

    wait_for(counted)
    assert server.metric("dualpath_store_used_bytes") > 0
    assert server.metric("dualpath_staging_peak_bytes") > 0
