"""Frames in and out of a socket, each with its seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.base import PeerLostError, Span
from dualpath_sglang.transport.frames import DATA_HEAD, HEAD_BYTES, Head, Kind
from dualpath_sglang.transport.seal import Seals
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_sglang.transport.turns import URGENT

_SCRATCH_BYTES = 1 << 16


class Wire:
    """A connection whose ends trust each other. One thread may receive while others send.

    Deadlines are monotonic seconds, and :class:`PeerLostError` means that the connection is of no
    use any more.

    Args:
        io: its socket.
        seals: of this end.
    """

    def __init__(self, io: SocketIo, seals: Seals) -> None:
        self.io = io
        self._seals = seals

    # -- sending ----------------------------------------------------------------------------

    def send(
        self,
        kind: Kind,
        request: int,
        content: bytes = b"",
        *,
        begin_by: float,
        layer: int = 0,
        block: int = 0,
        payload: Sequence[memoryview] = (),
        late: int = URGENT,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """One frame, in its turn.

        Args:
            begin_by: when its first byte has to be on its way.
            layer, block: of its head.
            payload: comes after the seal.
            late: see :meth:`~dualpath_sglang.transport.turns.Turns.turn`.
            wanted: asked when its turn comes; nothing is sent if not.

        Raises:
            TimeoutError: nothing of it could be sent by then; the connection is as it was.
        """
        seal = self._seals.sent
        length = len(content) + seal.size + sum(len(part) for part in payload)
        head = Head(kind, request, layer, block, length).pack()
        with self.io.turn(late, begin_by):
            if not wanted():
                return
            front = head + content
            self.io.send_now([front + seal.over(front), *payload], begin_by)
            seal.passed()

    # -- receiving --------------------------------------------------------------------------

    def receive_head(self, deadline: float) -> Head:
        """The head of the next frame. Not yet known to be from the peer."""
        head = Head.unpack(self.io.receive(HEAD_BYTES, deadline))
        if head.length < self._seals.received.size:
            raise PeerLostError("a frame came that is too short")
        return head

    def receive_content(self, head: Head, deadline: float) -> bytes:
        """What comes after a head: of all frames but DATA."""
        seal = self._seals.received
        body = self.io.receive(head.length, deadline)
        content = body[: -seal.size]
        digest = seal.begin()
        digest.update(head.pack())
        digest.update(content)
        seal.check(digest, body[-seal.size :])
        return content

    def pass_over(self, head: Head, deadline: float) -> None:
        """As :meth:`receive_content`, for what nobody wants: takes no memory."""
        seal = self._seals.received
        digest = seal.begin()
        digest.update(head.pack())
        left = head.length - seal.size
        while left:
            part = self.io.receive(min(left, _SCRATCH_BYTES), deadline)
            digest.update(part)
            left -= len(part)
        seal.check(digest, self.io.receive(seal.size, deadline))

    def receive_front(
        self, head: Head, layer_bytes: int, deadline: float
    ) -> tuple[Span, tuple[int, ...]]:
        """What a DATA frame says of its payload, which comes next, and its checksums."""
        seal = self._seals.received
        fixed = self.io.receive(DATA_HEAD.size, deadline)
        span = frames.data_span(head, fixed, layer_bytes, seal.size)
        rest = memoryview(self.io.receive(8 * span.layer_blocks + seal.size, deadline))
        packed = rest[: -seal.size]
        digest = seal.begin()
        for part in (head.pack(), fixed, packed):
            digest.update(part)
        seal.check(digest, rest[-seal.size :])
        return span, frames.parse_checksums(packed)

    def discard(self, size: int, deadline: float) -> None:
        """Payload that nobody wants."""
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self.io.receive_into(part, deadline)
            size -= len(part)
