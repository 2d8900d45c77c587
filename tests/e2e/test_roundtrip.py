"""DualPath under a real SGLang server: the same answers from storage as without it.

Each check starts from a store that a server wrote and from the cold answer that it gave. Slots
freed by a flush are overwritten before the hit, and the last check of each model replaces the
stored bytes by others: then, and only then, the answer changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import BASE_ENVIRONMENT
from tests.support.server import Answer, Server, hicache_flags, random_tokens
from tests.support.stores import replace_blocks

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
OTHER = PROMPT[:256] + random_tokens(100, seed=2)
PAGE_TOKENS = 16
WHOLE_PAGES = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
KINDS = ["qwen3", "deepseek_v2"]
BOTH = [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)]
"""For what takes long: the second kind is left to the slow tests."""
OTHER_FORMS = [("page_first", "kernel"), ("layer_first", "direct")]  # than page_first_direct


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {"root": str(root), "capacity": "1GiB", "prefetch_threshold": PAGE_TOKENS, **more}


def dualpath_flags(root: Path, **form: Any) -> list[str]:
    return hicache_flags("dualpath", settings(root), **form)


@dataclass
class Stocked:
    """A running server whose store holds PROMPT and OTHER, and its cold answers to them."""

    model: Path
    root: Path
    server: Server
    cold: Answer
    cold_other: Answer

    def from_storage(self) -> Answer:
        """The answer when only the store can have it."""
        self.server.flush()  # and junk in the freed slots
        return self.server.generate(PROMPT)


@pytest.fixture(scope="module", params=KINDS)
def stocked(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stocked]:
    home, folder = model(request.param), tmp_path_factory.mktemp(request.param)
    with Server(home, dualpath_flags(folder / "store"), log=folder / "server.log") as server:
        cold, cold_other = server.generate(PROMPT), server.generate(OTHER)
        assert cold.cached_tokens == 0
        yield Stocked(home, folder / "store", server, cold, cold_other)


def test_a_repeated_prompt_is_a_hit_of_the_device(stocked: Stocked) -> None:
    stocked.server.generate(PROMPT)
    again = stocked.server.generate(PROMPT)
    assert again.cached.device == WHOLE_PAGES
    assert again.tokens == stocked.cold.tokens


def test_after_a_flush_the_prompt_comes_from_storage(stocked: Stocked) -> None:
    again = stocked.from_storage()
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == stocked.cold.tokens


def test_slots_filled_by_other_prompts_leave_the_hit_right(stocked: Stocked) -> None:
    stocked.server.overwrite_slots()
    again = stocked.server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == stocked.cold.tokens


def test_a_prefix_comes_from_storage_and_the_rest_is_computed(stocked: Stocked) -> None:
    server = stocked.server
    server.flush()
    longer = PROMPT[:300] + random_tokens(60, seed=3)
    cold = server.generate(longer)
    assert cold.cached.storage == 300 // PAGE_TOKENS * PAGE_TOKENS
    server.flush()
    other = server.generate(OTHER)
    assert other.cached.storage == len(OTHER) // PAGE_TOKENS * PAGE_TOKENS
    assert other.tokens == stocked.cold_other.tokens


def test_tenants_with_different_salts_share_nothing(stocked: Stocked) -> None:
    server, prompt = stocked.server, random_tokens(200, seed=4)
    plain = server.generate(prompt)
    for salt in ("tenant-a", "tenant-b"):
        server.flush()
        first = server.generate(prompt, cache_salt=salt)
        assert first.cached_tokens == 0
        assert first.tokens == plain.tokens
    for salt in ("tenant-a", "tenant-b"):
        server.flush()
        again = server.generate(prompt, cache_salt=salt)
        assert again.cached.storage == 200 // PAGE_TOKENS * PAGE_TOKENS
        assert again.tokens == plain.tokens


def test_after_a_kill_and_a_restart_the_prompt_comes_from_storage(stocked: Stocked) -> None:
    stocked.server.restart()
    again = stocked.server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == stocked.cold.tokens


@pytest.mark.parametrize("stocked", BOTH, indirect=True)
@pytest.mark.parametrize(("layout", "io"), OTHER_FORMS, ids=["page_first", "layer_first"])
def test_a_server_with_another_host_layout_reads_the_same_store(
    layout: str, io: str, stocked: Stocked, start_server: Callable[..., Server]
) -> None:
    server = start_server(stocked.model, dualpath_flags(stocked.root, layout=layout, io=io))
    first = server.generate(PROMPT)
    assert first.cached.storage == WHOLE_PAGES
    assert first.tokens == stocked.cold.tokens
    fresh = random_tokens(410, seed=10 + OTHER_FORMS.index((layout, io)))
    cold = server.generate(fresh)
    stocked.server.flush()
    other_layout = stocked.server.generate(fresh)
    assert other_layout.cached.storage == 410 // PAGE_TOKENS * PAGE_TOKENS
    assert other_layout.tokens == cold.tokens


@pytest.mark.parametrize("stocked", BOTH, indirect=True)
def test_another_model_on_the_same_store_shares_nothing(
    stocked: Stocked, model: Callable[..., Path], start_server: Callable[..., Server]
) -> None:
    kind = stocked.model.name.rsplit("_seed", 1)[0]
    retrained = model(kind, seed=1)
    server = start_server(retrained, dualpath_flags(stocked.root))
    first = server.generate(PROMPT)
    assert first.cached_tokens == 0
    assert first.tokens != stocked.cold.tokens
    server.flush()
    again = server.generate(PROMPT)
    assert again.cached.storage == WHOLE_PAGES
    assert again.tokens == first.tokens
    assert stocked.from_storage().tokens == stocked.cold.tokens


@pytest.mark.parametrize("stocked", BOTH, indirect=True)
def test_ranks_store_and_restore_their_shards(
    stocked: Stocked, start_server: Callable[..., Server]
) -> None:
    server = start_server(stocked.model, [*dualpath_flags(stocked.root), "--tp-size", "2"])
    first = server.generate(PROMPT)
    replicated = stocked.model.name.startswith("deepseek")
    assert first.cached.storage == (WHOLE_PAGES if replicated else 0)
    server.flush()
    flushed = server.generate(PROMPT)
    server.restart()
    restarted = server.generate(PROMPT)
    for again in (flushed, restarted):
        assert again.cached.storage == WHOLE_PAGES
        assert again.tokens == first.tokens


@pytest.mark.parametrize("stocked", BOTH, indirect=True)
def test_the_backend_is_attached_and_detached_while_serving(
    stocked: Stocked, start_server: Callable[..., Server]
) -> None:
    server = start_server(stocked.model, [*hicache_flags(), "--admin-api-key", ADMIN_KEY])
    assert server.generate(PROMPT).cached_tokens == 0

    refused, sentence = attach(server, capcity="1GiB", **settings(stocked.root))
    assert refused == 400
    assert 'did you mean "capacity"' in sentence
    for _ in range(2):
        assert attach(server, **settings(stocked.root)) == (200, ATTACHED)
        flush_as_admin(server)
        again = server.generate(PROMPT)
        assert again.cached.storage == WHOLE_PAGES
        assert again.tokens == stocked.cold.tokens

        flush_as_admin(server)
        assert as_admin(server, "DELETE", "/hicache/storage-backend")[0] == 200
        without = server.generate(PROMPT)
        assert without.cached_tokens == 0
        assert without.tokens == stocked.cold.tokens


ADMIN_KEY = "key"
ATTACHED = "HiCache storage backend attached.\nAttached HiCache storage backend successfully.\n"


def attach(server: Server, **extra: Any) -> tuple[int, str]:
    flush_as_admin(server)
    body = {
        "hicache_storage_backend": "dualpath",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    return as_admin(server, "PUT", "/hicache/storage-backend", body)


def flush_as_admin(server: Server) -> None:
    """Empty the upper tiers once the server is idle."""
    deadline = time.monotonic() + 60
    while as_admin(server, "POST", "/flush_cache")[0] != 200:
        assert time.monotonic() < deadline, "the server does not become idle"
        time.sleep(0.05)


def as_admin(
    server: Server, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, str]:
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("stocked", BOTH, indirect=True)
def test_sglangs_failures_and_delays_never_change_an_answer(
    stocked: Stocked, start_server: Callable[..., Server]
) -> None:
    env = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.4",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
    }
    server = start_server(stocked.model, dualpath_flags(stocked.root), env=env)
    seen: list[bool] = []
    while len(seen) < 8 or (len(set(seen)) == 1 and len(seen) < 60):
        answer = server.generate(PROMPT)
        assert answer.tokens == stocked.cold.tokens
        seen.append(answer.cached.storage > 0)
        server.flush()
    assert set(seen) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("stocked", KINDS[:1], indirect=True)  # an engine starts cold
def test_an_engine_restores_what_a_server_stored(stocked: Stocked, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent(ENGINE))
    arguments = {
        "model_path": str(stocked.model),
        "settings": json.dumps(settings(stocked.root)),
        "prompt": PROMPT,
    }
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        env={**os.environ, **BASE_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reply = json.loads(done.stdout.splitlines()[-1])
    assert reply["meta_info"]["cached_tokens_details"]["storage"] == WHOLE_PAGES
    assert tuple(reply["output_ids"]) == stocked.cold.tokens


ENGINE = """
    import json, sys
    import sglang

    if __name__ == "__main__":
        given = json.loads(sys.argv[1])
        engine = sglang.Engine(
            model_path=given["model_path"],
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            page_size=16,
            max_total_tokens=4096,
            mem_fraction_static=0.3,
            skip_server_warmup=True,
            enable_cache_report=True,
            enable_hierarchical_cache=True,
            hicache_storage_backend="dualpath",
            hicache_storage_backend_extra_config=given["settings"],
            hicache_storage_prefetch_policy="wait_complete",
        )
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        reply = engine.generate(input_ids=given["prompt"], sampling_params=sampling)
        engine.shutdown()
        print(json.dumps(reply))
"""


def test_other_bytes_in_the_store_change_the_answer(stocked: Stocked) -> None:
    """The control of all the above: answers do depend on what is read from the store."""
    stocked.server.kill9()
    replaced = replace_blocks(stocked.root)
    assert replaced > 0
    stocked.server.start()
    answer = stocked.server.generate(PROMPT)
    assert answer.cached.storage == WHOLE_PAGES
    assert answer.tokens != stocked.cold.tokens
