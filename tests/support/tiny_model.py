"""Tiny models with random weights and a local tokenizer, which SGLang serves on a CPU.

    python -m tests.support.tiny_model OUT qwen3|llama|deepseek_v2|deepseek_v3|mellum [--seed N]

qwen3, llama: MHA with grouped heads. deepseek_v2: MLA, dense. deepseek_v3: MLA, mixture of experts.
mellum: MHA, three layers with a sliding window of 64 tokens and one without.
The same kind and seed give the same weights. Large enough initial weights make greedy answers
depend on every token of the context, so a wrong byte of KV shows. Greedy answers are printable
ASCII and never end by themselves, so they survive decoding and encoding in a conversation.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("qwen3", "llama", "deepseek_v2", "deepseek_v3", "mellum")

VOCABULARY = 512
CONTEXT_TOKENS = 16384
FIRST_TEXT_TOKEN = 5  # below are the special tokens, in the order of SPECIAL_TOKENS
LAST_TEXT_TOKEN = 260  # one token a byte value; ids above have weights but no text
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|turn|>", "<|end|>")

# Role, text and end of each message, tool calls as text. A conversation that goes on keeps its
# rendered prefix. Expressions write the newlines: those after block tags are stripped.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|turn|>tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|turn|>' + message['role'] + '\\n' }}
{%- if message.get('content') is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message.get('content') or [] %}{{ part.get('text', '') }}{% endfor %}
{%- endif %}
{%- for call in message.get('tool_calls') or [] %}
{{- '\\n<call>' + call['function'] | tojson + '</call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""


def make_model(out: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """Write model and tokenizer to `out` and return it. `overrides` change the model config.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown model kind {kind!r}, expected one of {', '.join(KINDS)}")
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(out)
    torch.manual_seed(seed)
    model = _model(kind, overrides).to(torch.float32)
    # All other logits are 0, the largest of 95 random ones is above.
    printable = tokenizer.convert_tokens_to_ids(["\u0120", *map(chr, range(33, 127))])
    unprintable = torch.ones(model.config.vocab_size, dtype=torch.bool)
    unprintable[printable] = False
    with torch.no_grad():
        model.lm_head.weight[unprintable] = 0.0
    model.save_pretrained(out, safe_serialization=True)
    return out


def cached_model(cache: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """`make_model` into a folder of `cache` named after the arguments, made at most once.

    Safe when several processes ask at the same time: the folder appears complete or not at all.
    """
    parts = [kind, f"seed{seed}", *(f"{k}-{v}" for k, v in sorted(overrides.items()))]
    out = cache / "_".join(parts)
    if out.is_dir():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=cache))
    make_model(unfinished, kind, seed, **overrides)
    try:
        unfinished.rename(out)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return out


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The alphabet of byte-level BPE with no merges: every byte of a text is a token.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|turn|>", "<|end|>"],
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _model(kind: str, overrides: dict[str, Any]) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    grouped_heads = {"num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.2}
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "initializer_range": 0.1,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        # SGLang reads the softmax scale of MLA from a YaRN config; factor 1 is plain RoPE.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": CONTEXT_TOKENS,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3": ("Qwen3", grouped_heads),
        "llama": ("Llama", grouped_heads),
        "deepseek_v2": ("DeepseekV2", {**latent, "first_k_dense_replace": 4}),
        "deepseek_v3": (
            "DeepseekV3",
            # The names by which SGLang knows the routing that transformers has built in.
            {
                **latent,
                "first_k_dense_replace": 2,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
            },
        ),
        "mellum": (
            "Mellum",
            {
                **grouped_heads,
                "sliding_window": 64,
                "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                "mlp_layer_types": ["dense"] * 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": 10000.0}
                    for kind in ("sliding_attention", "full_attention")
                },
            },
        ),
    }
    family, particular = settings[kind]
    config_class: Callable[..., Any] = getattr(transformers, f"{family}Config")
    model_class: Callable[..., Any] = getattr(transformers, f"{family}ForCausalLM")
    return model_class(config_class(**{**common, **particular, **overrides}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.out, arguments.kind, arguments.seed))


if __name__ == "__main__":
    main()
