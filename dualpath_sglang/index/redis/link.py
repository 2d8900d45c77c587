"""One connection to one Redis server, every use of which ends by a deadline.

redis-py speaks the protocol. Its timeouts are those of single reads, so that a server that sends
a byte now and then is waited for without end: here the socket itself knows when to give up.
"""

from __future__ import annotations

import contextlib
import inspect
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import ResponseError
from redis.retry import Retry

from dualpath_sglang.index.redis.settings import Address, RedisSettings

Command: TypeAlias = tuple[bytes | str | int, ...]


class _DeadlineSocket:
    """A socket that takes no longer than to its deadline (monotonic seconds)."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self.deadline = deadline

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left)

    def recv(self, *args: Any) -> bytes:
        self._arm()
        return self._sock.recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._arm()
        return self._sock.recv_into(*args)

    def sendall(self, data: Any) -> None:
        self._arm()
        self._sock.sendall(data)

    def settimeout(self, value: float | None) -> None:
        """The deadline alone counts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Connection(Connection):
    """Has a deadline, and TLS when there is a context for it.

    redis-py's own TLS trusts the system's authorities besides the one that is named.
    """

    deadline = 0.0
    tls: ssl.SSLContext | None = None

    def _connect(self) -> Any:
        base: Any = super()  # without types
        sock = base._connect()
        if self.tls is not None:
            sock.settimeout(max(0.001, self.deadline - time.monotonic()))
            sock = self.tls.wrap_socket(sock, server_hostname=self.host)
        return _DeadlineSocket(sock, self.deadline)


def _tls(settings: RedisSettings) -> ssl.SSLContext:
    """Made for each connection: the files are replaced when certificates are renewed."""
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.cert_file is not None:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


def _quiet() -> dict[str, Any]:
    """No commands but ours: a user with least rights may not be allowed more."""
    known = inspect.signature(Connection.__mro__[1]).parameters
    if "driver_info" in known:
        return {"driver_info": None}
    return {name: None for name in ("lib_name", "lib_version") if name in known}


class Link:
    """A connection. For one thread at a time.

    Args:
        address: the server.
        settings: how to be let in.
        deadline: monotonic seconds until which it must stand.
        sentinel: whether the server is a Sentinel.

    Raises:
        redis.exceptions.RedisError, OSError: it cannot be made.
    """

    def __init__(
        self, address: Address, settings: RedisSettings, deadline: float, *, sentinel: bool = False
    ) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        options: dict[str, Any] = {
            "host": address[0],
            "port": address[1],
            "db": 0 if sentinel else settings.db,
            "socket_timeout": left_s,
            "socket_connect_timeout": left_s,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **_quiet(),
        }
        if not sentinel or settings.sentinel_auth:
            options["username"] = settings.username or None
            options["password"] = settings.password or None
        self.address = address
        kind: Any = _Connection  # without types
        self._connection: Any = kind(**options)
        self._connection.deadline = deadline
        self._connection.tls = _tls(settings) if settings.tls else None
        try:
            self._connection.connect()
        except BaseException:
            self.close()
            raise

    @property
    def _sock(self) -> Any:
        return self._connection._sock

    def alive(self) -> bool:
        """Whether nothing says that it is of no use: closed by the server, or a stray reply."""
        if self._sock is None:
            return False
        poll = select.poll()
        try:
            poll.register(self._sock.fileno(), select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Replies to commands sent at once; refusals are among them, as exceptions.

        Raises:
            redis.exceptions.RedisError, OSError: not every reply came by the deadline (monotonic
                seconds). The connection is of no use any more.
        """
        self._sock.deadline = deadline
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(self._connection.read_response(disable_decoding=True))
            except ResponseError as error:
                replies.append(error)
        return replies

    def close(self) -> None:
        """End it, whatever is under way."""
        with contextlib.suppress(Exception):
            self._connection.disconnect()
