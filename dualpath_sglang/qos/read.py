"""What ``tc`` and ``ip`` say about a device, read into plain values."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_LIMIT_S = 20.0
_RATES = {"bit": 1, "Kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_SIZES = {"b": 1, "Kb": 1 << 10, "Mb": 1 << 20, "Gb": 1 << 30}


class UnreadableError(Exception):
    """The state of a device cannot be had; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class HtbClass:
    """One class of HTB: rates in bits a second, sizes in bytes, as rounded by the kernel."""

    classid: str
    parent: str | None
    prio: int
    rate: int
    ceil: int
    burst: int
    cburst: int
    quantum: int


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter of the root.

    Args:
        matches: (offset, value, mask) of the 32-bit words that u32 compares.
        understood: whether it is u32 and nothing else is compared.
    """

    protocol: str
    classid: str
    matches: tuple[tuple[int, int, int], ...]
    understood: bool


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What a device does with packets.

    Args:
        root: kind of its root queueing discipline.
        default: class of what no filter matches, when the root is HTB.
        leaves: by class, the kind and limit of its own queueing discipline.
    """

    mtu: int
    gso_max_segs: int
    root: str | None
    default: str | None
    leaves: dict[str, tuple[str, int | None]]
    classes: dict[str, HtbClass]
    filters: list[Filter]


def read_device(device: str) -> DeviceState:
    """Ask for the state of a device. Needs no root.

    Raises:
        UnreadableError: the tools are missing or fail, or there is no such device.
    """
    for tool in ("tc", "ip"):
        if shutil.which(tool) is None:
            raise UnreadableError(f"{tool} is not installed here (package iproute2)")
    try:
        socket.if_nametoindex(device)
    except OSError:
        raise UnreadableError(f"There is no network device {device} here") from None
    link = _json(["ip", "-d", "-j", "link", "show", "dev", device])[0]
    qdiscs = _json(["tc", "-j", "qdisc", "show", "dev", device])
    root = next((qdisc for qdisc in qdiscs if qdisc.get("root")), {})
    default = root.get("options", {}).get("default") if root.get("kind") == "htb" else None
    handle = root.get("handle", "")
    return DeviceState(
        mtu=int(link["mtu"]),
        gso_max_segs=int(link.get("gso_max_segs", 0)),
        root=root.get("kind"),
        # Classes go by hexadecimal numbers, whether told as 0x10 or as 10.
        default=None if default is None else f"{handle}{int(str(default), 16):x}",
        leaves={
            qdisc["parent"]: (str(qdisc["kind"]), qdisc.get("options", {}).get("limit"))
            for qdisc in qdiscs
            if "parent" in qdisc
        },
        classes=parse_classes(_run(["tc", "-d", "class", "show", "dev", device])),
        filters=parse_filters(_run(["tc", "-j", "filter", "show", "dev", device])),
    )


def parse_classes(text: str) -> dict[str, HtbClass]:
    """Classes of HTB, by number. Not from JSON, which most versions of tc do not print for them.

    Raises:
        UnreadableError: it is not what tc prints.
    """
    classes = {}
    for line in text.splitlines():
        words = line.split()
        if words[:2] != ["class", "htb"]:
            continue
        told = dict(itertools.pairwise(words))
        try:
            parent = None if "root" in words else told["parent"]
            classes[words[2]] = HtbClass(
                classid=words[2],
                parent=parent,
                prio=int(told.get("prio", "0")),
                rate=_amount(told["rate"], _RATES),
                ceil=_amount(told["ceil"], _RATES),
                burst=_amount(told["burst"].partition("/")[0], _SIZES),
                cburst=_amount(told["cburst"].partition("/")[0], _SIZES),
                quantum=int(told.get("quantum", "0")),
            )
        except (KeyError, ValueError):
            raise UnreadableError(f"tc says what cannot be read: {line.strip()}") from None
    return classes


def parse_filters(text: str) -> list[Filter]:
    """Filters that name a class.

    Raises:
        UnreadableError: it is not JSON.
    """
    filters = []
    # As pairs, for "match" stands once for every word that is compared.
    for entry in map(dict, _parse(text, "tc", list)):
        pairs = entry.get("options") or []
        options = dict(pairs)
        if not options or "ht_divisor" in options:  # no filter, but its table
            continue
        words = [dict(value) for name, value in pairs if name == "match"]
        matches = tuple(
            (int(word["off"]), int(word["value"], 16), int(word["mask"], 16)) for word in words
        )
        filters.append(
            Filter(
                protocol=str(entry.get("protocol")),
                classid=str(options.get("flowid") or options.get("classid")),
                matches=matches,
                understood=entry.get("kind") == "u32" and bool(matches),
            )
        )
    return filters


def _amount(text: str, units: dict[str, int]) -> int:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", text)
    if match is None or match.group(2) not in units:
        raise ValueError(text)
    return round(float(match.group(1)) * units[match.group(2)])


def _json(command: Sequence[str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = _parse(_run(command), command[0], dict)
    return told


def _parse(text: str, tool: str, of_pairs: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    try:
        return json.loads(text or "[]", object_pairs_hook=of_pairs)
    except ValueError:
        raise UnreadableError(f"{tool} prints no JSON here: it is too old") from None


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnreadableError(f"{command[0]} cannot be asked: {error}") from None
    if done.returncode != 0:
        raise UnreadableError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
