"""An agent session against any OpenAI-compatible server, and what the server's cache did for it.

    python examples/agent_session.py --url http://127.0.0.1:30000/v1 --turns 12

A long system prompt, then turns: the model answers, a tool runs, its output is appended, and the
whole conversation is sent again, as agents do. Tool outputs are synthetic and depend on the seed
alone, answers are greedy, so a session can be repeated and compared turn by turn. With --save a
session can go on later, for example after the server was restarted:

    python examples/agent_session.py --turns 4 --save session.json
    python examples/agent_session.py --turns 8 --resume session.json

SGLang tells how many prompt tokens were cached in which tier (device, host, storage) when it is
asked; other servers tell the sum at most (SGLang's --enable-cache-report too), and what a server
does not tell is shown as "-". Needs the package `openai`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

_WORDS = (
    "agent branch buffer build cache check client commit config cursor deploy error event fetch "
    "field file filter flag handler header index input job key layer limit list loader log map "
    "merge method module node object option order output page parser patch path plan pool port "
    "prefix probe query queue range reader record region report request result retry review "
    "router rule run schema scope server shard signal slot source stage state step store stream "
    "suite table task test thread timer token trace tree unit update user value vector version "
    "worker writer zone"
)
WORDS = _WORDS.split()
TOOLS = ("read_file", "search", "run_tests", "list_directory", "show_diff")


@dataclass(frozen=True, slots=True)
class Workload:
    """What the session consists of; the same workload gives the same prompts.

    Args:
        seed: of all synthetic text.
        system_chars: length of the system prompt.
        tool_chars: length of a tool's output.
        answer_tokens: most tokens of an answer.
    """

    seed: int = 0
    system_chars: int = 12000
    tool_chars: int = 1200
    answer_tokens: int = 64

    def system_prompt(self) -> str:
        """Instructions and a description of the project, as an agent's harness would send."""
        source = random.Random(f"{self.seed}/system")
        lines = ["You are a software engineer. Work step by step; call one tool a turn.", ""]
        length = sum(len(line) + 1 for line in lines)
        while length < self.system_chars:
            lines.append(f"- {_sentence(source)}")
            length += len(lines[-1]) + 1
        return "\n".join(lines)[: self.system_chars]

    def user_message(self, turn: int) -> str:
        """The task in turn 1, a tool's output in all others."""
        source = random.Random(f"{self.seed}/{turn}")
        if turn == 1:
            return f"The {source.choice(WORDS)} test fails. Find out why, and repair it."
        tool, lines = source.choice(TOOLS), []
        length = 0
        while length < self.tool_chars:
            name, number = source.choice(WORDS), source.randrange(1, 2000)
            lines.append(f"src/{name}.py:{number}: {_sentence(source)}")
            length += len(lines[-1]) + 1
        return f"Output of {tool}:\n" + "\n".join(lines)[: self.tool_chars]


def _sentence(source: random.Random) -> str:
    words = source.choices(WORDS, k=source.randrange(6, 14))
    return f"{' '.join(words).capitalize()} {source.randrange(100)}."


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer. Token counts are None where the server does not tell."""

    number: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    storage_tokens: int | None
    ttft_s: float
    elapsed_s: float
    answer: str


@dataclass(slots=True)
class Session:
    """A conversation so far."""

    workload: Workload
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def step(self, endpoint: Endpoint) -> Turn:
        """One more turn: append the next tool output, ask, append the answer."""
        number = len(self.turns) + 1
        messages = list(self.messages)
        if not messages:
            messages.append({"role": "system", "content": self.workload.system_prompt()})
        messages.append({"role": "user", "content": self.workload.user_message(number)})
        turn = endpoint.ask(number, messages, self.workload.answer_tokens)
        self.messages = [*messages, {"role": "assistant", "content": turn.answer}]
        self.turns.append(turn)
        return turn

    def repeat(self, endpoint: Endpoint) -> Turn:
        """Ask the last question again; changes nothing."""
        last = self.turns[-1]
        return endpoint.ask(last.number, self.messages[:-1], self.workload.answer_tokens)

    def save(self, path: Path) -> None:
        """Write everything down, to go on from later."""
        state = {
            "workload": asdict(self.workload),
            "messages": self.messages,
            "turns": [asdict(turn) for turn in self.turns],
        }
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Session:
        """Inverse of :meth:`save`.

        Raises:
            ValueError, OSError: there is no such session in the file.
        """
        state = json.loads(path.read_text())
        try:
            turns = [Turn(**turn) for turn in state["turns"]]
            return cls(Workload(**state["workload"]), state["messages"], turns)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no session: {error}") from error


class Endpoint:
    """A model behind an OpenAI-compatible API.

    Args:
        url: base URL, with /v1.
        model: its name; by default the first that the server offers.
        api_key: when the server wants one.
        client: sends the requests, where they are to be looked at.

    Raises:
        openai.OpenAIError: the server cannot be reached or offers no model.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str = "none",
        timeout_s: float = 600.0,
        client: httpx.Client | None = None,
    ) -> None:
        self._client: Any = openai.OpenAI(
            base_url=url, api_key=api_key, timeout=timeout_s, max_retries=0, http_client=client
        )
        offered = list(self._client.models.list())
        if model is None and not offered:
            raise openai.OpenAIError(f"{url} offers no model")
        self.model = model or offered[0].id
        self.is_sglang = any(m.owned_by == "sglang" for m in offered)
        # Asks SGLang for cached tokens by tier; others may refuse a field that they do not know.
        self._extra: dict[str, Any] | None = {"return_cached_tokens_details": True}

    def ask(self, number: int, messages: Sequence[dict[str, str]], answer_tokens: int) -> Turn:
        """Send a conversation, stream the greedy answer.

        Raises:
            openai.OpenAIError: no answer.
        """
        began = time.monotonic()
        try:
            stream = self._stream(messages, answer_tokens)
        except openai.BadRequestError:
            if self._extra is None:
                raise
            self._extra = None
            began = time.monotonic()
            stream = self._stream(messages, answer_tokens)
        first: float | None = None
        text: list[str] = []
        usage: Any = None
        tiers: dict[str, Any] | None = None
        for chunk in stream:
            usage = chunk.usage or usage
            extension = (chunk.model_extra or {}).get("sglext") or {}
            tiers = extension.get("cached_tokens_details") or tiers
            for choice in chunk.choices:
                content = choice.delta.content
                thought = (choice.delta.model_extra or {}).get("reasoning_content")
                if first is None and (content or thought):
                    first = time.monotonic()
                text.append(content or "")
        ended = time.monotonic()
        if usage is None:
            raise openai.OpenAIError("the server's answer ends without its usage")
        if tiers is None and self.is_sglang and self._extra is not None:
            tiers = {}  # SGLang leaves it out when nothing was cached
        details = getattr(usage.prompt_tokens_details, "cached_tokens", None)
        by_tier = {
            name: None if tiers is None else int(tiers.get(name) or 0)
            for name in ("device", "host", "storage")
        }
        return Turn(
            number=number,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=details if tiers is None else sum(v or 0 for v in by_tier.values()),
            device_tokens=by_tier["device"],
            host_tokens=by_tier["host"],
            storage_tokens=by_tier["storage"],
            ttft_s=(first or ended) - began,
            elapsed_s=ended - began,
            answer="".join(text),
        )

    def _stream(self, messages: Sequence[dict[str, str]], answer_tokens: int) -> Any:
        return self._client.chat.completions.create(
            model=self.model,
            messages=list(messages),
            temperature=0,
            max_tokens=answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._extra,
        )


