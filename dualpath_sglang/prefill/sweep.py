"""A short sweep through a running engine: prompts of many lengths, new ones and continued ones.

The engine says itself which batches it ran (see `trace`), so it does not matter how it groups and
cuts what is asked of it: each batch is a point.
"""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpath_sglang.prefill import fit
from dualpath_sglang.prefill.fit import FitError, Point
from dualpath_sglang.prefill.profile import Profile
from dualpath_sglang.prefill.trace import Batch, Header, read_batches

_TOKENS = (10, 250)
"""Any vocabulary has ids in this range; what they mean does not matter."""

_SMALL = (16, 64, 256, 1024)
_LEVELS = (0.0, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0)
_GROUPS = ((4, 32), (8, 64), (4, 256), (2, 512))
_SETTLE_S = 5.0


class SweepError(RuntimeError):
    """The engine did not answer; the message is one plain sentence."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompts that are sent in one request."""

    prompts: tuple[tuple[int, ...], ...]


def plan(header: Header, most_tokens: int, seed: int) -> list[Ask]:
    """One round: a long prompt that grows, short and long continuations of it, and groups.

    Args:
        most_tokens: longest context to ask for.
        seed: of the prompts' tokens; rounds with other seeds share nothing in the cache.
    """
    source = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(source.randint(*_TOKENS) for _ in range(count))

    page = header.page_tokens
    most = min(most_tokens, header.context_tokens) - 8
    chunk = min(header.chunk_tokens or most, max(page, most // 2))
    news = sorted({n for n in (*_SMALL, chunk // 2, chunk) if 0 < n <= chunk})
    base = tokens(most)
    asks = []
    for level in _LEVELS:
        length = int(level * (most - chunk)) // page * page
        if length:
            asks.append(Ask((base[:length],)))
        asks += [Ask((base[:length] + tokens(new),)) for new in news]
    for count, new in _GROUPS:
        if count * new <= chunk:
            asks.append(Ask(tuple(tokens(new) for _ in range(count))))
    return asks


def run(
    url: str,
    header: Header,
    trace: Path,
    *,
    rounds: int,
    most_tokens: int,
    say: Callable[[int, int], None],
    timeout_s: float,
) -> list[Point]:
    """Ask all of it, and return what the engine measured.

    Args:
        url: of the server.
        trace: the file that the server writes.
        say: hears how many requests of how many are done.
        timeout_s: for each request.

    Raises:
        SweepError: the server refuses or does not answer.
    """
    seeds = random.SystemRandom()
    plans = [plan(header, most_tokens, seeds.randrange(1 << 40)) for _ in range(rounds)]
    for ask in plan(header, min(most_tokens, 1024), seeds.randrange(1 << 40)):
        _send(url, ask, timeout_s)  # warms up
    known = len(_settled(trace, 1))
    total, done = sum(len(asks) for asks in plans), 0
    for asks in plans:
        for ask in asks:
            _send(url, ask, timeout_s)
            done += 1
            say(done, total)
    return [
        Point(batch.requests, batch.attention_s)
        for batch in _settled(trace, known + 1)[known:]
        if batch.attention_s is not None
    ]


def _settled(trace: Path, least: int) -> list[Batch]:
    """All batches, once no more are written: those of a GPU are told a little later."""
    end = time.monotonic() + _SETTLE_S
    found = read_batches(trace)
    while time.monotonic() < end:
        time.sleep(0.1)
        again = read_batches(trace)
        if len(again) >= least and len(again) == len(found):
            return again
        found = again
    return found


def _send(url: str, ask: Ask, timeout_s: float) -> None:
    body = {
        "input_ids": [list(prompt) for prompt in ask.prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:300]
        raise SweepError(f"The server at {url} refuses a prompt: {text}") from error
    except OSError as error:
        raise SweepError(f"The server at {url} does not answer: {error}") from error


def fitted(header: Header, measured: Sequence[Point]) -> tuple[Profile, list[tuple[Point, float]]]:
    """The profile that measurements make, and the points it was checked on, as predicted.

    The check is of a prediction that has not seen those points; the profile's own has seen all.

    Raises:
        FitError: they do not make one.
    """
    if not measured:
        raise FitError(
            "No attention was measured. Where prefill runs in captured graphs, measure without "
            "them: add SGLang's flag that turns graphs of the prefill off"
        )
    points = fit.medians(measured)
    rest, check = fit.held_out(points)
    tried = fit.fit(rest)
    wrong = fit.errors(tried, check)
    made = Profile(
        key=header.key,
        model=fit.fit(points),
        points=len(points),
        held_out=len(check),
        error=wrong.median,
        error_p90=wrong.p90,
        most_tokens=max(work.cached + work.new for point in points for work in point.batch),
    )
    return made, [(point, tried.predict(point.batch)) for point in check]
