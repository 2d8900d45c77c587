"""Where an agent listens: the setting ``node_listen``, and what it means on this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TypeAlias

import psutil

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_FORM = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^\[\]]+?))(?::(?P<port>\d{1,5}))?")
_HOST = re.compile(r"[A-Za-z0-9_.%-]+")


class ListenError(Exception):
    """There is no such address on this machine; the message is one plain sentence."""


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """Where to listen, taken apart.

    Args:
        host: name or address; empty for "auto" and for a network.
        network: whose own address is meant.
        port: 0 for any free one.
    """

    host: str = ""
    network: Network | None = None
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> ListenSpec:
        """Take the setting apart.

        Args:
            text: "auto", a host, an address or a network, each with ":port" or without; those of
                IPv6 in brackets when a port follows.

        Raises:
            ValueError: it is something else.
        """
        found = None if _address(text) or _network(text) else _FORM.fullmatch(text)
        host = text if found is None else found["bracketed"] or found["plain"]
        port = int((found and found["port"]) or 0)
        if port > 65535:
            raise ValueError("there is no such port")
        if host == "auto":
            return cls(port=port)
        if "/" in host:
            network = _network(host)
            if network is None:
                raise ValueError("it is no network")
            return cls(network=network, port=port)
        if _address(host) is None and not _HOST.fullmatch(host):
            raise ValueError("it is no host")
        return cls(host=host, port=port)

    def resolve(self, index_address: tuple[str, int]) -> str:
        """The address to listen at.

        Args:
            index_address: host and port of the index, for "auto".

        Raises:
            ListenError: the machine has no such address.
            OSError: a name cannot be looked up, or nothing leads to the index, for now.
        """
        if self.network is not None:
            return own_address_in(self.network)
        if self.host:
            return str(socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][4][0])
        return address_towards(*index_address)


def joined(host: str, port: int) -> str:
    """``host:port``, as reports have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(address: str) -> tuple[str, int]:
    """Host and port of such an address.

    Raises:
        ValueError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no host and port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def announced(host: str, index_address: tuple[str, int]) -> str:
    """What others call an address that is listened at: one that means all stands for one of them.

    Raises:
        OSError: nothing leads to the index, for now.
    """
    address = _address(host)
    everywhere = address is not None and address.is_unspecified
    return address_towards(*index_address) if everywhere else host


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches another. Nothing is sent.

    Raises:
        OSError: the name cannot be looked up, or nothing leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def own_address_in(network: Network) -> str:
    """The machine's own address in a network, the lowest of several.

    Raises:
        ListenError: it has none.
    """
    own = sorted(address for address in own_addresses() if address in network)
    if not own:
        raise ListenError(
            f"This machine has no address in the network {network}, where node_listen wants it"
        )
    return str(own[0])


def own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """All addresses of this machine, but for those of a link alone."""
    found = []
    for rows in psutil.net_if_addrs().values():
        for row in rows:
            address = None
            if row.family in (socket.AF_INET, socket.AF_INET6):
                address = _address(row.address)
            if address is not None and not (address.version == 6 and address.is_link_local):
                found.append(address)
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None
