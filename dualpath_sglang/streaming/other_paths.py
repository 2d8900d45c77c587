"""What the streamer needs of other nodes that read for it; see :mod:`dualpath_sglang.paths`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.scheduling.paths import Share, Side
from dualpath_sglang.transport.base import Destination, Fetching, FetchRequest
from dualpath_storage import Geometry

LOCAL = ""
"""The name of this node among the sides of a read."""
NOTHING: Mapping[str, int] = MappingProxyType({})


class Blame(enum.Enum):
    """What a node may have done wrong."""

    BAD = "bad"
    """Something that it sent does not have its checksum."""
    LATE = "late"
    """Nothing came for too long, or so little that it would have been too late."""


class Going(Protocol):
    """A fetch under way."""

    def cancel(self) -> None:
        """Give it up; nothing writes to its destination afterwards. May wait a little."""
        ...


class OtherPaths(Protocol):
    """Nodes that read blocks and pass them on. Thread-safe; nothing here raises."""

    def shares(
        self, geometry: Geometry, blocks: int, own: Side, asking: Mapping[str, int] = NOTHING
    ) -> Sequence[Share]:
        """Who reads which run of a hit; from memory, without waiting.

        Args:
            own: this node, named :data:`LOCAL`.
            asking: by side: bytes that it is about to be asked for.

        Returns:
            Contiguous runs in the order of the blocks, what this node reads first.
        """
        ...

    def hinted(
        self, geometry: Geometry, keys: Sequence[bytes], hint: ReadHint
    ) -> Sequence[str | None] | None:
        """Who reads each block of a hit by a hint; from memory, without waiting.

        Returns:
            By block: the agent of the node that every server finds for it, this machine's own
            among them; :data:`LOCAL` for this machine when its agent cannot be asked, or need
            not be; None when the node is not known, or cannot be asked now. None altogether when
            hints are not followed here.
        """
        ...

    def nearby(self, geometry: Geometry) -> str | None:
        """This machine's own agent, if it may have blocks in memory; None when it has not.

        It is asked only for what is there already.
        """
        ...

    def is_own(self, side: str) -> bool:
        """Whether a side is this machine's own agent."""
        ...

    def substitute(self, geometry: Geometry) -> str | None:
        """A node that can be asked for what this one does not get read; None when there is none."""
        ...

    def begin(
        self, side: str, request: FetchRequest, destination: Destination, told: Fetching
    ) -> Going | None:
        """Ask a node for blocks; None when it cannot be asked now. May wait for the network."""
        ...

    def blame(self, side: str, why: Blame) -> None:
        """A node did not do what it should."""
        ...

    @property
    def ready(self) -> bool:
        """Whether anybody could be asked now."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """What all other nodes together are known to bring; 0 when nothing is known."""
        ...


class Alone:
    """No other nodes. See :class:`OtherPaths`."""

    ready = False
    bytes_per_s = 0.0

    def shares(
        self, geometry: Geometry, blocks: int, own: Side, asking: Mapping[str, int] = NOTHING
    ) -> Sequence[Share]:
        """This node reads everything."""
        del geometry, asking
        return [Share(own.name, 0, blocks)] if blocks else []

    def hinted(
        self, geometry: Geometry, keys: Sequence[bytes], hint: ReadHint
    ) -> Sequence[str | None] | None:
        """None."""
        del geometry, keys, hint
        return None

    def nearby(self, geometry: Geometry) -> str | None:
        """None."""
        del geometry
        return None

    def is_own(self, side: str) -> bool:
        """There is none."""
        del side
        return False

    def substitute(self, geometry: Geometry) -> str | None:
        """None."""
        del geometry
        return None

    def begin(
        self, side: str, request: FetchRequest, destination: Destination, told: Fetching
    ) -> Going | None:
        """None."""
        del side, request, destination, told
        return None

    def blame(self, side: str, why: Blame) -> None:
        """Nobody is."""
        del side, why
