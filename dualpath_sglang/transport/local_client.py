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
from dualpath_sglang.transport.client import Fetch
from dualpath_sglang.transport.local_frames import Kind, Named
from dualpath_sglang.transport.local_server import peer_uid
from dualpath_sglang.transport.socket_io import SocketIo

logger = logging.getLogger(__name__)

_SEND_S = 2.0
_BODY_S = 10.0
_GRACE_S = 0.5
_COPY_S = 10.0
_LOOK_EVERY_S = 0.2
_MOST_GONE = 1024


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
        self._lock = threading.Lock()
        self._piece_over = threading.Condition(self._lock)
        self._fetches: dict[int, Fetch] = {}
        self._gone: dict[int, None] = {}
        self._copying: Fetch | None = None
        self._telling: Fetch | None = None
        self._number = 0
        self._lost: str | None = None
        self.load: Load | None = None
        """What the agent has still to read from storage, as it said last."""
        self._thread = threading.Thread(
            target=self._receive, name="dualpath-local-fetch", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the connection ended; None while it stands."""
        return self._lost

    def fetch(self, request: FetchRequest, destination: Destination, told: Fetching) -> Fetch:
        """Ask for Layer Blocks; returns at once.

        Args:
            told: called from the connection's thread; its ``ended`` is called in any case, but
                when this raises.

        Raises:
            ValueError: the destination does not hold what is asked for.
            PeerLostError: the connection has ended.
        """
        destination.check(request)
        with self._lock:
            if self._lost is not None:
                raise PeerLostError(self._lost)
            self._number = self._free_number()
            deadline = time.monotonic() + request.timeout_s
            fetch = Fetch(request, destination, told, self._number, deadline)
            self._fetches[fetch.number] = fetch
        body = frames.fetch_body(request)
        if not self._send(Kind.FETCH, fetch.number, body, deadline):
            self._end(fetch, End.TIMEOUT)
        return fetch

    def _free_number(self) -> int:
        """With the lock held."""
        number = self._number
        while True:
            number = (number + 1) & 0xFFFFFFFF
            if number not in self._fetches and number not in self._gone:
                return number

    def cancel(self, fetch: Fetch, end: End = End.CANCELLED) -> None:
        """End a fetch, if it has not ended; nothing writes to its destination afterwards.

        Waits for a callback of it that is under way, but not for long.
        """
        if self._end(fetch, end):
            self._send(Kind.CANCEL, fetch.number, b"", time.monotonic() + _SEND_S)

    def _end(self, fetch: Fetch, end: End) -> bool:
        """Whether it had not ended before."""
        with self._lock:
            ours = self._fetches.get(fetch.number) is fetch
            if ours:
                del self._fetches[fetch.number]
                self._gone[fetch.number] = None
                while len(self._gone) > _MOST_GONE:
                    del self._gone[next(iter(self._gone))]
            if threading.current_thread() is not self._thread:
                self._piece_over.wait_for(lambda: self._copying is not fetch, _COPY_S)
                self._piece_over.wait_for(lambda: self._telling is not fetch, _GRACE_S)
        if ours:
            self._tell_end(fetch, end, None)
        return ours

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
                if self._io.readable(self._next_deadline()):
                    self._take(time.monotonic() + _BODY_S)
                self._expire()
        except TransportError as error:
            why = str(error)
        except Exception as error:
            logger.exception("Receiving from %s failed", self.path)
            why = f"receiving failed: {error}"
        with self._lock:
            self._lost = f"{self.path}: {why}"
            left = list(self._fetches.values())
            self._fetches.clear()
            self._gone.clear()
            self._copying = self._telling = None
            self._piece_over.notify_all()
        self._io.close()
        for fetch in left:
            self._tell_end(fetch, End.LOST, None)

    def _next_deadline(self) -> float:
        soon = time.monotonic() + _LOOK_EVERY_S  # a new fetch may end earlier than the others
        with self._lock:
            return min([soon, *(fetch.deadline for fetch in self._fetches.values())])

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [fetch for fetch in self._fetches.values() if fetch.deadline <= now]
        for fetch in late:
            self.cancel(fetch, End.TIMEOUT)

    def _take(self, deadline: float) -> None:
        kind, number, length = frames.parse_head(self._io.receive(frames.HEAD.size, deadline))
        body = self._io.receive(length, deadline)
        with self._lock:
            fetch = self._fetches.get(number)
            if fetch is None and number not in self._gone:
                raise PeerLostError("a frame came that answers nothing")
        if kind is Kind.SYNC:
            if not self._send(Kind.TAKEN, number, b"", deadline):
                raise PeerLostError("the agent reads nothing")
        elif kind is Kind.END:
            self._take_end(number, body)
        elif kind is Kind.MISSING:
            if fetch is not None:
                blocks = frames.parse_missing(body, fetch.blocks)
                fetch.lack(blocks)
                self._tell(fetch, lambda: fetch.told.missing(blocks))
        elif kind is Kind.DATA:
            if fetch is not None:
                self._take_data(fetch, body)
        else:
            raise PeerLostError("it sent what only a reader sends")

    def _take_end(self, number: int, body: bytes) -> None:
        end, self.load = frames.parse_end(body)
        with self._lock:
            fetch = self._fetches.pop(number, None)
            self._gone.pop(number, None)
        if fetch is not None:
            # It says that all was named; what came says so too, or it is not so.
            end = End.FAILED if end is End.OK and not fetch.complete else end
            self._tell_end(fetch, end, self.load)

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
        with self._lock:
            if self._fetches.get(fetch.number) is not fetch:
                return False
            self._copying = fetch
        try:
            size = named.span.layers * fetch.layer_bytes
            copy_runs(self._memory, named.offsets, size, views)
        finally:
            with self._lock:
                self._copying = None
                self._piece_over.notify_all()
        return True

    def _tell(self, fetch: Fetch, call: Callable[[], None]) -> None:
        """Unless it has ended meanwhile. What it cannot use ends it, and no other."""
        with self._lock:
            if self._fetches.get(fetch.number) is not fetch:
                return
            self._telling = fetch
        failed = False
        try:
            call()
        except Exception:
            logger.exception("What came from %s cannot be used", self.path)
            failed = True
        finally:
            with self._lock:
                self._telling = None
                self._piece_over.notify_all()
        if failed:
            self.cancel(fetch, End.FAILED)

    def _tell_end(self, fetch: Fetch, end: End, load: Load | None) -> None:
        try:
            fetch.told.ended(end, load)
        except Exception:
            logger.exception("The end of a fetch from %s cannot be used", self.path)
        finally:
            fetch.done.set()


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
