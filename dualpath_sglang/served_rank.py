"""Which part of the model this process serves, as SGLang 0.5.23 says it.

HiCache mode hears it from SGLang's cache controller; a linker has to ask. The answers must be the
same, or the two modes would not find each other's pages.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import get_parallel

from dualpath_sglang.shards import Rank


def this_rank(params: Any, *, replicated: bool) -> Rank:
    """The place of this process.

    Args:
        params: SGLang's ``CacheInitParams``.
        replicated: tensor-parallel ranks hold the same KV.
    """
    parallel = get_parallel()
    if is_dp_attention_enabled():
        tp = (parallel.attn_tp_rank, parallel.attn_tp_size)
    else:
        tp = (parallel.tp_rank, parallel.tp_size)
    cp = (0, 1)
    if (group := params.attn_cp_cache_group) is not None:
        cp = (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
    return Rank(
        tp=(int(tp[0]), int(tp[1])),
        pp=(int(parallel.pp_rank), int(parallel.pp_size)),
        cp=cp,
        dcp=(int(parallel.attn_dcp_rank), int(parallel.attn_dcp_size)),
        replicated=replicated,
    )
