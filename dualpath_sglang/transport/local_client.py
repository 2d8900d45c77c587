"""Fetching Layer Blocks from the agent of the same machine: copied from its memory.

As :class:`~dualpath_sglang.transport.client.Connection`, but what comes over the socket says only
where the bytes are. The agent's memory is mapped to be read, and can neither shrink nor be taken
away, whatever becomes of the agent. That it does not change while it is copied is the agent's
promise; whoever is told what landed compares the copy with the checksums, as over a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpath_sglang.transport import local_frames as frames
from dualpath_sglang.transport.base import (
    Destination,
    End,
    Fetching,
    FetchRequest,
    Load,
    PeerLostError,
    RefusedError,
    TransportError,
)
from dualpath_sglang.transport.fetches import Fetch, Fetches
from dualpath_sglang.transport.frames import parse_missing
from dualpath_sglang.transport.local_frames import Kind, Named
from dualpath_sglang.transport.local_server import peer_uid
from dualpath_sglang.transport.socket_io import SocketIo

logger = logging.getLogger(__name__)

_SEND_S = 2.0
_BODY_S = 10.0
_COPY_S = 10.0


class LocalConnection:
    """A connection to the agent of this machine. Thread-safe.

    Args:
        path: of its socket.
        deadline: monotonic seconds until which it must stand.

    Raises:
        RefusedError: it is another user's, of another version, or its memory is not to be trusted.
        PeerLostError: it cannot be reached, or does not answer in time.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self.path = path
        sock = _dial(path, deadline)
        try:
            self._memory = _map(sock, path, deadline)
            self._io = SocketIo(sock)
        except BaseException:
            sock.close()
            raise
        self._fetches = Fetches(str(path), self._io.shut, _COPY_S)
        self.load: Load | None = None
        """What the agent has still to read from storage, as it said last."""
        self._thread = threading.Thread(
            target=self._receive, name="dualpath-local-fetch", daemon=True
        )
        self._fetches.receiver = self._thread
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the connection ended; None while it stands."""
        return self._fetches.lost

    def fetch(self, request: FetchRequest, destination: Destination, told: Fetching) -> Fetch:
        """See :meth:`~dualpath_sglang.transport.client.Connection.fetch`."""
        fetch = self._fetches.begin(request, destination, told)
        if not self._send(Kind.FETCH, fetch.number, frames.fetch_body(request), fetch.deadline):
            self._fetches.end(fetch, End.TIMEOUT)
        return fetch

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards.

        Waits for a callback of it that is under way, but not for long.
        """
        if self._fetches.end(fetch, end):
            self._send(Kind.CANCEL, fetch.number, b"", time.monotonic() + _SEND_S)

    def shut(self) -> None:
        """End the connection and every fetch on it, soon."""
        self._io.shut()

    def close(self) -> None:
        """End the connection and every fetch on it."""
        self._io.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, kind: Kind, number: int, body: bytes, deadline: float) -> bool:
        """Whether it could be sent in time; a failure ends the connection, and so every fetch."""
        by = min(deadline, time.monotonic() + _SEND_S)
        try:
            self._io.send([frames.frame(kind, number, body)], by)
        except TimeoutError:
            return False
        except PeerLostError:
            self._io.shut()
        return True

    # -- receiving --------------------------------------------------------------------------

    def _receive(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                if self._io.readable(self._fetches.look_by()):
                    self._take(time.monotonic() + _BODY_S)
                for fetch in self._fetches.late():
                    self.cancel(fetch, End.TIMEOUT)
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.path)
            why = f"receiving failed: {error}"
        left = self._fetches.lose(f"{self.path}: {why}")
        self._io.close()
        for fetch in left:
            self._fetches.tell_end(fetch, End.LOST, None)

    def _take(self, deadline: float) -> None:
        kind, number, length = frames.parse_head(self._io.receive(frames.HEAD.size, deadline))
        body = self._io.receive(length, deadline)
        fetch, known = self._fetches.known(number)
        if kind is Kind.SYNC:
            if not self._send(Kind.TAKEN, number, b"", deadline):
                raise PeerLostError("the agent reads nothing")
        elif kind is Kind.END:
            end, self.load = frames.parse_end(body)
            self._fetches.finished(number, end, self.load)
        elif kind is Kind.MISSING:
            blocks = parse_missing(body, known.blocks)
            if fetch is not None:
                fetch.lack(blocks)
                self._tell(fetch, lambda: fetch.told.missing(blocks))
        elif kind is Kind.DATA:
            if fetch is not None:
                self._take_data(fetch, body)
        else:
            raise PeerLostError("it sent what only a reader sends")

    def _take_data(self, fetch: Fetch, body: bytes) -> None:
        named = frames.parse_data(body, fetch.layer_bytes, len(self._memory))
        fetch.expect(named.span)
        try:
            views = fetch.destination.views(named.span, fetch.deadline)
            copied = views is not None and self._copy(fetch, named, views)
        except Exception:
            logger.exception("What came from %s has no place", self.path)
            self.cancel(fetch, End.FAILED)
            return
        if copied:
            self._tell(fetch, lambda: fetch.told.landed(named.span, named.checksums))
        else:
            self.cancel(fetch)

    def _copy(self, fetch: Fetch, named: Named, views: Sequence[memoryview]) -> bool:
        """Unless it has ended meanwhile; whether it was done."""
        with self._fetches.filling(fetch.number) as live:
            if live is not None:
                size = named.span.layers * fetch.layer_bytes
                copy_runs(self._memory, named.offsets, size, views)
        return live is not None

    def _tell(self, fetch: Fetch, call: Callable[[], None]) -> None:
        """What it cannot use ends it, and no other."""
        if not self._fetches.tell(fetch, call):
            self.cancel(fetch, End.FAILED)


