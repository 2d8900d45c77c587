"""Where an agent listens, on a machine with these addresses."""

from __future__ import annotations

import ipaddress
import socket
from types import SimpleNamespace

import psutil
import pytest

from dualpath_sglang.node.listen import ListenError, ListenSpec

REDIS = ("127.0.0.1", 6379)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    rows = {
        "lo": [row(socket.AF_INET, "127.0.0.1"), row(socket.AF_INET6, "::1")],
        "eth0": [row(socket.AF_PACKET, "00:11:22:33:44:55"), row(socket.AF_INET, "10.81.0.7")],
        "eth1": [
            row(socket.AF_INET, "10.82.5.9"),
            row(socket.AF_INET, "10.82.5.3"),
            row(socket.AF_INET6, "fd00::7"),
            row(socket.AF_INET6, "fe80::1%eth1"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        ("auto", "127.0.0.1", 0),
        ("auto:7000", "127.0.0.1", 7000),
        ("10.81.0.7", "10.81.0.7", 0),
        ("10.81.0.7:7000", "10.81.0.7", 7000),
        ("localhost:7000", "127.0.0.1", 7000),
        ("[fd00::7]:7000", "fd00::7", 7000),
        ("fd00::7", "fd00::7", 0),
        ("10.81.0.0/24", "10.81.0.7", 0),
        ("10.82.0.0/16:7000", "10.82.5.3", 7000),
        ("10.82.0.1/16", "10.82.5.3", 0),
        ("[fd00::/64]:7000", "fd00::7", 7000),
        ("fd00::/64", "fd00::7", 0),
        ("[::1]", "::1", 0),
    ],
)
def test_what_a_setting_means(addresses: None, text: str, address: str, port: int) -> None:
    spec = ListenSpec.parse(text)
    assert spec.port == port
    found = spec.resolve(REDIS)
    assert ipaddress.ip_address(found) == ipaddress.ip_address(address) or text == "localhost:7000"


def test_a_machine_without_an_address_in_the_network_is_told_so(addresses: None) -> None:
    with pytest.raises(ListenError, match=r"no address in the network 10\.83\.0\.0/24"):
        ListenSpec.parse("10.83.0.0/24").resolve(REDIS)
    with pytest.raises(ListenError):
        ListenSpec.parse("fe80::/10").resolve(REDIS)


@pytest.mark.parametrize("text", ["", ":7000", "a b", "10.0.0.0/64", "[::1", "x:y", "h:70000", "/"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ListenSpec.parse(text)


def test_this_machine_knows_its_own_addresses() -> None:
    assert ListenSpec.parse("127.0.0.0/8").resolve(REDIS) == "127.0.0.1"
