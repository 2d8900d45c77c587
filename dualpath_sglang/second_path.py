"""What a server knows of other nodes that read for it, made from its configuration."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.machine import MachineDir
from dualpath_sglang.node.options import NodeError
from dualpath_sglang.node.secret import NodeSecret
from dualpath_sglang.paths.peers import Nearby, PathOptions, Peers
from dualpath_sglang.transport.base import PeerLostError
from dualpath_storage import StoreError


def other_nodes(config: DualPathConfig, cache: KVCache, machine: MachineDir | None) -> Peers | None:
    """Those that the index reports; None where there can be none.

    Args:
        machine: this one, whose own agent is no other node.

    Raises:
        ConfigError: the settings of the nodes cannot be used.
        StoreError: the files for TLS cannot be used.
    """
    options = config.node_options()
    if options is None or config.read_paths == "local":
        return None
    secret = NodeSecret(options.secret)

    def ask_for_secret(refused: bool) -> bytes:
        if refused or not secret.value:
            with contextlib.suppress(IndexUnavailableError):
                secret.look(cache.index)
        if not secret.value:  # nodes always have one: who wants none is no node
            raise PeerLostError("the index does not say what the nodes' secret is")
        return secret.value

    def own() -> Nearby | None:
        info = None if machine is None else machine.info()
        return None if info is None else Nearby(info.id, Path(info.socket) if info.socket else None)

    try:
        tls = options.client_tls()
    except NodeError as error:
        raise StoreError(str(error)) from error
    return Peers(
        cache.nodes,
        PathOptions(config.read_paths, config.split_floor, ask_for_secret, tls, options.dscp, own),
    )
