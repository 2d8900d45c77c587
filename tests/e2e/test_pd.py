"""A prefill and a decode server over one store: SGLang's own disaggregation, KV over Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pd import PdCluster
from tests.support.server import Server, ServerError, random_tokens
from tests.support.stores import replace_blocks
from tests.support.streaming import PAGE_TOKENS, Background, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
WHOLE = len(PROMPT) // PAGE_TOKENS
"""Pages of the prompt that can be stored when it has been computed."""
DECODED = 16
"""Tokens of an answer; with them one more page is full."""
NOISE_BYTES = 16 << 10
"""What processes read and write beside KV, and less than a block."""


def case(prefill: str, decode: str, kind: str, *, slow: bool = True) -> object:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param((prefill, decode, kind), id=f"{prefill}-{decode}-{kind}", marks=marks)


CASES = [
    case("streaming", "streaming", "qwen3", slow=False),
    case("streaming", "streaming", "deepseek_v2"),
    case("hicache", "hicache", "qwen3"),
    case("hicache", "hicache", "deepseek_v2"),
    case("streaming", "offload", "qwen3"),
    case("streaming", "none", "qwen3"),
]


@pytest.fixture(scope="module", params=CASES)
def cluster(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PdCluster]:
    prefill, decode, kind = request.param
    folder = tmp_path_factory.mktemp(f"{prefill}-{decode}")
    with PdCluster(model(kind), folder, prefill_mode=prefill, decode_mode=decode) as cluster:
        yield cluster
        assert all(engine.server.alive for engine in cluster.engines.values())


@pytest.fixture(scope="module")
def uncached(cluster: PdCluster) -> tuple[int, ...]:
    """The answer to the prompt of a single server that caches nothing."""
    with Server(cluster.model, ["--disable-radix-cache"]) as server:
        return server.generate(PROMPT, DECODED).tokens


def restores(cluster: PdCluster) -> bool:
    """Whether the decode server reads prefixes itself."""
    return cluster.decode_mode in ("streaming", "hicache")


def test_answers_are_those_of_a_server_without_a_cache(
    cluster: PdCluster, uncached: tuple[int, ...]
) -> None:
    before = cluster.figures()
    assert cluster.generate(PROMPT, DECODED).tokens == uncached
    cluster.flush()
    cold = cluster.figures() - before
    page, slot = cluster.geometry.block_bytes, cluster.geometry.slot_bytes
    assert cold.sent == (WHOLE + 1) * page

    # Each page was written once: those of the prompt, and the one that decoding filled.
    pages = WHOLE + (cluster.decode_mode != "none")
    assert 0 <= sum(cold.written.values()) - pages * slot < NOISE_BYTES
    if cluster.decode_mode != "none":
        assert cold.written["d0"] >= slot

    for flushed in (("p0", "d0"), ("d0",), ("p0",)):
        cluster.flush(*flushed)
        before = cluster.figures()
        answer = cluster.generate(PROMPT, DECODED)
        hit = cluster.figures() - before
        assert answer.tokens == uncached
        assert answer.prefill.cached.storage == ("p0" in flushed) * WHOLE * PAGE_TOKENS
        assert (hit.read["p0"] >= WHOLE * page) == ("p0" in flushed)
        assert (hit.read["d0"] >= WHOLE * page) == (restores(cluster) and "d0" in flushed)
        assert hit.sent == (1 if restores(cluster) else WHOLE + 1) * page


def test_pages_of_requests_at_once_are_written_once(cluster: PdCluster) -> None:
    prompts = [random_tokens(10 * PAGE_TOKENS + 1, seed) for seed in range(100, 104)]
    before = cluster.figures()
    for running in [Background(cluster.generate, prompt, 1) for prompt in prompts]:
        running.result()
    cluster.flush()
    written = sum((cluster.figures() - before).written.values())
    pages = 10 * len(prompts)
    assert 0 <= written - pages * cluster.geometry.slot_bytes < len(prompts) * NOISE_BYTES


def test_servers_say_who_they_are(cluster: PdCluster) -> None:
    engines = [engine for engine in cluster.engines.values() if engine.name != "d0"]
    if cluster.decode_mode != "none":
        engines.append(cluster["d0"])
    cluster.generate(PROMPT, 1)
    wait_for(lambda: sum("pd_role" in report for report in cluster.reports()) == len(engines))
    reports = {report["host"]: report for report in cluster.reports()}
    for engine in engines:
        report = reports[engine.name]
        assert report["pd_role"] == engine.role
        assert report["url"] == engine.server.url
        assert report.get("bootstrap_port") == engine.bootstrap_port
        assert report["page_tokens"] == PAGE_TOKENS
        assert report["block_bytes"] == cluster.geometry.block_bytes


@pytest.mark.parametrize("warm", [0, WHOLE // 2])
def test_a_load_that_fails_on_prefill_is_computed_anew(
    warm: int, cluster: PdCluster, uncached: tuple[int, ...]
) -> None:
    """Also when a part of the prompt was in memory, and has been sent to decode already."""
    if cluster.prefill_mode != "streaming":
        pytest.skip("only streaming mode promises before it has read")
    cluster.store(PROMPT)
    if warm:
        cluster.generate(PROMPT[: warm * PAGE_TOKENS + 1], 1)
    cluster["p0"].faults.on("dead_reader")
    answer = cluster.generate(PROMPT, DECODED)
    assert not cluster["p0"].faults.is_on("dead_reader"), "nothing was loaded"
    assert answer.tokens == uncached
    assert answer.prefill.cached_tokens == warm * PAGE_TOKENS
    cluster.flush()
    answer = cluster.generate(PROMPT, DECODED)
    assert answer.tokens == uncached
    assert answer.prefill.cached.storage == WHOLE * PAGE_TOKENS


def test_a_damaged_page_costs_no_answer(cluster: PdCluster, uncached: tuple[int, ...]) -> None:
    """Decode, which has told prefill not to send it, fails at once; then it is no hit any more."""
    cluster.store(PROMPT)
    cluster.corrupt(WHOLE // 2)
    if restores(cluster):
        with pytest.raises(ServerError, match="HiCache local restore failed"):
            cluster.generate(PROMPT, DECODED)
    assert cluster.generate(PROMPT, DECODED).tokens == uncached
    cluster.flush()
    assert cluster.generate(PROMPT, DECODED).prefill.cached.storage == WHOLE * PAGE_TOKENS


def test_other_bytes_in_the_store_change_the_answer(
    cluster: PdCluster, uncached: tuple[int, ...]
) -> None:
    """The control: answers do depend on what is stored. Last, for it spoils the store."""
    cluster.store(PROMPT)
    cluster.generate(PROMPT, 1)  # both have it in memory
    assert replace_blocks(cluster.root, cluster.redis.url) > 0
    assert cluster.generate(PROMPT, DECODED).tokens == uncached
    if restores(cluster):
        cluster.flush("d0")
        answer = cluster.generate(PROMPT, DECODED)
        assert answer.prefill.cached.storage == 0
        assert answer.tokens != uncached
    cluster.flush()
    answer = cluster.generate(PROMPT, DECODED)
    assert answer.prefill.cached.storage == WHOLE * PAGE_TOKENS
    assert answer.tokens != uncached
