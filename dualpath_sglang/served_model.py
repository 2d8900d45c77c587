"""What SGLang 0.5.23 says about the model that this process serves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import get_server_args, process_model_config

from dualpath_sglang.identity import Checkpoint, ModelFacts

_SETTINGS = (
    "json_model_override_args",
    "kv_cache_dtype",
    "model_impl",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "qsa_indexer_dtype",
    "quantization",
    "quantize_and_serve",
    "rl_quant_profile",
    "uno_lora_path",
)
"""Launch settings that change the bytes of a page although model, dtype and shape stay."""

_NEUTRAL = ("auto", "bf16", "bfloat16")
"""Values that the pool's own dtype tells already."""


def served_model(model_name: str | None) -> ModelFacts:
    """Everything that decides which KV this process computes.

    Args:
        model_name: used as the checkpoint's path where SGLang has published no arguments, as in
            a controller that was built by hand.
    """
    try:
        args = get_server_args()
    except ValueError:
        args = None
    if args is None:
        return ModelFacts(Checkpoint(model_name or ""))

    def given(name: str) -> Any:
        return resolution_result(args, name, None)

    settings: dict[str, Any] = {
        name: value for name in _SETTINGS if (value := given(name)) not in _NEUTRAL
    }
    settings["compute_dtype"] = str(process_model_config().dtype)
    settings["kv_scales"] = _content(given("quantization_param_path"))
    checkpoint = _checkpoint(args, given("model_path"), given("revision"))
    draft = None
    if given("speculative_algorithm") not in (None, "NGRAM"):
        draft_path = given("speculative_draft_model_path")
        draft_revision = given("speculative_draft_model_revision")
        draft = _checkpoint(args, draft_path, draft_revision) if draft_path else checkpoint
    adapters = [getattr(ref, "lora_path", None) or str(ref) for ref in given("lora_paths") or ()]
    return ModelFacts(
        checkpoint,
        settings,
        draft=draft,
        adapters=[_checkpoint(args, path, None) for path in adapters],
        random_weights=given("load_format") == "dummy",
    )


def _checkpoint(args: Any, path: str, revision: str | None) -> Checkpoint:
    return Checkpoint(path, revision, resolution_result(args, "download_dir", None))


def _content(path: str | None) -> str | None:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
