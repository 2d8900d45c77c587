"""The store as a server has it, with the nodes that read for it, made from its configuration."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.machine import MachineDir
from dualpath_sglang.node.options import NodeError
from dualpath_sglang.node.report import Node
from dualpath_sglang.node.secret import NodeSecret
from dualpath_sglang.node.starter import Membership
from dualpath_sglang.paths.peers import Nearby, PathOptions, Peers
from dualpath_sglang.transport.base import PeerLostError
from dualpath_storage import StoreError


class ServedStore:
    """A cache, the server's place on its machine, and the other nodes.

    Args:
        node: who this process is to others.

    Raises:
        ConfigError, StoreError: it cannot be used as asked; nothing is left behind.
    """

    def __init__(self, config: DualPathConfig, node: Node) -> None:
        with contextlib.ExitStack() as stack:
            membership = Membership(config)
            stack.callback(membership.close)
            self.cache = KVCache(
                config.store_options(),
                index=config.index_source(),
                node=node,
                machine=membership.queue,
            )
            stack.callback(self.cache.close)
            self.others = other_nodes(config, self.cache, membership.machine)
            """Those that read for this server; None where there can be none."""
            if self.others is not None:
                stack.callback(self.others.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Leave. No read may be under way."""
        self._stack.close()


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
        PathOptions(
            config.read_paths,
            config.split_floor,
            ask_for_secret,
            tls,
            options.dscp,
            own,
            machine=config.machine_name,
        ),
    )
