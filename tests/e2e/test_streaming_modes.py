"""Streaming mode and HiCache mode on one store, and an Engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prompts import OTHER, PROMPT, WHOLE, Models
from tests.support import stores
from tests.support.server import Answer, random_tokens
from tests.support.streaming import PAGE_TOKENS, StreamingServer

pytestmark = pytest.mark.e2e


def hicache(model: Path, folder: Path, root: Path) -> StreamingServer:
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "4"]
    flags += ["--hicache-write-policy", "write_through"]
    flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
    settings = {"prefetch_threshold": PAGE_TOKENS}
    return StreamingServer(model, folder, *flags, root=root, settings=settings)


def settled(server: StreamingServer, pages: int) -> None:
    from tests.support.streaming import wait_for

    wait_for(lambda: stores.block_count(server.root) >= pages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["qwen3", "deepseek_v2", "mellum"],
)
def test_each_mode_restores_what_the_other_stored(kind: str, model: Models, tmp_path: Path) -> None:
    root = tmp_path / "store"
    prompts = [PROMPT, random_tokens(500, seed=3)]
    with StreamingServer(model(kind), tmp_path / "streaming", root=root) as streaming:
        wanted = [streaming.generate(prompt) for prompt in prompts]
        assert [a.cached_tokens for a in wanted] == [0, 0]
        streaming.flush()
        streaming.stop()
    with hicache(model(kind), tmp_path / "hicache", root) as other:
        answers = [other.generate(prompt) for prompt in prompts]
        assert [a.tokens for a in answers] == [a.tokens for a in wanted]
        assert [a.cached.storage for a in answers] == [WHOLE, WHOLE]
        written = [other.generate(OTHER)]
        settled(other, 2 * WHOLE // PAGE_TOKENS + len(OTHER) // PAGE_TOKENS)
        other.stop()
    with StreamingServer(model(kind), tmp_path / "again", root=root) as streaming:
        answer = streaming.generate(OTHER)
        assert answer.tokens == written[0].tokens
        assert answer.cached.storage == 288


def test_both_modes_serve_from_one_store_at_once(model: Models, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with (
        StreamingServer(model("qwen3"), tmp_path / "a", root=root) as first,
        StreamingServer(model("qwen3"), tmp_path / "b", root=root) as second,
    ):
        wanted = first.generate(PROMPT)
        first.flush()
        answer = second.generate(PROMPT)
        assert (answer.tokens, answer.cached.storage) == (wanted.tokens, WHOLE)


@pytest.mark.slow
def test_an_engine_streams_too(model: Models, tmp_path: Path) -> None:
    """`sglang.Engine` takes the same arguments; its processes take the same hooks."""
    import json
    import subprocess
    import sys

    from tests.support.processes import BASE_ENVIRONMENT, REPOSITORY

    program = f"""
import json, sglang
def main():
    engine = sglang.Engine(
        model_path={str(model("qwen3"))!r}, device="cpu", dtype="float32", page_size=16,
        attention_backend="torch_native", sampling_backend="pytorch", max_total_tokens=4096,
        mem_fraction_static=0.3, max_running_requests=4, skip_server_warmup=True,
        hicache_storage_backend="dualpath",
        hicache_storage_backend_extra_config={json.dumps({"root": str(tmp_path / "store")})!r},
    )
    ask = lambda: engine.generate(
        input_ids={PROMPT}, sampling_params={{"temperature": 0, "max_new_tokens": 8}}
    )
    cold = ask()
    engine.flush_cache()
    hit = ask()
    print("RESULT", json.dumps([cold["output_ids"], hit["output_ids"],
                                hit["meta_info"]["cached_tokens"]]))
    engine.shutdown()
if __name__ == "__main__":
    main()
"""
    script = tmp_path / "engine.py"
    script.write_text(program)
    import os

    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **BASE_ENVIRONMENT},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    cold, hit, cached = json.loads(lines[0][7:])
    assert (cold, cached) == (hit, WHOLE)


Result = tuple[Answer, Any]
