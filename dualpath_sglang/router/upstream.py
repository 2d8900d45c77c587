"""One request to one engine: its body, its answer, and what an answer means.

SGLang says that a request failed in three ways: a status, an event ``{"error": ...}`` in a stream,
and a finish reason ``abort``. What the client did wrong (4xx) is an answer like any other. The
rest is a failure, after which the request may be placed again while nothing was sent on.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import aiohttp
import orjson

from dualpath_sglang.read_hint import ReadHint, into_rid, kv_hints, without_hint
from dualpath_sglang.router.engines import Engine
from dualpath_sglang.router.options import Role
from dualpath_sglang.router.requests import Incoming, Kind

Failure: TypeAlias = Literal["refused", "connect", "status", "lost", "abort", "dead", "late"]
Verdict: TypeAlias = Literal["go", "hold", "done"]

_ROOMS = 1 << 62
"""Half of what 63 bits give: the prompts of a batch take the following ones."""
_FIRST_MOST = 16 << 20
"""Bytes of events that are looked at before the first is passed on."""


class UpstreamError(Exception):
    """An engine did not do its part.

    Args:
        role: whose part.
        failure: in which way.
        message: for the client and the log.
        status: to tell the client, should nobody else serve it.
    """

    def __init__(self, role: Role, failure: Failure, message: str, status: int = 502) -> None:
        super().__init__(f"{role}: {message}")
        self.role = role
        self.failure = failure
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    content_type: str
    body: bytes

    @property
    def refused(self) -> bool:
        """Whether the client is at fault."""
        return self.status >= 400


@dataclass(frozen=True, slots=True)
class Bodies:
    """What two engines are sent.

    Args:
        rids: as the engines know it, one a prompt.
    """

    prefill: bytes
    decode: bytes
    rids: tuple[str, ...]


def bodies(incoming: Incoming, prefill: Engine, hint: ReadHint | None) -> Bodies:
    """The request for both sides, with names and a room that no other attempt has.

    A rid begins with random digits of a fixed number: SGLang aborts by prefix, and one client's
    choice must not touch another's requests.
    """
    base = secrets.token_hex(8)
    rids = []
    for i in range(incoming.items):
        rid = f"{base}.{i:04d}" if incoming.batch else base
        if incoming.rids:
            given = incoming.rids[i] if len(incoming.rids) > 1 else incoming.rids[0]
            rid = f"{rid}-{without_hint(given)}"
        if hint is not None and incoming.kind != "generate":
            rid = into_rid(rid, hint)
        rids.append(rid)
    own: dict[str, Any] = {
        "rid": rids if incoming.batch else rids[0],
        "bootstrap_host": prefill.spec.host,
        "bootstrap_port": prefill.spec.bootstrap_port,
        "bootstrap_room": secrets.randbelow(_ROOMS),  # SGLang numbers those of a batch from here
    }
    if hint is not None and incoming.kind == "generate":
        own["kv_hints"] = kv_hints(hint, base)
    head = incoming.common[:-1] + b","
    return Bodies(
        head + orjson.dumps({**own, "stream": False})[1:],
        head + orjson.dumps({**own, **incoming.own, "stream": incoming.stream})[1:],
        tuple(rids),
    )


def nobody_listens(error: BaseException) -> bool:
    """Whether a server's machine said that no process is there.

    All else that keeps a connection from being made (a full backlog, a name server, file
    descriptors or ports that this process has run out of) says nothing about the server.
    """
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED


def failed(role: Role, error: BaseException) -> UpstreamError:
    """What an exception of the HTTP client means."""
    if isinstance(error, UpstreamError):
        return error
    if nobody_listens(error):
        return UpstreamError(role, "refused", f"the {role} server refuses connections", 503)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
        return UpstreamError(role, "connect", f"the {role} server cannot be reached", 503)
    return UpstreamError(role, "lost", f"the connection to the {role} server was lost")


def check_answer(role: Role, answer: Answer, *, aborted: bool = False) -> Answer:
    """The answer, unless it says that the engine failed.

    Args:
        aborted: whether the client wanted it to be given up.

    Raises:
        UpstreamError: it does.
    """
    if aborted:
        return answer
    if answer.status >= 500:
        text = _message(answer.body)
        raise UpstreamError(
            role, "status", f"the {role} server answered {answer.status}: {text}", answer.status
        )
    if b'"abort"' in answer.body:
        _check_aborted(role, answer.body)
    return answer


def _message(body: bytes) -> str:
    try:
        told = orjson.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace")
    for name in ("detail", "message", "error"):
        value = told.get(name) if isinstance(told, dict) else None
        if isinstance(value, Mapping):
            value = value.get("message")
        if isinstance(value, str):
            return value[:500]
    return body[:200].decode(errors="replace")


def _check_aborted(role: Role, body: bytes) -> None:
    """Raises when a whole answer says that the engine gave up."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return
    for item in told if isinstance(told, list) else [told]:
        if isinstance(item, dict):
            _check_finish(role, item)


