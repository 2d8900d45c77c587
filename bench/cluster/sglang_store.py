"""What a server's processes in a prefill host load first: segment data over the storage network.

The only thing that is not as operators have it: here a store is mounted by a backend of the
bench's own (:mod:`.remote`) instead of by a file system.
"""

from __future__ import annotations

import os

from bench.cluster.remote import Link, RemoteBackend
from dualpath_sglang import kvcache
from dualpath_sglang.root import open_root
from dualpath_storage import StoreOptions
from dualpath_storage.backends import Backend

BLOCKS = "BENCH_CLUSTER_BLOCKS"
"""Environment: host:port of the block server."""
_DEPTH, _IO_S = 8, 20.0


def install() -> None:
    """Have every cache of this process read and write over the network."""
    host, _, port = os.environ[BLOCKS].rpartition(":")

    def opened(
        options: StoreOptions, backend: Backend | None = None
    ) -> tuple[StoreOptions, Backend]:
        del backend
        link = Link((host, int(port)), _DEPTH, _IO_S)
        return open_root(options, RemoteBackend(options.root, link))

    kvcache.open_root = opened
