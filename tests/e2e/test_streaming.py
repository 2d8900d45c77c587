"""Streaming mode on real servers: every kind of hit gives the answer of an uncached run.

The freed slots are overwritten with junk at every flush (see tests/sglang_cpu), and the negative
controls show that the answers would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.server import random_tokens
from tests.support.streaming import PAGE_TOKENS, Background, StreamingServer, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS

CHUNKED = ["--chunked-prefill-size", "128"]
NO_OVERLAP = ["--disable-overlap-schedule"]
# Attention, scheduling, chunks: between them each is met in both ways.
SERVERS = [
    pytest.param(("qwen3", []), id="mha_overlap"),
    pytest.param(("deepseek_v2", [*CHUNKED, *NO_OVERLAP]), id="mla_chunked_no_overlap"),
    pytest.param(("deepseek_v2", NO_OVERLAP), id="mla_no_overlap", marks=pytest.mark.slow),
    pytest.param(("qwen3", CHUNKED), id="mha_chunked", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StreamingServer]:
    kind, flags = request.param
    folder = tmp_path_factory.mktemp(kind)
    with StreamingServer(model(kind), folder, *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def calm(server: StreamingServer) -> None:
    server.faults.clear()
    server.flush()


def test_a_hit_in_the_store_gives_the_answer_of_an_uncached_run(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    cold = server.generate(PROMPT)
    device = server.generate(PROMPT)
    server.flush()
    restored = server.generate(PROMPT)
    assert (cold.cached_tokens, device.cached.device, restored.cached.storage) == (0, WHOLE, WHOLE)
    assert wanted.tokens == cold.tokens == device.tokens == restored.tokens


def test_without_the_layer_wait_the_answer_is_wrong(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.faults.on("read_delay", 0.1)
    server.faults.on("no_wait")
    assert server.generate(PROMPT).tokens != wanted.tokens
    server.faults.off("no_wait")
    server.flush()
    answer = server.generate(PROMPT)
    assert answer.tokens == wanted.tokens
    assert answer.cached.storage == WHOLE


def test_layers_are_computed_while_later_ones_are_read(server: StreamingServer) -> None:
    server.store(PROMPT)
    server.faults.on("read_delay", 0.05)
    server.faults.trace()
    server.generate(PROMPT, 1)
    events = server.faults.trace()
    read = {e["layer"]: e["t"] for e in events if e["event"] == "read"}  # the last of each layer
    reached = {}
    for event in events:
        if event["event"] == "reached":
            reached.setdefault(event["layer"], event["t"])
    assert sorted(read) == sorted(reached) == [0, 1, 2, 3]
    for layer in (0, 1):  # attention of the next layer is reached: this one is computed
        assert reached[layer + 1] < read[layer + 2]


def test_a_hit_survives_a_restart(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.restart()
    answer = server.generate(PROMPT)
    assert answer.cached.storage == WHOLE
    assert answer.tokens == wanted.tokens


@pytest.mark.parametrize("shared", [16, 320, 496])
def test_a_part_of_the_prefix_is_restored(server: StreamingServer, shared: int) -> None:
    prompt = PROMPT[:shared] + random_tokens(300, seed=shared)
    wanted = server.uncached(prompt)
    server.store(PROMPT)
    answer = server.generate(prompt)
    assert answer.cached.storage == shared
    assert answer.tokens == wanted.tokens


def test_a_device_hit_is_extended_from_the_store(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.generate(PROMPT[:320], 1)
    answer = server.generate(PROMPT)
    assert answer.cached.device + answer.cached.storage == WHOLE
    assert answer.cached.storage >= WHOLE - 320
    assert answer.tokens == wanted.tokens


def test_requests_of_one_batch_have_hits_of_their_own(server: StreamingServer) -> None:
    prompts = [
        PROMPT,
        random_tokens(400, seed=11),
        PROMPT[:160] + random_tokens(200, seed=12),
        random_tokens(300, seed=13),
    ]
    wanted = [server.uncached(prompt).tokens for prompt in prompts]
    server.store(PROMPT, prompts[1])
    answers = server.generate_together(prompts)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached.storage for answer in answers] == [WHOLE, 384, 160, 0]


def test_many_requests_at_once_are_all_right(server: StreamingServer) -> None:
    prompts = [PROMPT[: 64 * (i + 1)] + random_tokens(50, seed=20 + i) for i in range(7)]
    wanted = [server.uncached(prompt).tokens for prompt in prompts]
    server.store(PROMPT)
    calls = [Background(server.generate, prompt) for prompt in prompts]
    assert [call.result().tokens for call in calls] == wanted


def test_an_abort_during_the_load_leaves_the_tree_right(server: StreamingServer) -> None:
    wanted = server.uncached(PROMPT)
    server.store(PROMPT)
    server.faults.on("hang")
    server.faults.trace()
    call = Background(server.generate, PROMPT, rid="aborted")
    wait_for(lambda: any(e["event"] == "reached" for e in server.faults.trace()))
    server.request("POST", "/abort_request", {"rid": "aborted"})
    server.faults.off("hang")
    assert call.result().finish_reason == "abort"
    assert server.generate(PROMPT).tokens == wanted.tokens
    server.flush()
    assert server.generate(PROMPT).tokens == wanted.tokens


def test_what_is_stored_is_not_stored_again(server: StreamingServer) -> None:
    server.store(PROMPT)
    count = stores.block_count(server.root)
    server.store(PROMPT)
    server.store(PROMPT)
    assert stores.block_count(server.root) == count


def test_decoded_pages_are_stored(server: StreamingServer) -> None:
    prompt = random_tokens(100, seed=31)
    first = server.generate(prompt, 60)
    longer = [*prompt, *first.tokens, *random_tokens(20, seed=32)]
    wanted = server.uncached(longer)
    server.flush()
    answer = server.generate(longer)
    assert answer.cached.storage >= 144
    assert answer.tokens == wanted.tokens
