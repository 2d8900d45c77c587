"""What a server says of its role, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from dualpath_sglang import served_role
from dualpath_sglang.config import DualPathConfig

ARGS = {
    "disaggregation_mode": "prefill",
    "host": "10.0.0.1",
    "port": 30000,
    "disaggregation_bootstrap_port": 8998,
}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, {"pd_role": "prefill", "url": "http://10.0.0.1:30000", "bootstrap_port": 8998}),
        ({"disaggregation_mode": "null"}, {}),
        # Of a server on several machines, only the first one listens.
        ({"node_rank": 1}, {}),
    ],
)
def test_who_listens_says_so(
    more: dict[str, Any], told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {**ARGS, **more}
    monkeypatch.setattr(served_role, "get_server_args", lambda: args)
    monkeypatch.setattr(
        served_role, "resolution_result", lambda args, name, default: args.get(name, default)
    )
    assert served_role.served_role(DualPathConfig()) == told
