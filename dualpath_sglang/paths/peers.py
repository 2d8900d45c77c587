"""All other nodes that can read for this one, and what is asked of whom.

Who there is comes from the reports in the index. Nothing here waits for the network but
:meth:`Peers.begin`; connections are made in the background.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from dualpath_sglang.index import Report
from dualpath_sglang.paths.peer import Peer, PeerFetch
from dualpath_sglang.paths.reports import NodeReport, nodes_among
from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.scheduling.assign import assign
from dualpath_sglang.scheduling.paths import Share, Side, shorter_queue, split
from dualpath_sglang.streaming.other_paths import LOCAL, NOTHING, Blame
from dualpath_sglang.transport.base import Destination, Fetching, FetchRequest
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.local_client import LocalConnection
from dualpath_storage import Geometry

logger = logging.getLogger(__name__)

Policy: TypeAlias = Literal["split", "shorter_queue", "local", "peer"]
"""Who reads a hit: this node and others at the same time, whoever has the shorter read queue, this
node alone, or another one alone."""

_LOOK_EVERY_S = 0.25
_LEARN_EVERY_S = 0.5
"""Agents report no more often."""
_MOST = 256
_MOST_NOTED = 1024
"""Nodes of another version that are told of."""
_FORGET_S = 5.0
"""A node that is not reported any more is kept for so long."""


@dataclass(frozen=True, slots=True)
class Nearby:
    """This machine's own agent.

    Args:
        id: as it stands in its report.
        socket: where it serves readers of this machine; None when it does not.
    """

    id: str
    socket: Path | None = None


@dataclass(frozen=True, slots=True)
class PathOptions:
    """How other nodes are used.

    Args:
        policy: see :data:`Policy`.
        floor_bytes: a smaller hit is not split.
        secret: shared by all nodes; asked whenever one is connected to, with whether a node has
            refused the last one.
        tls: encrypts, when given.
        dscp: traffic class of what is sent.
        own: this machine's own agent, which is no other node; asked now and then.
        machine: what this machine is called in reports, and so in hints.
    """

    policy: Policy = "split"
    floor_bytes: int = 1 << 20
    secret: Callable[[bool], bytes] = field(default=lambda _: b"", repr=False)
    tls: ssl.SSLContext | None = None
    dscp: int = 0
    own: Callable[[], Nearby | None] = field(default=lambda: None, repr=False)
    machine: str = ""


class Peers:
    """See :class:`~dualpath_sglang.streaming.other_paths.OtherPaths`.

    Args:
        reports: what the nodes of the index told last; None when nobody can say now.
    """

    def __init__(
        self, reports: Callable[[], Mapping[str, Report] | None], options: PathOptions | None = None
    ) -> None:
        self.options = options or PathOptions()
        self.counts: Counter[str] = Counter()
        """Fetches by how they ended, and what went wrong."""
        self._reports = reports
        self._peers: dict[str, Peer] = {}
        self._machines: dict[str, str] = {}
        """By node: what its machine is called."""
        self._seen: dict[str, float] = {}
        self._other_versions: set[str] = set()
        self._learn_at = -math.inf
        self._own: Peer | None = None
        self._own_has_blocks = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dualpath-peers", daemon=True)
        if self.options.policy != "local":
            self._thread.start()

    # -- who reads --------------------------------------------------------------------------

    def shares(
        self, geometry: Geometry, blocks: int, own: Side, asking: Mapping[str, int] = NOTHING
    ) -> Sequence[Share]:
        """See :class:`OtherPaths`."""
        if not blocks:
            return []
        sides = self._sides(geometry, asking)
        policy = self.options.policy
        if policy == "local" or not sides:
            return [Share(own.name, 0, blocks)]
        if policy == "split":
            return split([own, *sides], blocks, geometry.block_bytes, self.options.floor_bytes)
        chosen = shorter_queue(sides if policy == "peer" else [own, *sides])
        return [Share(chosen.name, 0, blocks)]

    def hinted(
        self, geometry: Geometry, keys: Sequence[bytes], hint: ReadHint
    ) -> Sequence[str | None] | None:
        """See :class:`OtherPaths`."""
        if self.options.policy == "local":
            return None
        sides = [self._side_of(machine, geometry, hint.shared) for machine, _ in hint.shares]
        return [sides[i] for i in assign(keys, [weight for _, weight in hint.shares])]

    def _side_of(self, machine: str, geometry: Geometry, shared: bool) -> str | None:
        """Who reads for a machine; of several agents the same one, whoever looks."""
        if machine == self.options.machine:
            own = self._own if shared else None
            return LOCAL if own is None or not own.usable(geometry.id_bytes) else own.name
        with self._lock:
            named = [peer for n, peer in self._peers.items() if self._machines.get(n) == machine]
        return min((p.name for p in named if p.usable(geometry.id_bytes)), default=None)

    def nearby(self, geometry: Geometry) -> str | None:
        """See :class:`OtherPaths`."""
        own = self._own
        if own is None or not self._own_has_blocks or not own.usable(geometry.id_bytes):
            return None
        return own.name

    def is_own(self, side: str) -> bool:
        """See :class:`OtherPaths`."""
        own = self._own
        return own is not None and own.name == side

    def substitute(self, geometry: Geometry) -> str | None:
        """See :class:`OtherPaths`."""
        sides = self._sides(geometry)
        return shorter_queue(sides).name if sides else None

    def _sides(self, geometry: Geometry, asking: Mapping[str, int] = NOTHING) -> list[Side]:
        """Those that can read, with what they are about to be asked for in their queues."""
        sides = [side for peer in self._usable(geometry) if (side := peer.side()).usable]
        if not asking:
            return sides
        return [
            replace(side, queue_bytes=side.queue_bytes + asking.get(side.name, 0)) for side in sides
        ]

    @property
    def usable(self) -> int:
        """How many nodes can be asked now."""
        return len(self._usable(None))

    @property
    def ready(self) -> bool:
        """See :class:`OtherPaths`."""
        return self.usable > 0

    @property
    def bytes_per_s(self) -> float:
        """See :class:`OtherPaths`."""
        if self.options.policy != "split":
            return 0.0
        return sum(peer.rate or 0.0 for peer in self._usable(None))

    def _usable(self, geometry: Geometry | None) -> list[Peer]:
        name = b"" if geometry is None else geometry.id_bytes
        with self._lock:
            peers = list(self._peers.values())
        return [peer for peer in peers if peer.usable(name)]

    # -- fetching ---------------------------------------------------------------------------

    def begin(
        self, side: str, request: FetchRequest, destination: Destination, told: Fetching
    ) -> PeerFetch | None:
        """See :class:`OtherPaths`."""
        peer = self._named(side)
        return None if peer is None else peer.begin(request, destination, told)

    def _named(self, side: str) -> Peer | None:
        own = self._own
        if own is not None and own.name == side:
            return own
        with self._lock:
            return self._peers.get(side)

    def blame(self, side: str, why: Blame) -> None:
        """See :class:`OtherPaths`."""
        peer = self._named(side)
        if peer is not None:
            peer.blame(why)

    # -- who there is -----------------------------------------------------------------------

    def _work(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            pause_s = _LOOK_EVERY_S
            try:
                self.look()
            except Exception:
                logger.exception("Looking for other nodes failed; it goes on")

    def look(self) -> None:
        """Learn of nodes that came and went, and connect to those that are not connected."""
        now = time.monotonic()
        reports = self._reports() if now >= self._learn_at else None
        if reports is not None:
            self._learn_at = now + _LEARN_EVERY_S
            self._learn(reports)
        with self._lock:
            peers = list(self._peers.values())
        for peer in [*peers, *([self._own] if self._own is not None else [])]:
            peer.reach()

    def _learn(self, reports: Mapping[str, Report]) -> None:
        now, nearby = time.monotonic(), self.options.own()
        own = None if nearby is None else nearby.id
        self._know_own(nearby)
        for report in nodes_among(reports.values()):
            if report.name == own:
                self._own_has_blocks = report.has_blocks
                continue
            if report.protocol != VERSION:
                self._note_version(report)
                continue
            peer = self._peer(report)
            if peer is not None:
                self._seen[report.name] = now
                self._machines[report.name] = report.machine
                peer.heed(report)
        gone = [name for name, seen in self._seen.items() if now - seen > _FORGET_S or name == own]
        for name in gone:
            del self._seen[name]
            with self._lock:
                peer = self._peers.pop(name)
                self._machines.pop(name, None)
            logger.info("Node %s is gone", name)
            peer.leave()

    def _know_own(self, nearby: Nearby | None) -> None:
        """This machine's agent may be another one by now, or none."""
        before = self._own
        if nearby is not None and before is not None and before.name == nearby.id:
            return
        self._own, self._own_has_blocks = None, False
        if before is not None:
            before.leave()
        if nearby is not None and nearby.socket is not None:
            path = nearby.socket
            self._own = Peer(
                nearby.id, str(path), lambda _, end: LocalConnection(path, end), self.counts
            )

    def _peer(self, report: NodeReport) -> Peer | None:
        """The node that is reported; None when there are too many."""
        with self._lock:
            peer = self._peers.get(report.name)
        if peer is not None:
            return peer
        options = self.options
        where = PeerAddress(report.host, report.port, tls=options.tls, dscp=options.dscp)

        def dial(refused: bool, deadline: float) -> Connection:
            return Connection(replace(where, secret=options.secret(refused)), deadline)

        peer = Peer(report.name, str(where), dial, self.counts)
        with self._lock:
            if len(self._peers) >= _MOST:
                return None
            self._peers[report.name] = peer
        return peer

    def _note_version(self, report: NodeReport) -> None:
        if report.name in self._other_versions or len(self._other_versions) >= _MOST_NOTED:
            return
        self._other_versions.add(report.name)
        self.counts["version"] += 1
        logger.warning(
            "Node %s is not used: it speaks version %s of the protocol, not %s",
            report.name,
            report.protocol,
            VERSION,
        )

    def close(self) -> None:
        """Let go of all; every fetch ends."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        own, self._own = self._own, None
        for peer in [*peers, *([own] if own is not None else [])]:
            peer.leave()
        for peer in [*peers, *([own] if own is not None else [])]:
            peer.close()
