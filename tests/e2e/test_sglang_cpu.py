"""SGLang itself, on the CPU, with its own `file` storage: the ground that our end-to-end tests use.

What holds here holds without this project's backend: a hit from each tier equals the cold answer,
wrong bytes in a tier change the answer, and layer waits are real.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.server import Answer, Server, hicache_flags, random_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = random_tokens(500, seed=1)
PAGE_TOKENS = 16
WHOLE_PAGES = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
MHA, MLA = "qwen3", "deepseek_v2"
# layout, I/O backend
FORMS = [("layer_first", "direct"), ("layer_first", "kernel"), ("page_first", "kernel")]


class FileServer(Server):
    """A server whose L3 is SGLang's file backend in `folder`: one file a page."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        layout: str = "page_first_direct",
        io: str = "direct",
        env: dict[str, str] | None = None,
        warm: bool | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        hicache = hicache_flags("file", {"prefetch_threshold": PAGE_TOKENS}, layout=layout, io=io)
        where = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
        super().__init__(
            model,
            [*hicache, *flags],
            env={**where, **(env or {})},
            log=folder.with_suffix(".log"),
            warm=warm,
        )

    def damage_storage(self) -> None:
        """Replace the bytes of every stored page by other numbers of the same size."""
        source = random.Random(0)
        for file in self.folder.iterdir():
            count = file.stat().st_size // 4
            numbers = [source.gauss(0, 1) for _ in range(count)]
            file.write_bytes(struct.pack(f"{count}f", *numbers))


@pytest.fixture(scope="module", params=[MHA, MLA])
def served(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[FileServer, Answer]]:
    """A running server and the cold answer to PROMPT."""
    folder = tmp_path_factory.mktemp(request.param) / "l3"
    with FileServer(model(request.param), folder) as server:
        yield server, server.generate(PROMPT)


def trace_events(trace: Path, event: str) -> list[int]:
    """The layers for which `event` stands in a load trace, in order."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    return [line["layer"] for line in lines if line["event"] == event]


def test_another_seed_is_another_model(model, start_server):
    answers = [start_server(model(MHA, seed)).generate(PROMPT).tokens for seed in (0, 1)]
    assert answers[0] != answers[1]


def test_a_repeated_prompt_is_a_device_hit_with_the_cold_answer(served):
    server, cold = served
    server.generate(PROMPT)
    again = server.generate(PROMPT)
    assert again.cached.device == WHOLE_PAGES
    assert again.tokens == cold.tokens


def test_a_prompt_evicted_from_the_device_is_a_host_hit_with_the_cold_answer(served):
    server, cold = served
    server.generate(PROMPT)
    for seed in range(100, 105):  # five prompts of 1024 tokens through 4096 slots
        server.generate(random_tokens(1024, seed), max_new_tokens=1)
    again = server.generate(PROMPT)
    assert again.cached.host > 0
    assert again.tokens == cold.tokens


def test_a_flushed_prompt_is_a_storage_hit_with_the_cold_answer(served):
    server, cold = served
    server.generate(PROMPT)
    server.flush()
    again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == cold.tokens


def test_slots_overwritten_by_other_prompts_leave_the_storage_hit_right(served):
    server, cold = served
    server.generate(PROMPT)
    server.overwrite_slots()
    again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == cold.tokens


def test_a_shared_prefix_is_a_storage_hit_for_another_prompt(served):
    server, _ = served
    other = PROMPT[:256] + random_tokens(100, seed=2)
    cold = server.generate(other)
    server.flush()
    again = server.generate(other[:300])
    assert again.cached.storage == 300 // PAGE_TOKENS * PAGE_TOKENS
    server.flush()
    assert server.generate(other).tokens == cold.tokens


def test_a_conversation_is_cached_turn_by_turn(served):
    server, _ = served
    messages = [
        {"role": "system", "content": "You are a careful assistant. " * 8},
        {"role": "user", "content": "List the files."},
    ]
    first = server.chat(messages)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "tool", "content": "README.md"},
    ]
    server.flush()
    second = server.chat(messages)
    # All of the first prompt but its last, partial page; the answer is part of the next prompt.
    assert second.cached.storage >= first.prompt_tokens - PAGE_TOKENS
    assert second.cached_tokens == second.cached.storage
    assert second.prompt_tokens > first.prompt_tokens


def test_damaged_storage_changes_the_answer(served):
    """Negative control: the storage hits above did use the stored bytes."""
    server, cold = served
    server.generate(PROMPT)
    server.flush()
    server.damage_storage()
    again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens != cold.tokens


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_a_killed_and_restarted_server_goes_on_from_storage(kind, model, tmp_path):
    with FileServer(model(kind), tmp_path / "l3") as server:
        cold = server.generate(PROMPT)
        server.flush()
        server.kill9()
        assert not server.alive
        server.start()
        again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == cold.tokens


@pytest.mark.parametrize(("layout", "io"), FORMS)
@pytest.mark.parametrize("kind", [MHA, MLA])
def test_every_host_layout_gives_storage_hits(kind, layout, io, model, tmp_path):
    with FileServer(model(kind), tmp_path / "l3", layout=layout, io=io) as server:
        cold = server.generate(PROMPT)
        server.flush()
        stored = server.generate(PROMPT)
    assert stored.cached.storage == WHOLE_PAGES
    assert stored.tokens == cold.tokens


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_two_tensor_parallel_ranks_give_storage_hits(kind, model, tmp_path):
    with FileServer(model(kind), tmp_path / "l3", "--tp-size", "2") as server:
        cold = server.generate(PROMPT)
        server.flush()
        again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == cold.tokens


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_attention_waits_for_the_layer_it_reads(kind, model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lazy = {"SGLANG_CPU_LOAD_ON_DEMAND": "1", "SGLANG_CPU_LOAD_TRACE": str(trace)}
    with FileServer(model(kind), tmp_path / "l3", env=lazy) as server:
        cold = server.generate(PROMPT)
        server.flush()
        again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == cold.tokens
    assert trace_events(trace, "loaded") == [0, 1, 2, 3]
    assert trace_events(trace, "waited") == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_without_the_layer_wait_the_answer_is_wrong(kind, model, tmp_path):
    """Negative control: the wait above is what makes the answer right."""
    no_wait = {"SGLANG_CPU_LOAD_DELAY_S": "1", "SGLANG_CPU_LOAD_NO_WAIT": "1"}
    with FileServer(model(kind), tmp_path / "l3", env=no_wait) as server:
        cold = server.generate(PROMPT)
        server.flush()
        again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens != cold.tokens


def test_a_cold_start_answers_as_a_warm_one_does(model, tmp_path):
    """`python -m sglang.launch_server` and nothing else; the other tests fork (launcher.py)."""
    with FileServer(model(MHA), tmp_path / "l3") as server:
        warm = server.generate(PROMPT)
        server.flush()
    with FileServer(model(MHA), tmp_path / "l3", warm=False) as server:
        stored = server.generate(PROMPT)
        server.flush()
        server.damage_storage()
        damaged = server.generate(PROMPT)
    assert stored.tokens == warm.tokens
    assert stored.cached.storage == damaged.cached.storage == WHOLE_PAGES
    assert damaged.tokens != warm.tokens