def copy_runs(
    memory: memoryview, offsets: Sequence[int], size: int, views: Sequence[memoryview]
) -> None:
    """Copy runs of ``size`` bytes of ``memory``, one after the other, into views in turn.

    Raises:
        ValueError: the views are not as long.
    """
    if sum(map(len, views)) != size * len(offsets):
        raise ValueError("the destination gives another place than was asked for")
    runs = iter(offsets)
    at = left = 0
    for view in views:
        need = len(view)
        if not left:
            at, left = next(runs), size
        if need <= left:
            view[:] = memory[at : at + need]
            at += need
            left -= need
            continue
        done = 0
        while done < need:
            if not left:
                at, left = next(runs), size
            some = min(left, need - done)
            view[done : done + some] = memory[at : at + some]
            at, left, done = at + some, left - some, done + some


def _dial(path: Path, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(os.fspath(path))
        if peer_uid(sock) != os.geteuid():
            raise RefusedError(f"the agent at {path} is another user's")
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        sock.close()
        raise PeerLostError(f"{path} cannot be reached: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _map(sock: socket.socket, path: Path, deadline: float) -> memoryview:
    """The agent's memory, to be read."""
    data, fds = b"", list[int]()
    try:
        while len(data) < frames.HELLO.size:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            more, came, _, _ = socket.recv_fds(sock, frames.HELLO.size - len(data), 1)
            fds += came
            if not more:
                raise PeerLostError(f"{path}: the agent closed the connection")
            data += more
        magic, version, size = frames.HELLO.unpack(data)
        if magic != frames.MAGIC:
            raise PeerLostError(f"{path}: something else than a DualPath agent answers")
        if version != frames.VERSION:
            raise RefusedError(
                f"{path}: the agent speaks version {version} of the protocol, not {frames.VERSION}"
            )
        if len(fds) != 1:
            raise RefusedError(f"{path}: the agent does not share its memory")
        _check_file(fds[0], size, path)
        return memoryview(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise PeerLostError(f"{path} does not answer as it must: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


def _check_file(fd: int, size: int, path: Path) -> None:
    """That to read the file can never fail: a map of one that shrinks would kill this process."""
    facts = os.fstat(fd)
    seals = 0
    with contextlib.suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not stat.S_ISREG(facts.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise RefusedError(f"{path}: the agent's memory might be taken away while it is read")
    if not 0 < size <= facts.st_size:
        raise RefusedError(f"{path}: the agent's memory is smaller than it says")
