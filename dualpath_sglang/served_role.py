"""What this server is in prefill/decode disaggregation, as SGLang 0.5.23 says it: for reports.

A router finds its engines by these reports.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import get_server_args

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.node.listen import address_towards, joined
from dualpath_sglang.node.report import own_address

_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")


def served_role(config: DualPathConfig) -> dict[str, str | int]:
    """``pd_role``, ``url`` and, of a prefill server, ``bootstrap_port``; nothing without roles."""
    try:
        args = get_server_args()
    except ValueError:
        args = None
    if args is None:
        return {}

    def given(name: str) -> Any:
        return resolution_result(args, name, None)

    role = given("disaggregation_mode")
    if given("node_rank"):
        return {}  # of a server on several machines the first one has the address
    if role not in ("prefill", "decode"):
        return {}
    scheme = "https" if given("ssl_certfile") else "http"
    host = given("host") or ""
    if host in _EVERYWHERE:
        host = _reachable(config)
    told: dict[str, str | int] = {
        "pd_role": role,
        "url": f"{scheme}://{joined(host.strip('[]'), int(given('port')))}",
    }
    if role == "prefill":
        told["bootstrap_port"] = int(given("disaggregation_bootstrap_port"))
    return told


def _reachable(config: DualPathConfig) -> str:
    """The address by which others reach a server that listens everywhere.

    The one that SGLang was told, where KV comes and goes; else the one towards the index.
    """
    told = os.environ.get("SGLANG_HOST_IP") or os.environ.get("HOST_IP")
    if told:
        return told
    options = config.node_options()
    if options is not None:
        try:
            return address_towards(*options.index_address)
        except OSError:
            pass
    return own_address()
