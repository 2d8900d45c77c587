"""A TCP proxy that does to replies what bad networks do, switched at any time."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum


class Toxic(Enum):
    """What happens to connections, those that stand included."""

    NONE = "none"
    SLOW = "slow"
    """Every piece of a reply is late."""
    CUT = "cut"
    """The connection ends in the middle of a reply."""
    SILENT = "silent"
    """Half-open: everything is taken, nothing comes back."""
    TRICKLE = "trickle"
    """Replies come byte by byte."""
    REFUSED = "refused"
    """Nobody listens, and all connections end."""


class ToxicProxy:
    """In front of a port of this machine.

    Args:
        target: the port behind.
    """

    latency_s = 0.2
    trickle_s = 0.01

    def __init__(self, target: int) -> None:
        self._target = target
        self._toxic = Toxic.NONE
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.port = 0
        self._listen()

    @property
    def url(self) -> str:
        """Where it is, as DualPath's ``index`` setting has it."""
        return f"redis://127.0.0.1:{self.port}"

    def set(self, toxic: Toxic) -> None:
        """From now on."""
        self._toxic = toxic
        if toxic is Toxic.REFUSED:
            self._stop_listening()
            self._end_all()
        elif self._listener is None:
            self._listen()

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self._stop_listening()
        self._end_all()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> ToxicProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        listener.settimeout(0.05)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while listener is self._listener and not self._closed.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            client.setblocking(True)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for sock in (client, server):  # or a request in two pieces waits 40 ms for an ACK
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            self._start(self._pump, client, server, False)
            self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        try:
            while not self._closed.is_set():
                if not select.select([source], [], [], 0.05)[0]:
                    continue
                data = source.recv(65536)
                if not data:
                    break
                self._forward(data, sink, replies)
        except (OSError, ValueError):
            pass
        self._end(source, sink)

    def _forward(self, data: bytes, sink: socket.socket, replies: bool) -> None:
        toxic = self._toxic if replies else Toxic.NONE
        if toxic is Toxic.SILENT:
            return
        if toxic is Toxic.SLOW:
            self._closed.wait(self.latency_s)
        if toxic is Toxic.CUT:
            sink.sendall(data[: len(data) // 2])
            raise OSError("cut")
        if toxic is Toxic.TRICKLE:
            for i in range(len(data)):
                if self._toxic is not Toxic.TRICKLE or self._closed.is_set():
                    sink.sendall(data[i:])
                    return
                sink.sendall(data[i : i + 1])
                time.sleep(self.trickle_s)
            return
        sink.sendall(data)

    def _end(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        with self._lock:
            self._open -= set(sockets)

    def _end_all(self) -> None:
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
