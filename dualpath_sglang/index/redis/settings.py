"""Where Redis is and how to be let in: the address of the index, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

Mode: TypeAlias = Literal["single", "sentinel", "cluster"]
Address: TypeAlias = tuple[str, int]

_MODES: Mapping[str, Mode] = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}
_PORTS: Mapping[Mode, int] = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_FILES = ("ca_file", "cert_file", "key_file")
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+")
_FORMS = (
    '"redis://host:port/db", "redis+sentinel://host:port,host:port/service" or '
    '"redis+cluster://host:port,host:port", with "rediss" for TLS'
)


class IndexAddressError(ValueError):
    """The address of the index cannot be used; the message is one plain sentence."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Where Redis is and how to be let in.

    Args:
        mode: one server, the master that Sentinels name, or a Cluster.
        hosts: the server, or those to ask first.
        service: the name that Sentinels know the master by.
        db: number of the database; Cluster has only 0.
        username, password: empty for none.
        tls: whether to encrypt, with the server's certificate checked.
        ca_file: whom to trust; the system's authorities when unset.
        cert_file, key_file: who we are.
        sentinel_auth: whether Sentinels want the same user and password.
    """

    mode: Mode
    hosts: tuple[Address, ...]
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    sentinel_auth: bool = False

    @classmethod
    def parse(
        cls,
        url: str,
        password_file: Path | None = None,
        password: str = "",
    ) -> RedisSettings:
        """Take an address apart.

        Args:
            url: see the messages of the errors. May name a user and, though it is better kept
                elsewhere, a password; ``?ca_file=``, ``cert_file=``, ``key_file=`` and
                ``sentinel_auth=on`` may follow.
            password_file: its first line is the password.
            password: counts unless there is such a file, and before one in the address.

        Raises:
            IndexAddressError: the sentence says what is wrong, and never says a password.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise IndexAddressError(f"DualPath's index must be {_FORMS}.") from None
        scheme, _, kind = parts.scheme.partition("+")
        mode = _MODES.get(kind)
        if scheme not in ("redis", "rediss") or mode is None:
            raise IndexAddressError(f"DualPath's index must be {_FORMS}.")
        user, hosts = _authority(parts, _PORTS[mode])
        options = _options(parts, tls=scheme == "rediss")
        service, db = _path(parts, mode)
        if mode == "single" and len(hosts) > 1:
            raise IndexAddressError(
                "DualPath's index names several Redis servers; say redis+sentinel:// or "
                "redis+cluster:// for that."
            )
        username, _, in_url = user.partition(":")
        return cls(
            mode=mode,
            hosts=hosts,
            service=service,
            db=db,
            username=unquote(username),
            password=_password(password_file) or password or unquote(in_url),
            tls=scheme == "rediss",
            ca_file=_file(options, "ca_file"),
            cert_file=_file(options, "cert_file"),
            key_file=_file(options, "key_file"),
            sentinel_auth=options.get("sentinel_auth") == "on",
        )

    def __str__(self) -> str:
        """For messages: where it is, without who we are."""
        return ",".join(f"{host}:{port}" for host, port in self.hosts)


def _authority(parts: SplitResult, default_port: int) -> tuple[str, tuple[Address, ...]]:
    """User (and password), and the hosts."""
    user, _, names = parts.netloc.rpartition("@")
    hosts = []
    for name in names.split(","):
        found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", name)
        host = (found[1] or found[2]) if found else ""
        port = int((found[3] if found else None) or default_port)
        if not _HOST.fullmatch(host or "") or not 0 < port < 65536:
            raise IndexAddressError("DualPath's index has no usable host and port in its address.")
        hosts.append((host, port))
    return user, tuple(hosts)


def _path(parts: SplitResult, mode: str) -> tuple[str, int]:
    """Service and database."""
    path = unquote(parts.path.strip("/"))
    if mode == "sentinel":
        service, _, db = path.partition("/")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", service):
            raise IndexAddressError(
                "DualPath's index must name the service that the Sentinels watch, as in "
                "redis+sentinel://host:26379/mymaster."
            )
    else:
        service, db = "", path
    if db and not re.fullmatch(r"\d{1,5}", db):
        raise IndexAddressError(f"DualPath's index has no database {db!r}; it must be a number.")
    if mode == "cluster" and int(db or 0):
        raise IndexAddressError("DualPath's index is a Redis Cluster, which has only database 0.")
    return service, int(db or 0)


def _options(parts: SplitResult, *, tls: bool) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in (*_FILES, "sentinel_auth"):
            raise IndexAddressError(
                f"DualPath's index has no option {name!r}; there are {', '.join(_FILES)} and "
                "sentinel_auth."
            )
        if name in _FILES and not tls:
            raise IndexAddressError(f"DualPath's index takes {name} only with rediss://.")
    if options.get("sentinel_auth", "off") not in ("on", "off"):
        raise IndexAddressError('DualPath\'s index takes sentinel_auth as "on" or "off".')
    if "key_file" in options and "cert_file" not in options:
        raise IndexAddressError("DualPath's index has a key_file and no cert_file.")
    if parts.fragment:
        raise IndexAddressError("DualPath's index must not have a # in its address.")
    return options


def _file(options: Mapping[str, str], name: str) -> Path | None:
    if name not in options:
        return None
    path = Path(options[name]).expanduser()
    if not path.is_file():
        raise IndexAddressError(f"DualPath's index has the {name} {path}, which is not a file.")
    return path


def _password(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        lines = file.expanduser().read_text().splitlines()
    except (OSError, ValueError):
        raise IndexAddressError(f"DualPath's index_password_file {file} cannot be read.") from None
    if not lines or not lines[0]:
        raise IndexAddressError(f"DualPath's index_password_file {file} is empty.")
    return lines[0]
