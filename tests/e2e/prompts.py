"""What the suites of streaming mode ask, and how their servers are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tests.support.server import random_tokens
from tests.support.streaming import PAGE_TOKENS

PROMPT = random_tokens(500, seed=1)
OTHER = random_tokens(300, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
NO_OVERLAP = ["--disable-overlap-schedule"]

Models: TypeAlias = Callable[..., Path]
