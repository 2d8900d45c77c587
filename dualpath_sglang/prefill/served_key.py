"""What the attention times of this SGLang 0.5.23 process depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import get_parallel, process_model_config

from dualpath_sglang.identity import identify
from dualpath_sglang.plugin import sglang_version
from dualpath_sglang.prefill.profile import ProfileKey
from dualpath_sglang.served_model import served_model


def served_key(server_args: Any) -> ProfileKey:
    """The key of the profile that fits this process."""

    def given(name: str) -> Any:
        return resolution_result(server_args, name, None)

    parallel = get_parallel()
    tp = parallel.attn_tp_size if is_dp_attention_enabled() else parallel.tp_size
    return ProfileKey(
        # Times do not depend on the weights, whose fingerprint takes long.
        model=identify(served_model(None), weights_revision="any").model,
        device=_device(str(given("device"))),
        attention_backend=str(given("prefill_attention_backend") or given("attention_backend")),
        tp=int(tp),
        dtype=str(process_model_config().dtype).removeprefix("torch."),
        sglang=sglang_version(),
    )


def _device(kind: str) -> str:
    if kind.startswith("cuda"):
        return str(torch.cuda.get_device_name())
    name = kind
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads"
