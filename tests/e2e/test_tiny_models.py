"""The tiny models on SGLang on the CPU answer as transformers does, which is the right answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import Server, random_tokens

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)


def greedy_by_transformers(model: Path, count: int) -> tuple[int, ...]:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        output = network.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("kind", ["qwen3", "llama", "deepseek_v2", "deepseek_v3"])
def test_answers_equal_those_of_transformers(
    kind: str, model: Callable[..., Path], start_server: Callable[..., Server]
) -> None:
    server = start_server(model(kind))
    answer = server.generate(PROMPT, max_new_tokens=24)
    assert answer.tokens == greedy_by_transformers(model(kind), 24)
    assert answer.cached_tokens == 0
