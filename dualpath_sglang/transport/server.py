"""Serving Layer Blocks to peers over TCP: who is let in, and how much is taken on.

Who has not proved yet that it is a node waits at the door, where there are few places and little
time (:mod:`.strangers`); so silent ones keep nobody out. What all connections together ask for is
bounded (:mod:`.budget`): more is answered BUSY at once. What is asked is answered in :mod:`.peer`.
A fetch whose turn does not come by its deadline ends; a peer that takes nothing for a while is
given up with all of its fetches.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Load,
    PeerLostError,
    Served,
    Source,
)
from dualpath_sglang.transport.budget import Budget
from dualpath_sglang.transport.handshake import (
    FullError,
    OtherVersionError,
    WrongSecretError,
    admit,
)
from dualpath_sglang.transport.peer import Peer
from dualpath_sglang.transport.socket_io import SocketIo, tune
from dualpath_sglang.transport.strangers import Refusals, Strangers
from dualpath_sglang.transport.wire import Wire
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 3.0
_POLL_S = 0.2
_CLOSE_S = 5.0
_COUNTED = (
    (WrongSecretError, "wrong_secret"),
    (OtherVersionError, "other_version"),
    (FullError, "full"),
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to listen.

    Args:
        host, port: where; 0 for any free port.
        secret: what every client must know; empty for none.
        tls: encrypts, when given.
        dscp: traffic class of what is sent.
        most_connections: whose other end is a node.
        most_fetches: of one connection at a time.
        most_answers: fetches of all connections at a time.
        most_request_bytes: of what all of those ask for.
        most_strangers, most_strangers_of_one: connections that have not proved yet that they are of
            nodes, and those of one address.
    """

    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = field(default=b"", repr=False)
    tls: ssl.SSLContext | None = None
    dscp: int = 0
    most_connections: int = 256
    most_fetches: int = 64
    most_answers: int = 512
    most_request_bytes: int = 64 << 20
    most_strangers: int = 128
    most_strangers_of_one: int = 64


class Server:
    """Listens until it is closed. Thread-safe.

    Args:
        source: what it serves.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, source: Source, options: ServerOptions | None = None) -> None:
        self._source = source
        self._options = options or ServerOptions()
        self.counts: Counter[str] = Counter()
        """Connections, refused ones (and why: ``wrong_secret``, ``other_version``, ``full``,
        ``pushed_out`` at the door), fetches by how they ended, bytes of payload, loads asked."""
        self._notices = Notices(logger)
        self._refusals = Refusals(logger)
        self._budget = Budget(self._options.most_answers, self._options.most_request_bytes)
        self._strangers: Strangers[Peer] = Strangers(
            self._options.most_strangers, self._options.most_strangers_of_one
        )
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        """All that have a thread: strangers, those who have to go, and nodes."""
        self._nodes: set[Peer] = set()
        self._closed = threading.Event()
        self._draining = threading.Event()
        where = (self._options.host, self._options.port)
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._listener = socket.create_server(where, family=family, backlog=128)
        self._listener.settimeout(_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="dualpath-serve", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Take on nothing more and let what is under way end; whether it has."""
        self._draining.set()
        end = time.monotonic() + timeout_s
        while any(peer.busy for peer in self._clients()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def change_secret(self, secret: bytes) -> None:
        """Let in only who knows this one from now on; who is in stays."""
        self._options = replace(self._options, secret=secret)

    def close(self) -> None:
        """End every connection at once.

        A source that does not end an answer, though told to, is waited for five seconds.
        """
        self._closed.set()
        self._thread.join()
        self._listener.close()
        for peer in self._clients():
            peer.shut()
        end = time.monotonic() + _CLOSE_S
        for peer in self._clients():
            if not peer.join(max(0.0, end - time.monotonic())):
                logger.warning("What %s asked for does not end, and is left alone", peer.address)

    def _clients(self) -> list[Peer]:
        with self._lock:
            return list(self._peers)

    # -- who comes --------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                sock, where = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._notices.warn("Cannot accept connections: %s", error)
                self._closed.wait(_POLL_S)
                continue
            self._begin(sock, str(where[0]))

    def _begin(self, sock: socket.socket, address: str) -> None:
        options = self._options
        with self._lock:
            # Those who have to go need a moment for it.
            crowded = len(self._peers) >= options.most_connections + 2 * options.most_strangers
        if crowded:
            sock.close()
            self.count("refused")
            self._refusals.warn(address, "too many come at a time")
            return
        peer = Peer(self, sock, address)
        with self._lock:
            self._peers.add(peer)
        pushed_out = self._strangers.enter(peer, address)
        if pushed_out is not None:
            self.count("pushed_out")
            pushed_out.shut()
        try:
            peer.start()
        except RuntimeError as error:  # no more threads for now
            self.gone(peer)
            sock.close()
            self._notices.warn("A connection cannot be served: %s", error)

    # -- for its connections ----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether all connections are to end."""
        return self._closed.is_set()

    def admit(self, peer: Peer, sock: socket.socket) -> Wire:
        """A connection whose other end is trusted.

        Raises:
            RefusedError, PeerLostError, OSError: it is not.
        """
        deadline = time.monotonic() + _HANDSHAKE_S
        tune(sock, self._options.dscp)
        if self._options.tls is not None:
            sock = self._options.tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
            peer.wrapped(sock)
        io = SocketIo(sock)
        io.agree_on_tls(deadline)
        seals = admit(io, self._options.secret, deadline, lambda: self._let_in(peer))
        self.count("connections")
        return Wire(io, seals)

    def _let_in(self, peer: Peer) -> bool:
        """Whether there is a place; then it has it."""
        if not self._strangers.leave(peer):
            raise PeerLostError("others came, and it took too long")
        with self._lock:
            if len(self._nodes) >= self._options.most_connections:
                return False
            self._nodes.add(peer)
            return True

    def refused(self, peer: Peer, error: Exception) -> None:
        """A connection was not let in."""
        self.count("refused")
        for kind, name in _COUNTED:
            if isinstance(error, kind):
                self.count(name)
        self._refusals.warn(peer.address, error)

    def gone(self, peer: Peer) -> None:
        """A connection has ended, and its thread ends."""
        self._strangers.leave(peer)
        with self._lock:
            self._nodes.discard(peer)
            self._peers.discard(peer)

    def take(self, request_bytes: int, under_way: int) -> bool:
        """Whether one more fetch of a connection may be taken on; it counts until :meth:`give`."""
        if self._draining.is_set() or under_way >= self._options.most_fetches:
            return False
        return self._budget.take(request_bytes)

    def give(self, request_bytes: int) -> None:
        """A fetch is over."""
        self._budget.give(request_bytes)

    def serve(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to answer."""
        return self._source.serve(request)

    def load(self) -> Load:
        """What is still to be read from storage."""
        return self._source.load()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to :attr:`counts`."""
        with self._lock:
            self.counts[name] += amount
