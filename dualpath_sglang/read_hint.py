"""Which nodes are to read a request's hit from storage: the router's choice, on its way to servers.

The router that places a request knows which read queues are short; the servers that serve it know
which of its blocks are stored. So it names nodes and their shares, and prefill and decode server
find the same node for the same block (:func:`dualpath_sglang.scheduling.assign.sides_of`), whose
agent reads it once for both. ``[(prefill node, 1.0)]`` is the paper's PE read path, ``[(decode
node, 1.0)]`` its DE read path.

A hint travels in SGLang's envelope ``kv_hints`` where the endpoint takes one (``/generate``), else
at the end of the request's id, which the OpenAI endpoints take as ``rid``. Who it comes from is not
known: it may say where blocks are read, never which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

MAX_SHARES = 8
MAX_NAME = 255
"""Bytes of a node's name in UTF-8."""
_SUM_WITHIN = 1e-6
_TYPE, _VERSION = "dualpath.read", "1"
_MARK = f"|dp{_VERSION}|"
# SGLang numbers the requests that come of one (several samples, several prompts): "<rid>_0".
_SUFFIX = re.compile(r"\|dp1\|([!-{}~]*)\|(?:_[0-9]{1,9}){0,3}\Z")
_WEIGHT = re.compile(r"[0-9]{1,4}(\.[0-9]{1,24})?(e-[0-9]{1,3})?\Z")
_ALONE = "!"
"""Before the nodes: their blocks are wanted by one server."""
_LONGEST = MAX_SHARES * (3 * MAX_NAME + 40) + 64
"""Characters of a hint at the end of a request id, at most."""


@dataclass(frozen=True, slots=True)
class ReadHint:
    """Who reads a request's hit.

    Args:
        shares: names of nodes, each once, and the part that each reads, above 0. The parts sum
            up to 1.
        shared: whether prefill and decode server both read the hit. When only one of them does,
            the share of its own machine need not go through the agent there, which costs speed.

    Raises:
        ValueError: that is not so, or it is more than a request can carry.
    """

    shares: tuple[tuple[str, float], ...]
    shared: bool = True

    def __post_init__(self) -> None:
        if not 0 < len(self.shares) <= MAX_SHARES:
            raise ValueError(f"a hint names 1 to {MAX_SHARES} nodes, not {len(self.shares)}")
        for name, weight in self.shares:
            if not name or not name.isprintable() or len(name.encode()) > MAX_NAME:
                raise ValueError(f"{name[:40]!r} cannot be the name of a node")
            if not 0 < weight < math.inf:  # nor not-a-number
                raise ValueError(f"{weight} cannot be a part of a hit")
        if len({name for name, _ in self.shares}) < len(self.shares):
            raise ValueError("a hint names a node twice")
        if abs(sum(weight for _, weight in self.shares) - 1) > _SUM_WITHIN:
            raise ValueError("the parts of a hit do not sum up to 1")


def into_rid(rid: str, hint: ReadHint) -> str:
    """A request id that carries a hint, in place of the one that it may carry already.

    What is added is printable ASCII without blanks, whatever the nodes are called.
    """
    listed = ",".join(f"{quote(name, safe='')}={float(weight)!r}" for name, weight in hint.shares)
    return f"{without_hint(rid)}{_MARK}{'' if hint.shared else _ALONE}{listed}|"


def without_hint(rid: str) -> str:
    """The request id that :func:`into_rid` was given; any other as it is.

    What is left carries no hint, whatever a client put before the one that is taken off.
    """
    while (found := _suffix(rid)) is not None:
        rid = rid[: found[0]]
    return rid


def from_rid(rid: str) -> ReadHint | None:
    """The hint that a request id carries; None when there is none, or it is malformed."""
    found = _suffix(rid)
    if found is None:
        return None
    shares = []
    listed = found[1].removeprefix(_ALONE)
    for part in listed.split(","):
        name, equals, weight = part.partition("=")
        if not equals or _WEIGHT.match(weight) is None:
            return None
        shares.append((unquote(name), float(weight)))
    return _hint(shares, shared=listed == found[1])


def _suffix(rid: str) -> tuple[int, str] | None:
    """Where the hint begins in a request id, and what it says."""
    tail_at = max(0, len(rid) - _LONGEST)
    found = _SUFFIX.search(rid, max(tail_at, rid.rfind(_MARK, tail_at)))
    return None if found is None else (found.start(), found[1])


def kv_hints(hint: ReadHint, message_id: str) -> dict[str, object]:
    """SGLang's envelope for a request to ``/generate``, as JSON has it."""
    payload: dict[str, object] = {"shares": [[name, weight] for name, weight in hint.shares]}
    if not hint.shared:
        payload["shared"] = False
    action = {
        "action_id": "read",
        "action_type": _TYPE,
        "action_version": _VERSION,
        "payload": payload,
    }
    return {"protocol_version": "1", "message_id": message_id, "actions": [action]}


def from_kv_hints(envelope: object) -> ReadHint | None:
    """The hint in an envelope, as JSON or as SGLang's ``Req.kv_hints``.

    None when there is none, or it is malformed; of several the first. Never raises.
    """
    try:
        for action in _list(_get(envelope, "actions")):
            if (_get(action, "action_type"), _get(action, "action_version")) == (_TYPE, _VERSION):
                payload = _get(action, "payload")
                shares = ((name, weight) for name, weight in _list(_get(payload, "shares")))
                return _hint(shares, shared=_get(payload, "shared") is not False)
    except Exception:  # noqa: BLE001 -- whatever it is, it is no hint
        return None
    return None


def _get(thing: object, name: str) -> object:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def _hint(shares: Iterable[tuple[object, object]], *, shared: bool) -> ReadHint | None:
    """None when they cannot be those of a hint."""
    try:
        checked = tuple((_name(name), _weight(weight)) for name, weight in shares)
        return ReadHint(checked, shared)
    except (ValueError, OverflowError):
        return None


def _name(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("a node is called by a text")


def _weight(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("a part is a number")