HEADINGS = ("turn", "prompt", "device", "host", "storage", "computed", "TTFT ms", "output")


def heading() -> str:
    """The first line of a table of turns."""
    return " ".join(f"{name:>8}" for name in HEADINGS)


def row(turn: Turn) -> str:
    """A turn as a line of the table: prompt tokens, where they were cached, TTFT."""
    computed = None if turn.cached_tokens is None else turn.prompt_tokens - turn.cached_tokens
    cells = (
        *(turn.number, turn.prompt_tokens),
        *(turn.device_tokens, turn.host_tokens, turn.storage_tokens, computed),
        *(f"{1000 * turn.ttft_s:.0f}", turn.output_tokens),
    )
    return " ".join(f"{'-' if cell is None else cell:>8}" for cell in cells)


def totals(turns: Iterable[Turn]) -> dict[str, float]:
    """Sums over turns; what no turn tells counts as nothing."""
    turns = list(turns)
    names = (
        *("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "storage_tokens"),
        *("output_tokens", "ttft_s", "elapsed_s"),
    )
    return {name: sum(getattr(turn, name) or 0 for turn in turns) for name in names}


def summary(turns: Sequence[Turn]) -> str:
    """The totals in a line."""
    total = totals(turns)
    share = total["cached_tokens"] / max(1, total["prompt_tokens"])
    return (
        f"{len(turns)} turns: {total['prompt_tokens']:.0f} prompt tokens, "
        f"{total['cached_tokens']:.0f} cached ({share:.1%}: {total['device_tokens']:.0f} device, "
        f"{total['host_tokens']:.0f} host, {total['storage_tokens']:.0f} storage), "
        f"TTFT {total['ttft_s']:.2f} s in all, {total['elapsed_s']:.2f} s with the answers"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    options = _parse(arguments)
    try:
        session = (
            Session.load(options.resume)
            if options.resume is not None
            else Session(
                Workload(
                    options.seed, options.system_chars, options.tool_chars, options.answer_tokens
                )
            )
        )
        endpoint = Endpoint(options.url, options.model, options.api_key, options.timeout)
        save = options.save or options.resume
        done = len(session.turns)
        if not options.json:
            print(heading())
            for turn in session.turns:
                print(row(turn), "(earlier)")
        for _ in range(done, options.turns):
            if len(session.turns) > done:
                time.sleep(options.tool_seconds)  # the tool runs
            turn = session.step(endpoint)
            if not options.json:
                print(row(turn), flush=True)
            if save is not None:
                session.save(save)
    except openai.OpenAIError as error:
        print(f"agent_session: {options.url}: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"agent_session: {error}", file=sys.stderr)
        return 2
    if options.json:
        turns = [asdict(turn) for turn in session.turns]
        print(json.dumps({"turns": turns, "totals": totals(session.turns)}, indent=1))
    else:
        print(summary(session.turns))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = Workload()
    parser = argparse.ArgumentParser(
        prog="agent_session",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="base URL of the API")
    parser.add_argument("--model", help="name of the model; the first one offered if not given")
    parser.add_argument("--api-key", default="none", help="when the server wants one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--turns", type=int, default=8, help="turns in all, resumed ones included")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the synthetic text")
    parser.add_argument("--system-chars", type=int, default=defaults.system_chars)
    parser.add_argument("--tool-chars", type=int, default=defaults.tool_chars)
    parser.add_argument("--answer-tokens", type=int, default=defaults.answer_tokens)
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="how long a tool runs")
    parser.add_argument("--save", type=Path, help="write the session down after every turn")
    parser.add_argument("--resume", type=Path, help="go on with a session that was saved")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
