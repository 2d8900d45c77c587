"""Loaded into servers of prefill/decode tests: counts what a prefill server sends to decode.

`Server(..., env=transfers.env)` has every transfer appended, as its bytes, to a file.
Faults and their trace (server_faults.py) are loaded beside it where the environment asks for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support import server_faults

_FILE = "SGLANG_CPU_TRANSFERS"


class Transfers:
    """The test's side: KV that a prefill server has sent. Call `env` for its environment."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def env(self) -> dict[str, str]:
        return {
            _FILE: str(self._file),
            "SGLANG_CPU_TEST_HOOKS": "tests.support.pd_hooks:install",
        }

    @property
    def sent_bytes(self) -> int:
        """Since the server started: payload of KV as handed to the transfer engine."""
        if not self._file.exists():
            return 0
        return sum(int(line) for line in self._file.read_text().split())


def install() -> None:
    """Called in every process of the server."""
    if server_faults.FOLDER in os.environ:
        server_faults.install()
    if file := os.environ.get(_FILE):
        _count_transfers(file)


def _count_transfers(file: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"
    metadata = threading.local()

    def around_metadata(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        metadata.now = True
        try:
            return original(*args, **kwargs)
        finally:
            metadata.now = False

    def before(owner: Any, session: str, blocks: Iterable[Any]) -> tuple[Any, Any]:
        blocks = list(blocks)
        if not getattr(metadata, "now", False):
            # One short write to a file opened for appending is never torn by another.
            with Path(file).open("a") as lines:
                lines.write(f"{sum(size for _, _, size in blocks)}\n")
        return (owner, session, blocks), {}

    HookRegistry.register(f"{manager}.send_aux", around_metadata, HookType.AROUND)
    HookRegistry.register(f"{manager}._transfer_data", before, HookType.BEFORE)
