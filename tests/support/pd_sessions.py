"""Agent sessions against anything that speaks SGLang's HTTP: turns whose contexts grow.

A session's next prompt is made of its last answer, so one wrong token shows in all that follow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.tiny_model import FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN

Form = Literal["generate", "generate-stream", "chat", "chat-stream"]
FORMS: tuple[Form, ...] = ("generate", "generate-stream", "chat", "chat-stream")

Post = Callable[[str, Mapping[str, Any]], tuple[int, str]]
"""A path and a body; status and text."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class AnswerError(AssertionError):
    """No whole answer; the message is what the client was told."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a client got.

    Args:
        answer: token ids of ``/generate``, the text of a chat.
        cached: prompt tokens that were cached.
    """

    answer: tuple[int, ...] | str
    cached: int


@dataclass
class Session:
    """One.

    Args:
        first: tokens of the first prompt.
        more: tokens that the tools add in each turn.
        new: tokens that are generated in each turn.
    """

    form: Form
    seed: int
    first: int = 180
    more: int = 40
    new: int = 8
    turns: int = 0
    answers: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.tokens = [self._token() for _ in range(self.first)]
        self.messages = [{"role": "system", "content": self._text(self.first)}]
        self._tools()

    def turn(self, post: Post) -> Said:
        """Have the next answer. Raises AnswerError."""
        said = parse(self.form, *post(self.path, self.body()))
        self.turns += 1
        self.answers.append(said)
        if isinstance(said.answer, str):
            self.messages.append({"role": "assistant", "content": said.answer})
        else:
            self.tokens += said.answer
        self._tools()
        return said

    @property
    def path(self) -> str:
        """Where it is posted."""
        return "/v1/chat/completions" if self.form.startswith("chat") else "/generate"

    def body(self) -> dict[str, Any]:
        """Of the next request."""
        own: dict[str, Any] = {"stream": True} if self.form.endswith("stream") else {}
        if self.form.startswith("chat"):
            own |= {"stream_options": {"include_usage": True}} if own else {}
            return {
                "model": "default",
                "messages": list(self.messages),
                "max_tokens": self.new,
                "temperature": 0,
                "ignore_eos": True,
                **own,
            }
        params = {"temperature": 0, "max_new_tokens": self.new, "ignore_eos": True}
        return {"input_ids": list(self.tokens), "sampling_params": params, **own}

    def _tools(self) -> None:
        self.tokens += [self._token() for _ in range(self.more)]
        self.messages.append({"role": "user", "content": self._text(self.more)})

    def _token(self) -> int:
        return self._random.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN)

    def _text(self, size: int) -> str:
        return "".join(self._random.choice(_LETTERS) for _ in range(size))


def parse(form: Form, status: int, text: str) -> Said:
    """An answer. Raises AnswerError when it is none, or not whole."""
    if status != 200:
        raise AnswerError(f"{status}: {text}")
    if form == "generate":
        return _generated(json.loads(text))
    if form == "chat":
        told = json.loads(text)
        return Said(told["choices"][0]["message"]["content"] or "", _cached(told["usage"]))
    events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        raise AnswerError(f"the stream breaks off: {text[-500:]}")
    parsed = [json.loads(event) for event in events[:-1]]
    for event in parsed:
        if "error" in event:
            raise AnswerError(f"in the stream: {event['error']}")
    if form == "generate-stream":
        return _generated(parsed[-1])
    content = "".join(
        choice["delta"].get("content") or "" for event in parsed for choice in event["choices"]
    )
    usage = [event["usage"] for event in parsed if event.get("usage")]
    return Said(content, _cached(usage[-1]) if usage else 0)


def _generated(told: Mapping[str, Any]) -> Said:
    meta = told["meta_info"]
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise AnswerError(f"aborted: {meta['finish_reason']}")
    return Said(tuple(told["output_ids"]), meta["cached_tokens"])


def _cached(usage: Mapping[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
