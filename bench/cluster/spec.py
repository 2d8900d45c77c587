"""What a process in a host is told when it starts, and the cache that it opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cluster.model import MODELS, Model
from bench.cluster.remote import Link, RemoteBackend
from dualpath_sglang.index.redis import RedisSettings
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage import StoreOptions

MIB = 1 << 20
STORE_BYTES = 3 << 30
_SEGMENT_BYTES = 32 * MIB
_LOOKUP_S = 2.0
_IO_S = 20.0
_DEPTH = 4
DSCP = 8
"""Of what agents send."""
SECRET = b"what all hosts of the bench know"


@dataclass(frozen=True, slots=True)
class Peering:
    """An agent that a PE may ask: name of its host, and where it listens."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A process of the bench.

    Args:
        name: of its host.
        model: of :data:`MODELS`.
        root: of the store, as all hosts see it.
        redis: address of the index.
        blocks: where the block server listens; None for who sits on the storage host.
        address: own one in the compute network.
        system: of a PE: how it loads, see :data:`bench.cluster.engine.SYSTEMS`.
        agent_bytes: of a DE: most memory for blocks.
        loads: of a PE: hits that are loaded at a time.
        peers: of a PE: agents of DEs.
    """

    name: str
    model: str
    root: str
    redis: str
    blocks: tuple[str, int] | None = None
    address: str = ""
    system: str = ""
    agent_bytes: int = 0
    loads: int = 4
    peers: Sequence[Peering] = ()

    @property
    def computed(self) -> Model:
        """The model itself."""
        return MODELS[self.model]

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostSpec:
        """Inverse of :meth:`to_json`."""
        fields = json.loads(text)
        fields["blocks"] = None if fields["blocks"] is None else tuple(fields["blocks"])
        fields["peers"] = [Peering(**peer) for peer in fields["peers"]]
        return cls(**fields)

    def stream_options(self) -> StreamOptions:
        """How hits are streamed: I/Os of one layer first, of four layers when under way."""
        size = self.computed.layer_bytes
        return StreamOptions(
            staging_bytes=32 * MIB,
            queue_depth=_DEPTH,
            io_bytes=4 * size,
            first_io_bytes=size,
            piece_bytes=MIB,
        )


@dataclass(slots=True)
class Opened:
    """A cache, and the link that its bytes come over."""

    cache: KVCache
    link: Link | None

    @property
    def read_bytes(self) -> int:
        """That came over the storage network."""
        return 0 if self.link is None else self.link.read_bytes

    def close(self) -> None:
        self.cache.close()
        if self.link is not None:
            self.link.close()


def open_cache(spec: HostSpec, *, writer: bool) -> Opened:
    """The store, over the storage network unless this is the storage host.

    Raises:
        StoreError: it cannot be used.
    """
    root = Path(spec.root)
    options = StoreOptions(
        root,
        capacity_bytes=STORE_BYTES,
        min_free_fraction=0.0,
        segment_bytes=_SEGMENT_BYTES,
        io_threads=_DEPTH,
        direct_io="off",
        read_timeout_s=_IO_S,
        write_timeout_s=_IO_S,
        lookup_timeout_s=_LOOKUP_S,
        max_io_bytes=MIB,
        read_only=not writer,
    )
    index = RedisSource(RedisSettings.parse(spec.redis), _LOOKUP_S)
    if spec.blocks is None:
        return Opened(KVCache(options, index=index), None)
    link = Link(spec.blocks, _DEPTH, _IO_S)
    return Opened(KVCache(options, RemoteBackend(root, link), index=index), link)