def _check_finish(role: Role, told: Mapping[str, Any]) -> None:
    meta = told.get("meta_info")
    reasons = [meta.get("finish_reason")] if isinstance(meta, dict) else []
    choices = told.get("choices")
    if isinstance(choices, list):
        reasons += [c.get("finish_reason") for c in choices if isinstance(c, dict)]
    for reason in reasons:
        if reason == "abort":
            raise UpstreamError(role, "abort", f"the {role} server gave the request up")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            status = reason.get("status_code")
            if isinstance(status, int) and 400 <= status < 500:
                continue
            message = reason.get("message") or "no reason given"
            raise UpstreamError(role, "abort", f"the {role} server gave the request up: {message}")


def judge(kind: Kind, event: bytes) -> Verdict:
    """What the first events of a stream mean: pass them on, or look at the next one too.

    A chat begins with an event that only says who speaks; it comes before an abort as well.

    Raises:
        UpstreamError: the decode server failed.
    """
    data = event.removeprefix(b"data:").strip()
    if not data or event.startswith(b":"):
        return "hold"
    if data == b"[DONE]":
        return "done"
    try:
        told = orjson.loads(data)
    except ValueError:
        return "go"
    if not isinstance(told, dict):
        return "go"
    error = told.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        if isinstance(code, int) and 400 <= code < 500:
            return "go"
        status = code if isinstance(code, int) and 500 <= code < 600 else 502
        message = f"the decode server failed: {error.get('message')}"
        raise UpstreamError("decode", "status", message, status)
    _check_finish("decode", told)
    if kind == "chat" and _says_nothing(told.get("choices")):
        return "hold"
    return "go"


def _says_nothing(choices: object) -> bool:
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or choice.get("finish_reason"):
            return False
        if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return False
    return True


def prompt_tokens(body: bytes) -> tuple[int, int]:
    """(prompt tokens, of them cached) that an answer tells of; zeros when it tells nothing."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return 0, 0
    total = cached = 0
    for item in told if isinstance(told, list) else [told]:
        if not isinstance(item, dict):
            continue
        meta, usage = item.get("meta_info"), item.get("usage")
        if isinstance(meta, dict):
            total += _count(meta.get("prompt_tokens"))
            cached += _count(meta.get("cached_tokens"))
        elif isinstance(usage, dict):
            total += _count(usage.get("prompt_tokens"))
            details = usage.get("prompt_tokens_details")
            cached += _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return total, cached


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


async def read_answer(response: aiohttp.ClientResponse) -> Answer:
    """All of it."""
    body = await response.read()
    kind = response.headers.get("Content-Type", "application/json")
    return Answer(response.status, kind, body)


async def first_events(
    response: aiohttp.ClientResponse, kind: Kind, wanted: Callable[[], bool]
) -> tuple[bytes, bool]:
    """Bytes of a stream up to where it is clear that it succeeds, as they came; whether it ended.

    Args:
        wanted: whether the client has not had it aborted.

    Raises:
        UpstreamError: it fails, or ends before it says anything.
    """
    seen = bytearray()
    at = 0
    async for chunk in response.content.iter_any():
        seen += chunk
        while (end := seen.find(b"\n\n", at)) >= 0:
            event, at = bytes(seen[at:end]), end + 2
            if not wanted() or judge(kind, event) != "hold":
                return bytes(seen), False
        if len(seen) > _FIRST_MOST:
            return bytes(seen), False
    if not seen:
        raise UpstreamError("decode", "lost", "the decode server's answer ended before it began")
    return bytes(seen), True
