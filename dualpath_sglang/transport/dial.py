"""Reaching a peer by a deadline, the look-up of its name included."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dualpath_sglang.transport.base import PeerLostError
from dualpath_sglang.transport.socket_io import tune

_Answer = Sequence[tuple[Any, ...]] | Exception


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and how to be let in.

    Args:
        secret: shared by all nodes; empty for none.
        tls: encrypts, when given.
        dscp: traffic class of what is sent.
    """

    host: str
    port: int
    secret: bytes = field(default=b"", repr=False)
    tls: ssl.SSLContext | None = None
    dscp: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def dial(address: PeerAddress, deadline: float) -> socket.socket:
    """A connected socket; with TLS its handshake is still to be done.

    Args:
        deadline: monotonic seconds.

    Raises:
        PeerLostError: the peer cannot be reached by then.
    """
    try:
        sock = _connected(_places(address, deadline), deadline)
    except (OSError, ValueError) as error:  # ValueError: a name or port that cannot be one
        raise PeerLostError(f"{address} cannot be reached: {error}") from error
    try:
        tune(sock, address.dscp)
        if address.tls is None:
            return sock
        return address.tls.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )
    except BaseException:
        sock.close()
        raise


def _connected(places: Sequence[tuple[Any, ...]], deadline: float) -> socket.socket:
    """To the first that answers; each has an even share of the time that is left."""
    errors: list[OSError] = []
    for i, (family, kind, protocol, _, place) in enumerate(places):
        left_s = deadline - time.monotonic()
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, left_s / (len(places) - i)))
            sock.connect(place)
            return sock
        except OSError as error:
            sock.close()
            errors.append(error)
        except BaseException:
            sock.close()
            raise
    raise errors[0] if errors else OSError("its name stands for no address")


def _places(address: PeerAddress, deadline: float) -> Sequence[tuple[Any, ...]]:
    """What the name stands for.

    The system's look-up cannot be interrupted. It has a thread of its own, which is left to itself
    when the time is over, and ends when the resolver gives up.
    """
    if not 0 < address.port < 1 << 16:
        raise ValueError("a port is a number from 1 to 65535")
    where = (address.host, address.port)
    try:
        flags = socket.AI_NUMERICHOST
        return socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        pass  # a name, or nothing
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(socket.getaddrinfo(*where, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            answers.put(error)

    try:
        threading.Thread(target=look_up, name="dualpath-look-up", daemon=True).start()
        answer = answers.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("its name could not be looked up in time") from None
    except RuntimeError as error:  # no more threads for now
        raise OSError(str(error)) from error
    if isinstance(answer, Exception):
        raise answer
    return answer
