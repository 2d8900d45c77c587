"""Whole buffers in and out of a socket, each by a deadline."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

from dualpath_sglang.transport.base import PeerLostError

_MOST_BUFFERS = 64
_BUFFER_BYTES = 4 << 20


def tune(sock: socket.socket, dscp: int = 0) -> None:
    """No delay, dead peers noticed, and the traffic class of KV.

    Args:
        dscp: differentiated services code point, 0 to 63; the kernel derives the priority too.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, size, _BUFFER_BYTES)
    if dscp:
        with contextlib.suppress(OSError):
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
            else:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


class SocketIo:
    """A connected socket. One thread may receive while another sends.

    Each call takes a deadline (monotonic seconds) and raises :class:`PeerLostError` when it passes
    or the connection ends; then the connection is of no use any more, for half may have gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._gather = not isinstance(sock, ssl.SSLSocket)
        # OpenSSL allows one call at a time on a connection.
        self._turn = threading.Lock() if isinstance(sock, ssl.SSLSocket) else nullcontext()

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer."""
        done = 0
        while done < len(view):
            try:
                with self._turn:
                    count = self._sock.recv_into(view[done:])
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            else:
                if count == 0:
                    raise PeerLostError("the peer closed the connection")
                done += count

    def receive(self, size: int, deadline: float) -> bytes:
        """So many bytes."""
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """All of these, in order."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            try:
                if self._gather:
                    count = self._sock.sendmsg(left[:_MOST_BUFFERS])
                else:
                    with self._turn:
                        count = self._sock.send(left[0])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, deadline)
                continue
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error}") from error
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _wait(self, event: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeerLostError("the peer did not answer in time")
        poll = select.poll()
        try:
            poll.register(self._sock, event)
        except (OSError, ValueError) as error:
            raise PeerLostError("the connection was closed") from error
        poll.poll(None if math.isinf(left_s) else max(1, round(1000 * left_s)))

    def shut(self) -> None:
        """End it, whatever is under way in other threads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release it; nobody may be using it."""
        self.shut()
        self._sock.close()
