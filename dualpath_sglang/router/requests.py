"""A request as a client sends it: what routing has to know of it, and nothing else.

Everything else of the body goes to the engines as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import orjson
import xxhash

Kind: TypeAlias = Literal["generate", "completions", "chat"]
PATHS: Mapping[Kind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}

SESSION_HEADER = "x-dualpath-session"
ROUTING_HEADER = "x-smg-routing-key"
"""SGLang's own name for where a request belongs."""

PASSED_ON = (
    "Authorization",
    "traceparent",
    "tracestate",
    "X-Request-Id",
    "X-Custom-Labels",
    "X-SMG-Routing-Key",
    "x-sglext-ids-framed",
)
"""Headers of a client that engines see."""

TEXT_CHUNK = 2048
"""Bytes between two boundaries of a text."""
IDS_CHUNK = 256
"""Token ids between two boundaries."""
_MOST_BOUNDARIES = 4096
_MOST_BATCH = 4096
_LONGEST_RID = 128
_PICTURE = 1024
_SEEDS = ("model", "lora_path", "cache_salt", "extra_key")
"""Fields that decide, beside the prompt, whether KV is the same."""
_OWN_FIELDS = frozenset(
    {
        "stream",
        "stream_options",
        "rid",
        "kv_hints",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
    }
)
"""Fields that the router sets, or sends to one side alone."""


class BadRequestError(ValueError):
    """The client's mistake.

    Args:
        message: one sentence for the client.
        param: the field it is about.
        status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class Boundary:
    """The end of a prefix that another request may share.

    Args:
        key: a hash of all up to here.
        size: bytes, or token ids where the prompt is made of them.
    """

    key: int
    size: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request.

    Args:
        common: the body without what the router sets, as JSON.
        own: of the fields that the router sets, those that go to the decode server unchanged.
        stream: whether the client wants events.
        logprobs: whether the prefill server's logprobs must be merged into the answer.
        items: prompts in it.
        batch: whether the prompts are a list, also one of one.
        exact: whether ``size`` counts tokens; else bytes.
        size: of all prompts.
        output_tokens: the most that may be generated, all prompts together; None: not bounded.
        boundaries: of the prompt, the shortest prefix first; none of a batch.
        session: key that the client gave the session, 0 for none; trusted.
        user: likewise, but one user may have many sessions.
        rids: what the client calls it; of a batch perhaps one for each prompt.
    """

    kind: Kind
    common: bytes
    own: Mapping[str, Any]
    stream: bool
    logprobs: bool
    items: int
    batch: bool
    exact: bool
    size: int
    output_tokens: int | None
    boundaries: tuple[Boundary, ...]
    session: int
    user: int
    rids: tuple[str, ...]


