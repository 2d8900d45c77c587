"""Streaming mode when loads fail: right tokens for everyone, and only the request itself is slower.

Every test compares with an uncached run, then asks the same again: the tree must be clean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import StoreOptions
from tests.support import stores
from tests.support.server import Answer, random_tokens
from tests.support.streaming import PAGE_TOKENS, Background, StreamingServer, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
OTHER = random_tokens(500, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
LOAD_TIMEOUT_S = 2.0

CHUNKED = ["--chunked-prefill-size", "64"]
NO_OVERLAP = ["--disable-overlap-schedule"]
SERVERS = [
    pytest.param(("qwen3", []), id="overlap"),
    pytest.param(
        ("deepseek_v2", [*CHUNKED, *NO_OVERLAP]), id="chunked_no_overlap", marks=pytest.mark.slow
    ),
    pytest.param(("deepseek_v2", NO_OVERLAP), id="no_overlap", marks=pytest.mark.slow),
    pytest.param(("qwen3", CHUNKED), id="chunked", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StreamingServer]:
    kind, flags = request.param
    folder = tmp_path_factory.mktemp(kind)
    settings = {"load_timeout_s": LOAD_TIMEOUT_S}
    with StreamingServer(model(kind), folder, *flags, settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def calm(server: StreamingServer) -> None:
    server.faults.clear()
    server.flush()


@pytest.fixture
def wanted(server: StreamingServer) -> dict[str, Answer]:
    return {"prompt": server.uncached(PROMPT), "other": server.uncached(OTHER)}


def recomputes(server: StreamingServer) -> float:
    return server.metric("dualpath_recomputes_total")


def test_a_damaged_layer_costs_only_its_own_request_time(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT, OTHER)
    before = recomputes(server)
    stores.corrupt(server.root, keys_of(PROMPT)[20], layer=2)
    hurt, well = server.generate_together([PROMPT, OTHER])
    assert [hurt.tokens, well.tokens] == [wanted["prompt"].tokens, wanted["other"].tokens]
    assert well.cached.storage == WHOLE
    assert hurt.cached.storage == 20 * PAGE_TOKENS  # what was left of its prefix
    assert recomputes(server) == before + 1
    server.flush()
    again = server.generate_together([PROMPT, OTHER])
    assert [a.tokens for a in again] == [wanted["prompt"].tokens, wanted["other"].tokens]
    assert [a.cached.storage for a in again] == [WHOLE, WHOLE]  # stored anew by the recompute


def keys_of(prompt: list[int]) -> list[bytes]:
    return stores.keys_of(prompt, PAGE_TOKENS)


def test_a_second_failure_of_the_same_request_is_no_error_either(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT)
    before = recomputes(server)
    server.faults.on("no_scrub")
    server.faults.on("read_delay", 0.05)
    keys = keys_of(PROMPT)
    stores.corrupt(server.root, keys[20], layer=0)  # found first, as first layers are read first
    stores.corrupt(server.root, keys[10], layer=3)  # found when the rest is tried
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens
    assert recomputes(server) == before + 2
    server.faults.clear()
    server.flush()
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens


def test_segments_deleted_before_the_load(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT)
    server.restart()  # no segment is open yet
    server.faults.on("hang")
    call = Background(server.generate, PROMPT)
    wait_for(lambda: any(e["event"] == "reached" for e in server.faults.trace()))
    for segment in stores.segments(server.root):
        segment.unlink()
    server.faults.off("hang")
    assert call.result().tokens == wanted["prompt"].tokens
    server.flush()
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens


def test_blocks_evicted_and_overwritten_during_the_load(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT)
    server.faults.on("hang")
    call = Background(server.generate, PROMPT)
    wait_for(lambda: any(e["event"] == "reached" for e in server.faults.trace()))
    with KVCache(StoreOptions(root=server.root, capacity_bytes=512 << 20)) as other:
        other.clear()
    for segment in stores.segments(server.root):
        size = segment.stat().st_size
        with segment.open("r+b") as file:
            file.write(b"\x55" * size)
    server.faults.off("hang")
    assert call.result().tokens == wanted["prompt"].tokens
    server.flush()
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens


def test_a_store_that_hangs_delays_a_request_by_its_deadline(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT, OTHER)
    server.faults.on("hang")
    answer = server.generate(PROMPT)
    assert answer.tokens == wanted["prompt"].tokens
    assert answer.elapsed_s < LOAD_TIMEOUT_S + 15  # and not for ever
    began = time.monotonic()
    answer = server.generate(OTHER)  # nothing is expected of it now
    assert answer.tokens == wanted["other"].tokens
    assert time.monotonic() - began < LOAD_TIMEOUT_S + 15
    server.faults.off("hang")
    server.flush()

    def answers_again() -> bool:
        server.flush()
        return server.generate(PROMPT, 1).cached.storage > 0

    wait_for(answers_again)
    server.flush()
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens


@pytest.mark.parametrize("thread", ["dead_reader", "dead_streamer"])
def test_a_thread_that_dies_in_a_load(
    server: StreamingServer, wanted: dict[str, Answer], thread: str
) -> None:
    server.store(PROMPT, OTHER)
    server.faults.on(thread)
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens
    assert not server.faults.is_on(thread)
    server.flush()
    answer = server.generate(OTHER)
    assert answer.tokens == wanted["other"].tokens
    assert answer.cached.storage == WHOLE


def test_a_streaming_client_sees_no_error(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT)
    before = recomputes(server)
    stores.corrupt(server.root, keys_of(PROMPT)[0], layer=0)
    events = server.streamed(PROMPT)
    assert recomputes(server) == before + 1
    assert all(event["output_ids"] for event in events)
    assert tuple(events[-1]["output_ids"][-16:]) == wanted["prompt"].tokens
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_who_decodes_meanwhile_is_not_touched(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    decoder = random_tokens(40, seed=41)
    alone = server.uncached(decoder, 120)
    server.store(PROMPT)
    call = Background(server.generate, decoder, 120)
    stores.corrupt(server.root, keys_of(PROMPT)[5], layer=1)
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens
    assert call.result().tokens == alone.tokens


def test_log_probabilities_beside_a_failed_load_are_right(server: StreamingServer) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 480}
    prompts = [PROMPT, random_tokens(490, seed=51), OTHER]
    server.store(PROMPT, OTHER)
    stores.corrupt(server.root, keys_of(PROMPT)[2], layer=0)
    answers = server.generate_together(prompts, **fields)
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = server.uncached(prompt, **fields)
        for name in ("input_token_logprobs", "output_token_logprobs"):
            got, true = (a.raw["meta_info"][name] for a in (answer, wanted))
            assert [row[1] for row in got] == [row[1] for row in true]  # token ids
            for (value, *_), (other, *_) in zip(got, true, strict=True):
                assert value == pytest.approx(other, abs=1e-3)


def test_an_abort_during_a_failing_load_ends_the_request(
    server: StreamingServer, wanted: dict[str, Answer]
) -> None:
    server.store(PROMPT)
    server.faults.on("hang")
    body = {"input_ids": PROMPT, "rid": "aborted", "sampling_params": {"max_new_tokens": 16}}
    call = Background(server.post, "/generate", body)
    wait_for(lambda: any(e["event"] == "reached" for e in server.faults.trace()))
    stores.corrupt(server.root, keys_of(PROMPT)[1], layer=0)
    server.request("POST", "/abort_request", {"rid": "aborted"})
    server.faults.off("hang")
    assert call.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.generate(PROMPT).tokens == wanted["prompt"].tokens
    assert server.alive
