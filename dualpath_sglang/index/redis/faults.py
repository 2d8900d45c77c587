"""What redis-py raises, in plain sentences. Never with the server's own words after the first one:
they may repeat what we sent, a password included."""

from __future__ import annotations

import re

from redis import exceptions

from dualpath_sglang.index.base import IndexMisconfiguredError, IndexUnavailableError


class RedisMisconfiguredError(IndexMisconfiguredError):
    """Redis is set up so that it cannot keep an index."""


class UnansweredError(IndexUnavailableError):
    """What was sent may have been done or not, or may still be done."""


_SENTENCES = {
    "OOM": "is full and refuses writes",
    "READONLY": "is a replica and refuses writes",
    "LOADING": "is still loading its data",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "MASTERDOWN": "has lost its master",
    "TRYAGAIN": "is moving the keys to another server",
    "ASK": "is moving the keys to another server",
    "MOVED": "says that the keys are elsewhere",
    "BUSY": "is busy with a script",
    "MISCONF": "refuses writes because it cannot save to its disk",
    "NOREPLICAS": "refuses writes because it has too few replicas",
    "WRONGPASS": "refuses the user name or password",
    "NOAUTH": "asks for a password",
    "NOPERM": "does not permit this user what the index needs",
    "MAXCLIENTS": "has no room for another client",
}
_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.MaxConnectionsError, "MAXCLIENTS"),
    (exceptions.AuthenticationError, "WRONGPASS"),
)
_HIDDEN = (
    (re.compile(r"command not allowed when used memory"), "OOM"),
    (re.compile(r"can't run this command|has no permissions"), "NOPERM"),
    (re.compile(r"against a read only replica"), "READONLY"),
    (re.compile(r"max number of clients"), "MAXCLIENTS"),
    (re.compile(r"Authentication required"), "NOAUTH"),
)


def code_of(error: Exception) -> str:
    """The word that Redis begins the error with; empty when it is none of Redis."""
    text = str(error)
    if isinstance(error, exceptions.RedisError):
        for pattern, code in _HIDDEN:
            if pattern.search(text):
                return code
    for kind, code in _CLASSES:
        if isinstance(error, kind):
            return code
    if not isinstance(error, exceptions.ResponseError):
        return ""
    found = re.match(r"-?([A-Z]{2,20})\b", text)
    return found[1] if found else "ERR"


def explained(error: Exception, name: str, *, sent: bool) -> IndexUnavailableError:
    """The error for our callers.

    Args:
        name: the server, for the message.
        sent: whether Redis may have got what was asked of it.
    """
    code = code_of(error)
    if code:
        words = _SENTENCES.get(code, f"refused a command ({code})")
        return IndexUnavailableError(f"Redis at {name} {words}")
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        words = "did not answer in time"
    else:
        words = "cannot be reached" if not sent else "closed the connection"
    return (UnansweredError if sent else IndexUnavailableError)(f"Redis at {name} {words}")
