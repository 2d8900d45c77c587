"""One connection of a server: lets the other end in, and answers what it asks.

It has one thread that receives, and one for each fetch that is answered. Those send piece by piece
and in turns, so that a short fetch does not wait for a long one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Protocol

from dualpath_sglang.transport import frames
from dualpath_sglang.transport.answer import Answer
from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    Missing,
    PeerLostError,
    Piece,
    RefusedError,
    Served,
)
from dualpath_sglang.transport.frames import Head, Kind
from dualpath_sglang.transport.socket_io import shut_down
from dualpath_sglang.transport.wire import Wire

logger = logging.getLogger(__name__)

_BODY_S = 10.0
_END_S = 15.0
"""Longer than a piece may stall that is under way."""
_FOREVER = float("inf")


class Host(Protocol):
    """What a connection needs of its server."""

    @property
    def closed(self) -> bool:
        """Whether all connections are to end."""
        ...

    def admit(self, peer: Peer, sock: socket.socket) -> Wire:
        """The connection, once its other end is trusted.

        Raises:
            RefusedError, PeerLostError, OSError: it is not.
        """
        ...

    def refused(self, peer: Peer, error: Exception) -> None:
        """A connection was not let in."""
        ...

    def gone(self, peer: Peer) -> None:
        """A connection has ended, and its thread ends."""
        ...

    def take(self, request_bytes: int, under_way: int) -> bool:
        """Whether one more fetch of a connection may be taken on; it counts until :meth:`give`."""
        ...

    def give(self, request_bytes: int) -> None:
        """A fetch is over."""
        ...

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to answer."""
        ...

    def load(self) -> Load:
        """What is still to be read from storage."""
        ...

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the server's counts."""
        ...


class Peer:
    """The other end of a connection that was accepted.

    Args:
        host: its server.
        sock: still without TLS.
        address: where it comes from.
    """

    def __init__(self, host: Host, sock: socket.socket, address: str) -> None:
        self.address = address
        self._host = host
        self._sock = sock
        self._shut = False
        self._wire: Wire | None = None
        self._lock = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._thread = threading.Thread(target=self._run, name="dualpath-peer", daemon=True)

    def start(self) -> None:
        """Begin; RuntimeError when there is no thread to be had."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Until it has ended; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether anything is being answered."""
        return bool(self._answers)

    def shut(self) -> None:
        """End it, whatever is under way in other threads."""
        self._shut = True
        shut_down(self._sock)

    def wrapped(self, sock: socket.socket) -> None:
        """From now on the connection is this socket."""
        self._sock = sock
        if self._shut:  # it may have been the other one
            shut_down(sock)

    def _run(self) -> None:
        try:
            self._wire = self._host.admit(self, self._sock)
        except (RefusedError, PeerLostError, OSError) as error:
            self._host.refused(self, error)
            return
        except Exception:
            logger.exception("Letting %s in failed", self.address)
            return
        finally:
            if self._wire is None:
                self._sock.close()
                self._host.gone(self)
        try:
            self._receive(self._wire)
        except PeerLostError as error:
            logger.debug("The connection from %s ended: %s", self.address, error)
        except Exception:
            logger.exception("The connection from %s failed", self.address)
        finally:
            self._end(self._wire)

    def _end(self, wire: Wire) -> None:
        try:
            with self._lock:
                answers = list(self._answers.values())
            wire.io.shut()
            for answer in answers:
                answer.cancel()
            for answer in answers:
                answer.join()
        finally:
            wire.io.close()
            self._host.gone(self)

    # -- receiving --------------------------------------------------------------------------

    def _receive(self, wire: Wire) -> None:
        while not self._host.closed:
            wire.io.readable(_FOREVER)
            deadline = time.monotonic() + _BODY_S
            head = wire.receive_head(deadline)
            if head.kind is Kind.FETCH:
                self._take_fetch(wire, head, deadline)
            elif head.kind is Kind.CANCEL:
                wire.receive_content(head, deadline)
                with self._lock:
                    cancelled = self._answers.get(head.request)
                if cancelled is not None:
                    cancelled.cancel()
            elif head.kind is Kind.PING:
                wire.receive_content(head, deadline)
                self._host.count("asked")
                self._say(Kind.LOAD, head.request)
            else:
                raise PeerLostError("it sent what only a server sends")

    def _take_fetch(self, wire: Wire, head: Head, deadline: float) -> None:
        size = head.length
        with self._lock:
            if head.request in self._answers:
                raise PeerLostError("it used a number twice")
            under_way = len(self._answers)
        if not self._host.take(size, under_way):
            wire.pass_over(head, deadline)
            self._host.count("busy")
            self._say(Kind.END, head.request, End.BUSY)
            return
        try:
            request = frames.parse_fetch(wire.receive_content(head, deadline))
            answer = _Answer(self, wire, head.request, request, size)
            with self._lock:
                self._answers[head.request] = answer
        except BaseException:
            self._host.give(size)
            raise
        try:
            answer.start()
        except RuntimeError:  # no more threads for now
            self.ended(answer, End.BUSY)

    # -- sending ----------------------------------------------------------------------------

    def _say(self, kind: Kind, number: int, end: End = End.OK) -> None:
        """An END or a LOAD. A peer that does not take even that is given up."""
        assert self._wire is not None
        content = frames.load_body(self._host.load())
        begin_by = time.monotonic() + _END_S
        try:
            self._wire.send(kind, number, content, begin_by=begin_by, layer=end.value)
        except (TimeoutError, PeerLostError):
            self.shut()  # it would wait for what does not come

    def ended(self, answer: _Answer, end: End) -> None:
        """Say how a fetch ended, and then forget it: until it has heard, it counts."""
        try:
            self._host.count(end.name.lower())
            self._say(Kind.END, answer.number, end)
        except Exception:
            logger.exception("The end of a fetch could not be said")
            self.shut()
        finally:
            with self._lock:
                del self._answers[answer.number]
            self._host.give(answer.request_bytes)

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to answer."""
        return self._host.serve(request)

    def sent(self, size: int) -> None:
        """So many bytes of payload."""
        self._host.count("bytes", size)


class _Answer(Answer):
    """See :class:`Answer`.

    Args:
        request_bytes: that it takes of the server's budget.
    """

    def __init__(
        self, peer: Peer, wire: Wire, number: int, request: FetchRequest, request_bytes: int
    ) -> None:
        super().__init__(number, request)
        self.request_bytes = request_bytes
        self._peer = peer
        self._wire = wire

    def serve(self) -> contextlib.AbstractContextManager[Served] | End:
        return self._peer.serve(self.request)

    def broke(self) -> None:
        self._wire.io.shut()

    def ended(self, end: End) -> None:
        self._peer.ended(self, end)

    def send(self, part: Piece | Missing) -> None:
        if isinstance(part, Missing):
            content = frames.missing_body(part.blocks)
            self._wire.send(Kind.MISSING, self.number, content, begin_by=self.deadline)
            return
        span = part.span
        self._wire.send(
            Kind.DATA,
            self.number,
            frames.data_front(span, part.checksums),
            begin_by=self.deadline,
            layer=span.first_layer,
            block=span.first,
            payload=part.buffers,
            late=span.first_layer - self.request.first_layer,
            wanted=lambda: not self.cancelled.is_set(),
        )
        self._peer.sent(sum(len(buffer) for buffer in part.buffers))
