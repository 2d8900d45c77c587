"""What the prefill process is told at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

Mode = Literal["streaming", "host"]
"""Layer by layer into pages, or whole blocks into host memory."""


@dataclass(frozen=True, slots=True)
class Spec:
    """See the module.

    Args:
        mode: how hits are loaded.
        address: of the host.
        settings: of DualPath.
        via: addresses of agents, and those of the proxies in front of them.
        workers: loads at a time.
        deadline_s: of each load.
        store_bytes_per_s: what the host reads from its store.
        checked: whether what comes is compared with its checksums, as it always is.
    """

    mode: Mode
    address: str
    settings: dict[str, str]
    via: dict[str, str] = field(default_factory=dict)
    workers: int = 3
    deadline_s: float = 5.0
    store_bytes_per_s: float = 12e6
    checked: bool = True

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """As it was."""
        return cls(**json.loads(text))
