"""The tiny models: reproducible, and made for conversations."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_model import LAST_TEXT_TOKEN, cached_model, make_model

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "größe?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "stat", "arguments": "{}"}}],
    },
    {"role": "tool", "name": "stat", "content": "4096\n"},
    {"role": "assistant", "content": "4096 bytes."},
]


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model("qwen3"))


def test_each_turn_of_a_conversation_extends_the_text_before_it(tokenizer):
    texts = [
        tokenizer.apply_chat_template(CONVERSATION[:turns], tokenize=False)
        for turns in range(1, len(CONVERSATION) + 1)
    ]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    asked = tokenizer.apply_chat_template(
        CONVERSATION[:-1], tokenize=False, add_generation_prompt=True
    )
    assert texts[-1].startswith(asked)


def test_every_part_of_a_message_reaches_the_model(tokenizer):
    tools = [{"type": "function", "function": {"name": "stat"}}]
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, tools=tools)
    for part in ("Be brief.", "größe?", '<call>{"name": "stat"', "4096\n", "4096 bytes.", "tools"):
        assert part in text


def test_any_text_survives_the_tokenizer(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False) + "  \t\n\x00 漢字"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) <= LAST_TEXT_TOKEN


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    weights = [
        (make_model(tmp_path / str(i), "llama", seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((3, 3, 4))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_model_asked_for_twice_at_once_is_made_whole(tmp_path):
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(cached_model(tmp_path, "llama")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert [entry.name for entry in tmp_path.iterdir()] == [made[0].name]
    assert (made[0] / "model.safetensors").stat().st_size > 1 << 20


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="deepseek_v2"):
        make_model(tmp_path, "gpt")