def parse(kind: Kind, raw: bytes, headers: Mapping[str, str]) -> Incoming:
    """Take a request apart.

    Raises:
        BadRequestError: it cannot be served.
    """
    for name in PASSED_ON:
        if not _is_text(headers.get(name, "")):
            raise BadRequestError(f"The header {name} is no text in UTF-8")
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise BadRequestError(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object")
    _refuse_samples(kind, body)
    prompts, batch, exact, boundaries = _prompts(kind, body)
    if len(prompts) > _MOST_BATCH:
        raise BadRequestError(f"At most {_MOST_BATCH} prompts fit in one request")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise BadRequestError('"stream" must be true or false', "stream")
    logprobs = body.get("return_logprob") if kind == "generate" else False
    return Incoming(
        kind=kind,
        common=orjson.dumps({k: v for k, v in body.items() if k not in _OWN_FIELDS}),
        own={"stream_options": body["stream_options"]} if "stream_options" in body else {},
        stream=stream,
        logprobs=any(logprobs) if isinstance(logprobs, list) else bool(logprobs),
        items=len(prompts),
        batch=batch,
        exact=exact,
        size=sum(prompts),
        output_tokens=_output_tokens(kind, body, len(prompts)),
        boundaries=boundaries,
        session=_named(headers.get(SESSION_HEADER), body.get("session_id"), _session_params(body),
                       body.get("routing_key"), headers.get(ROUTING_HEADER)),
        user=_named(body.get("user")),
        rids=_rids(body.get("rid"), len(prompts)),
    )  # fmt: skip


def _is_text(value: str) -> bool:
    """Whether it can be sent on: bytes that are no UTF-8 come as halves of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_samples(kind: Kind, body: Mapping[str, Any]) -> None:
    """SGLang gives all samples of a prompt one bootstrap room, which serves one transfer."""
    given = body.get("sampling_params") if kind == "generate" else body
    for params in given if isinstance(given, list) else [given]:
        n = params.get("n") if isinstance(params, dict) else None
        if n is not None and n != 1:
            raise BadRequestError(
                "n must be 1: SGLang's prefill and decode servers cannot make several samples "
                "of one prompt; send the request several times",
                "n",
            )


def _prompts(
    kind: Kind, body: Mapping[str, Any]
) -> tuple[list[int], bool, bool, tuple[Boundary, ...]]:
    """Sizes, whether they are a list, whether they count tokens, boundaries."""
    if kind == "chat":
        return _chat(body)
    if kind == "completions":
        return _list_or_one(body.get("prompt"), "prompt", _seed(body))
    for name in ("text", "input_ids"):
        if body.get(name) is not None:
            return _list_or_one(body[name], name, _seed(body))
    if body.get("input_embeds") is not None:
        raise BadRequestError("input_embeds are not routed", "input_embeds")
    raise BadRequestError("One of text and input_ids must be there")


def _seed(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps([body.get(name) for name in _SEEDS])


def _list_or_one(
    value: Any, name: str, seed: bytes
) -> tuple[list[int], bool, bool, tuple[Boundary, ...]]:
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return [len(text)], False, False, _chunks(text, TEXT_CHUNK, 1, seed)
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{name} must be a text, or a list that is not empty", name)
    if isinstance(value[0], int):
        return [len(value)], False, True, _chunks(_ids(value, name), IDS_CHUNK * 8, 8, seed)
    if isinstance(value[0], str) and all(isinstance(v, str) for v in value):
        return [len(v.encode("utf-8", "surrogatepass")) for v in value], True, False, ()
    if all(isinstance(v, list) for v in value):
        return [len(v) for v in value], True, True, ()
    raise BadRequestError(f"{name} must be texts, or token ids", name)


def _ids(value: Sequence[Any], name: str) -> bytes:
    try:
        return array("q", value).tobytes()
    except (TypeError, OverflowError):
        raise BadRequestError(f"{name} must hold token ids alone", name) from None


def _chunks(data: bytes, step: int, unit: int, seed: bytes) -> tuple[Boundary, ...]:
    """A boundary at each multiple of the step."""
    state = xxhash.xxh3_64(b"%d" % unit + seed)
    found = []
    view = memoryview(data)
    for at in range(step, min(len(data), step * _MOST_BOUNDARIES) + 1, step):
        state.update(view[at - step : at])
        found.append(Boundary(state.intdigest(), at // unit))
    return tuple(found)


def _chat(body: Mapping[str, Any]) -> tuple[list[int], bool, bool, tuple[Boundary, ...]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list that is not empty", "messages")
    size = 0
    state = xxhash.xxh3_64(b"chat" + _seed(body))
    if body.get("tools"):
        tools = orjson.dumps(body["tools"])
        size += len(tools)
        state.update(tools)
    found = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequestError("Each of the messages must be an object", "messages")
        text = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
        size += _text_size(message, len(text))
        state.update(text)
        found.append(Boundary(state.intdigest(), size))
    return [size], False, False, tuple(found[-_MOST_BOUNDARIES:])


def _text_size(message: Mapping[str, Any], whole: int) -> int:
    """Bytes of a message that become tokens of text; a picture counts as some."""
    content = message.get("content")
    if not isinstance(content, list):
        return whole
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return sum(len(text) if isinstance(text, str) else _PICTURE for text in texts)


def _output_tokens(kind: Kind, body: Mapping[str, Any], items: int) -> int | None:
    """The most that may come."""
    if kind == "generate":
        params = body.get("sampling_params")
        listed = params if isinstance(params, list) else [params or {}] * items
        limits = [p.get("max_new_tokens") if isinstance(p, dict) else None for p in listed]
    else:
        limits = [body.get("max_completion_tokens") or body.get("max_tokens")] * items
    total = 0
    for limit in limits:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            return None
        total += limit
    return total


def _session_params(body: Mapping[str, Any]) -> object:
    params = body.get("session_params")
    return params.get("id") if isinstance(params, dict) else None


def _named(*candidates: object) -> int:
    """A key for the first that names something."""
    for value in candidates:
        if isinstance(value, str) and value:
            return xxhash.xxh3_64(b"id " + value.encode("utf-8", "surrogatepass")).intdigest()
    return 0


def _rids(value: object, items: int) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != items:
        raise BadRequestError("There must be as many rids as prompts", "rid")
    for rid in listed:
        if not isinstance(rid, str) or not 0 < len(rid) <= _LONGEST_RID or not rid.isprintable():
            raise BadRequestError(
                f"A rid is a text of at most {_LONGEST_RID} printable characters", "rid"
            )
    if len(set(listed)) < len(listed):
        raise BadRequestError("A rid stands twice in the request", "rid")
    return tuple(listed)
