"""Logprobs of a prompt: the prefill server computes them, the decode server answers.

As SGLang's own load balancer does, ``input_token_logprobs`` of the prefill answer go before those
of the decode answer, in each event of a stream too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

_NAMES = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def of_prefill(body: bytes) -> list[dict[str, Any]]:
    """``meta_info`` of each prompt in a prefill server's answer; empty when it cannot be read."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return []
    items = told if isinstance(told, list) else [told]
    return [item.get("meta_info") or {} for item in items if isinstance(item, dict)]


def merge_answer(body: bytes, prefill: Sequence[dict[str, Any]]) -> bytes:
    """A whole answer of a decode server, with the prefill server's logprobs."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return body
    for i, item in enumerate(told if isinstance(told, list) else [told]):
        _merge(item, prefill, i)
    return orjson.dumps(told)


def merge_event(event: bytes, prefill: Sequence[dict[str, Any]]) -> bytes:
    """One event of a decode server's stream, without the blank line at its end, likewise."""
    if not event.startswith(b"data:"):
        return event
    try:
        told = orjson.loads(event.removeprefix(b"data:"))
    except ValueError:
        return event  # [DONE]
    if isinstance(told, dict):
        _merge(told, prefill, told.get("index") or 0)
    return b"data: " + orjson.dumps(told)


def _merge(item: Any, prefill: Sequence[dict[str, Any]], at: int) -> None:
    meta = item.get("meta_info") if isinstance(item, dict) else None
    if not isinstance(meta, dict) or not isinstance(at, int) or not 0 <= at < len(prefill):
        return
    for name in _NAMES:
        before, after = prefill[at].get(name), meta.get(name)
        if isinstance(before, list) and (after is None or isinstance(after, list)):
            meta[name] = before + (after or [])


class Events:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Those that are whole by now, without the blank lines."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        return whole

    @property
    def rest(self) -> bytes:
        """What has no end yet."""
        return self._rest
