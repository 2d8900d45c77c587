"""Which part of the model a rank holds, as it stands in a geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's place in the parallel layout of its server.

    Data-parallel replicas hold the same bytes for the same tokens, so their rank is left out.

    Args:
        tp, pp, cp, dcp: (rank, size) of tensor, pipeline, prefill-context and decode-context
            parallelism.
        replicated: tensor-parallel ranks hold the same KV (latent attention), and one writes it.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)
    replicated: bool = False

    @classmethod
    def of(cls, config: Any) -> Rank:
        """From SGLang's ``HiCacheStorageConfig``."""
        return cls(
            tp=(int(config.tp_rank), int(config.tp_size)),
            pp=(int(config.pp_rank), int(config.pp_size)),
            cp=(int(config.attn_cp_rank), int(config.attn_cp_size)),
            dcp=(int(config.dcp_rank), int(config.dcp_size)),
            replicated=bool(config.is_mla_model),
        )

    def writes(self, sharded: bool) -> bool:
        """Whether this rank writes a pool: its own shard always, a replica if it is the first."""
        return sharded or self.tp[0] == self.dcp[0]

    def shard(self, *, sharded: bool, layers: tuple[int, int]) -> str:
        """The shard field of a geometry; empty when every rank holds the same bytes.

        Args:
            sharded: tensor-parallel ranks hold different bytes.
            layers: the model's layers ``[first, end)`` of this pipeline stage.
        """
        parts = [("tp", self.tp)] if sharded else []
        parts += [("cp", self.cp), ("dcp", self.dcp), ("pp", self.pp)]
        named = [f"{name}{rank}/{size}" for name, (rank, size) in parts if size > 1]
        if self.pp[1] > 1:
            named.append(f"layers{layers[0]}-{layers[1]}")
        return ",".join(named)
