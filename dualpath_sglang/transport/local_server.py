"""Serving Layer Blocks to readers on the same machine: their places in memory, not their bytes.

Only the user that runs this may connect. A reader copies what is named, and says so before the
memory is used for something else. One that does not say so is not waited for long: what it copies
then does not match the checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from dualpath_sglang.transport import local_frames as frames
from dualpath_sglang.transport.answer import Answer
from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Missing,
    PeerLostError,
    Piece,
    Served,
    Source,
)
from dualpath_sglang.transport.frames import missing_body
from dualpath_sglang.transport.local_frames import Kind
from dualpath_sglang.transport.socket_io import SocketIo
from dualpath_storage.notices import Notices

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_BODY_S = 10.0
_END_S = 2.0
_CLOSE_S = 5.0
_TAKEN_S = 2.0
"""A reader that has had its time is waited for so much longer."""
_FOREVER = float("inf")
_CREDENTIALS = struct.Struct("=iII")
_LONGEST_PATH = 107


class SharedSource(Source, Protocol):
    """A source whose blocks lie in a file that others may map."""

    @property
    def shared_file(self) -> tuple[int, int] | None:
        """Its descriptor and size; None when it has none."""
        ...


@runtime_checkable
class SharedServed(Served, Protocol):
    """An answer whose pieces say where in the file they are."""

    def hold_until(self, taken: Callable[[], None]) -> None:
        """Before memory that pieces were in is used for something else, this must be called.

        It returns once nobody looks at them, and raises what ends the answer.
        """
        ...


class LocalServer:
    """Listens until it is closed. Thread-safe.

    Args:
        source: what it serves.
        path: of the socket; one that a dead process left there is replaced.
        most_connections, most_fetches: of the server, and of one connection at a time.

    Raises:
        OSError: it cannot be had, or somebody else listens there.
        ValueError: the source has no file, or the path is too long.
    """

    def __init__(
        self,
        source: SharedSource,
        path: Path,
        *,
        most_connections: int = 256,
        most_fetches: int = 64,
    ) -> None:
        file = source.shared_file
        if file is None:
            raise ValueError("there are no files in memory here, so readers must use the network")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise ValueError(f"the path of a socket has at most {_LONGEST_PATH} bytes: {path}")
        self.path = path
        self.most_fetches = most_fetches
        self.counts: Counter[str] = Counter()
        """Connections, refused ones, fetches by how they ended, bytes that were named."""
        self._source = source
        self._fd, self._size = file
        self._most_connections = most_connections
        self._notices = Notices(logger)
        self._lock = threading.Lock()
        self._open: set[_Reader] = set()
        self._closed = threading.Event()
        self._draining = threading.Event()
        self._listener = _listen(path)
        self._inode = path.stat().st_ino
        self._thread = threading.Thread(target=self._accept, name="dualpath-local", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Take on nothing more and let what is under way end; whether it has."""
        self._draining.set()
        end = time.monotonic() + timeout_s
        while any(reader.busy for reader in self._readers()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """End every connection at once, and remove the socket.

        A source that does not end an answer, though told to, is waited for five seconds.
        """
        self._closed.set()
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        for reader in self._readers():
            reader.shut()
        end = time.monotonic() + _CLOSE_S
        for reader in self._readers():
            if not reader.join(max(0.0, end - time.monotonic())):
                logger.warning("What a reader asked for does not end, and is left alone")

    def _readers(self) -> list[_Reader]:
        with self._lock:
            return list(self._open)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._notices.warn("Cannot accept connections: %s", error)
                self._closed.wait(_POLL_S)
                continue
            try:
                self._admit(sock)
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads for now
                sock.close()
                self.count("refused")
                self._notices.warn("A reader on this machine is sent away: %s", error)

    def _admit(self, sock: socket.socket) -> None:
        uid = peer_uid(sock)
        if uid != os.geteuid():
            raise PermissionError(f"it runs as user {uid}")
        if len(self._readers()) >= self._most_connections:
            raise OSError("there are too many")
        hello = frames.HELLO.pack(frames.MAGIC, frames.VERSION, self._size)
        sock.setblocking(False)  # the socket is new: there is room for it
        socket.send_fds(sock, [hello], [self._fd])
        reader = _Reader(self, SocketIo(sock))
        with self._lock:
            self._open.add(reader)
        try:
            reader.start()
        except RuntimeError:
            self.gone(reader)
            raise
        self.count("connections")

    # -- for its readers --------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether all connections are to end."""
        return self._closed.is_set()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to :attr:`counts`."""
        with self._lock:
            self.counts[name] += amount

    def begin(
        self, request: FetchRequest, under_way: int
    ) -> contextlib.AbstractContextManager[Served] | End:
        """Take a fetch on, or say why not."""
        if self._draining.is_set() or under_way > self.most_fetches:
            return End.BUSY
        return self._source.serve(request)

    def end_body(self, end: End) -> bytes:
        """What END says."""
        return frames.end_body(end, self._source.load())

    def gone(self, reader: _Reader) -> None:
        """A connection has ended."""
        with self._lock:
            self._open.discard(reader)


class _Reader:
    """One connection."""

    def __init__(self, server: LocalServer, io: SocketIo) -> None:
        self._server = server
        self._io = io
        self._lock = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._thread = threading.Thread(target=self._run, name="dualpath-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    def shut(self) -> None:
        self._io.shut()

    def _run(self) -> None:
        try:
            while not self._server.closed:
                self._io.readable(_FOREVER)
                self._take(time.monotonic() + _BODY_S)
        except PeerLostError as error:
            logger.debug("A connection of this machine ended: %s", error)
        except Exception:
            logger.exception("A connection of this machine failed")
        finally:
            with self._lock:
                answers = list(self._answers.values())
            self._io.shut()
            for answer in answers:
                answer.cancel()
            for answer in answers:
                answer.join()
            self._io.close()
            self._server.gone(self)

    def _take(self, deadline: float) -> None:
        kind, number, length = frames.parse_head(self._io.receive(frames.HEAD.size, deadline))
        body = self._io.receive(length, deadline)
        with self._lock:
            answer = self._answers.get(number)
        if kind is Kind.CANCEL:
            if answer is not None:
                answer.cancel()
        elif kind is Kind.TAKEN:
            if answer is not None:
                answer.taken.set()
        elif kind is Kind.FETCH and answer is None:
            self._begin(number, frames.parse_fetch(body))
        else:
            raise PeerLostError("it sent what makes no sense")

    def _begin(self, number: int, request: FetchRequest) -> None:
        answer = _Answer(self, number, request)
        with self._lock:
            if len(self._answers) >= 2 * self._server.most_fetches:
                raise PeerLostError("it asks for more without reading how the last ones ended")
            self._answers[number] = answer
        try:
            answer.start()
        except RuntimeError:  # no more threads for now
            self.ended(number, End.BUSY)

    # -- for its answers --------------------------------------------------------------------

    def begin(self, request: FetchRequest) -> contextlib.AbstractContextManager[Served] | End:
        return self._server.begin(request, len(self._answers))

    def send(self, kind: Kind, number: int, body: bytes, begin_by: float) -> None:
        self._io.send([frames.frame(kind, number, body)], begin_by)

    def sent(self, size: int) -> None:
        self._server.count("bytes", size)

    def ended(self, number: int, end: End) -> None:
        try:
            self._server.count(end.name.lower())
            body = self._server.end_body(end)
            self.send(Kind.END, number, body, time.monotonic() + _END_S)
        except (TimeoutError, PeerLostError):
            self.shut()  # it would wait for an end that does not come
        finally:
            with self._lock:
                del self._answers[number]


class _Answer(Answer):
    """See :class:`Answer`. Says where pieces are, and has the reader say when it has them."""

    def __init__(self, reader: _Reader, number: int, request: FetchRequest) -> None:
        super().__init__(number, request)
        self.taken = threading.Event()
        self._reader = reader
        self._named = False
        """Whether pieces were named since all were taken."""

    def serve(self) -> contextlib.AbstractContextManager[Served] | End:
        return self._reader.begin(self.request)

    def cancel(self) -> None:
        """Nobody looks at anything of it any more."""
        super().cancel()
        self.taken.set()

    def broke(self) -> None:
        self._reader.shut()

    def ended(self, end: End) -> None:
        self._reader.ended(self.number, end)

    @contextlib.contextmanager
    def sending(self, served: Served) -> Iterator[None]:
        if not isinstance(served, SharedServed):
            raise TypeError("the source does not say where its pieces are")
        served.hold_until(lambda: self._until_taken(self.deadline))
        try:
            yield
        finally:
            with contextlib.suppress(TimeoutError, PeerLostError):
                self._until_taken(time.monotonic() + _TAKEN_S)

    def send(self, part: Piece | Missing) -> None:
        if isinstance(part, Missing):
            body = missing_body(part.blocks)
            self._reader.send(Kind.MISSING, self.number, body, self.deadline)
            return
        self._named = True
        self._reader.send(Kind.DATA, self.number, frames.data_body(part), self.deadline)
        self._reader.sent(sum(map(len, part.buffers)))

    def _until_taken(self, deadline: float) -> None:
        """Until the reader has copied all that was named."""
        if not self._named or self.cancelled.is_set():
            return
        self.taken.clear()
        if self.cancelled.is_set():
            return
        self._reader.send(Kind.SYNC, self.number, b"", deadline)
        if not self.taken.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        self._named = False


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def _listen(path: Path) -> socket.socket:
    """A listening socket that only its owner may connect to."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_POLL_S)
            try:
                probe.connect(os.fspath(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)  # nobody can connect before it listens
        listener.listen(128)
        listener.settimeout(_POLL_S)
    except BaseException:
        listener.close()
        raise
    return listener
