"""The nodes' secret, where it must not show, and where it must not be missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.paths.peers import PathOptions
from dualpath_sglang.second_path import other_nodes
from dualpath_sglang.transport.base import PeerLostError
from dualpath_sglang.transport.client import PeerAddress
from dualpath_sglang.transport.server import ServerOptions

SECRET = b"nobody may read this"


def test_it_shows_in_no_text() -> None:
    for options in (
        ServerOptions(secret=SECRET),
        PeerAddress("host", 1, SECRET),
        PathOptions(secret=lambda _: SECRET),
    ):
        assert SECRET.decode() not in repr(options)
        assert SECRET.decode() not in str(options)


def test_nobody_is_called_without_it(tmp_path: Path) -> None:
    """An index that does not say it now is no reason to trust whoever asks for no proof."""
    said: list[bytes | Exception] = [IndexUnavailableError("of the test"), b"", SECRET]

    def secret(_: bytes) -> bytes:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache: Any = SimpleNamespace(nodes=lambda: None, index=SimpleNamespace(secret=secret))
    config = DualPathConfig(root=tmp_path, index="redis://127.0.0.1:1/0")
    peers = other_nodes(config, cache, None)
    assert peers is not None
    try:
        for _ in range(2):
            with pytest.raises(PeerLostError, match="secret"):
                peers.options.secret(False)
        assert peers.options.secret(False) == SECRET
    finally:
        peers.close()
