"""What SGLang's HiCache needs on a machine without a GPU. See README.md.

This module is imported at interpreter start: it must stay free of heavy imports.
"""

from __future__ import annotations

import os


def wanted() -> bool:
    """Whether this process was started for SGLang's CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def active() -> bool:
    """Whether the stand-ins are in force: the CPU engine is wanted and there is no CUDA device.

    Imports torch, so call it only where torch is going to be imported anyway.
    """
    if not wanted():
        return False
    import torch

    return not torch.cuda.is_available()
