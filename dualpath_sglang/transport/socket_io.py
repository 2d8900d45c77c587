"""Whole buffers in and out of a socket, each by a deadline."""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from dualpath_sglang.transport.base import PeerLostError
from dualpath_sglang.transport.turns import URGENT, Turns

_MOST_BUFFERS = 512
"""The kernel takes 1024 a call."""
_UNSENT_BYTES = 1 << 20
"""Most that the kernel holds and has not sent: what comes next waits for no more."""
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_STALL_S = 10.0
"""A peer that takes nothing for so long in the middle of a frame is given up."""


def tune(sock: socket.socket, dscp: int = 0) -> None:
    """No delay, dead peers noticed, and the traffic class of KV.

    Buffers are left to the kernel, which finds out what the path needs; but of what could not be
    sent yet it takes little, so that on a slow path short frames do not wait behind megabytes.

    Args:
        dscp: differentiated services code point, 0 to 63.

    Raises:
        ValueError: there is no such code point.
    """
    if not 0 <= dscp <= 63:
        raise ValueError(f"there is no code point {dscp}")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
    if dscp:
        _mark(sock, dscp)


def _mark(sock: socket.socket, dscp: int) -> None:
    """Put a code point on what is sent; without it KV still arrives, so nothing fails here."""
    options = [(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)]
    if sock.family == socket.AF_INET6:
        # Both: its peer may have an IPv4 address (::ffff:10.0.0.1), and then the first one counts.
        options.append((socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2))
    # For queues of this machine that look at no packets. After IP_TOS, which changes it; 7 would
    # take a privilege.
    options.append((socket.SOL_SOCKET, socket.SO_PRIORITY, min(dscp >> 3, 6)))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)


class SocketIo:
    """A connected socket. One thread may receive while others send, in turns.

    Deadlines are monotonic seconds. :class:`PeerLostError` means that the connection is of no use
    any more, for half of something may have gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._scatter = not isinstance(sock, ssl.SSLSocket)
        # OpenSSL allows one call at a time on a connection.
        self._turn = threading.Lock() if isinstance(sock, ssl.SSLSocket) else nullcontext()
        self._turns = Turns()
        self._silent_since: float | None = None

    def agree_on_tls(self, deadline: float) -> None:
        """The handshake of a TLS socket; nothing for a plain one."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return None
        while True:
            try:
                return self._sock.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except (OSError, ValueError) as error:
                raise PeerLostError(f"TLS is not agreed on: {error}") from error

    def silent(self, least_s: float) -> bool:
        """Whether it is waited for the peer, and nothing at all has come for so long."""
        since = self._silent_since
        if since is None or time.monotonic() - since < least_s:
            return False
        try:
            return not self._poll(select.POLLIN, 0.0)
        except PeerLostError:
            return True

    def turn(self, late: int, deadline: float) -> AbstractContextManager[None]:
        """See :meth:`dualpath_sglang.transport.turns.Turns.turn`."""
        return self._turns.turn(late, deadline)

    def readable(self, deadline: float) -> bool:
        """Whether something comes, or the end, by then."""
        if isinstance(self._sock, ssl.SSLSocket):
            with self._turn:
                if self._sock.pending():
                    return True
        return self._poll_for_more(deadline)

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer."""
        done = 0
        while done < len(view):
            try:
                with self._turn:
                    count = self._sock.recv_into(view[done:])
            except (BlockingIOError, ssl.SSLWantReadError):
                self._more(deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except (OSError, ValueError) as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            else:
                if count == 0:
                    raise PeerLostError("the peer closed the connection")
                self._silent_since = None
                done += count

    def receive_into_all(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill buffers, one after the other."""
        if len(views) == 1 or not self._scatter:
            for view in views:
                self.receive_into(view, deadline)
            return
        left = deque(views)
        while left:
            some = list(itertools.islice(left, _MOST_BUFFERS))
            try:
                count = self._sock.recvmsg_into(some)[0]
            except BlockingIOError:
                self._more(deadline)
                continue
            except (OSError, ValueError) as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            if count == 0:
                raise PeerLostError("the peer closed the connection")
            self._silent_since = None
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def receive(self, size: int, deadline: float) -> bytes:
        """So many bytes."""
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def send(self, buffers: Sequence[bytes | memoryview], begin_by: float) -> None:
        """All of these, in order, before all pieces; see :meth:`send_now`."""
        with self.turn(URGENT, begin_by):
            self.send_now(buffers, begin_by)

    def send_now(self, buffers: Sequence[bytes | memoryview], begin_by: float) -> None:
        """All of these, in order, by whoever has the turn.

        Raises:
            TimeoutError: nothing of it could be sent by then; the connection is as it was.
            PeerLostError: also when the peer, in the middle of it, takes nothing for a while.
        """
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        begun = False
        while left:
            try:
                with self._turn:
                    if self._scatter:
                        count = self._sock.sendmsg(left[:_MOST_BUFFERS])
                    else:
                        count = self._sock.send(left[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                # What TLS could not send may be in its buffer: then it has begun as well.
                begun |= isinstance(error, ssl.SSLError)
                event = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
                if begun:
                    self._wait(event, time.monotonic() + _STALL_S)
                elif not self._poll(event, begin_by):
                    raise TimeoutError from None
                continue
            except (OSError, ValueError) as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            begun = True
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _more(self, deadline: float) -> None:
        if not self._poll_for_more(deadline):
            raise PeerLostError("the peer did not answer in time")

    def _poll_for_more(self, deadline: float) -> bool:
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return self._poll(select.POLLIN, deadline)

    def _wait(self, event: int, deadline: float) -> None:
        if not self._poll(event, deadline):
            raise PeerLostError("the peer did not answer in time")

    def _poll(self, event: int, deadline: float) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        poll = select.poll()
        try:
            poll.register(self._sock, event)
        except (OSError, ValueError) as error:
            raise PeerLostError("the connection was closed") from error
        return bool(poll.poll(None if math.isinf(left_s) else math.ceil(1000 * left_s)))

    def shut(self) -> None:
        """End it, whatever is under way in other threads."""
        shut_down(self._sock)

    def close(self) -> None:
        """Release it; nobody may receive from it any more."""
        self.shut()
        # A sender must not meet another file under the number of this one.
        with self.turn(URGENT, math.inf):
            self._sock.close()


def shut_down(sock: socket.socket) -> None:
    """End a connection under others who use it.

    Not by the method of a TLS socket, which first lets them go on without encryption.
    """
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
