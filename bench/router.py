"""What a router adds to a request, what it holds in memory, and whether it holds back a stream.

``python -m bench.router --json FILE``. Engines are stubs that take fixed times. The router has a
core of its own; stubs and load share the other. Requests come at random moments (Poisson), as many
a second as asked, in rounds that take turns: ``direct``, the client itself sends each request to a
prefill and a decode stub, and ``router``.

| what | |
|---|---|
| ``whole`` | until the answer is there; it takes 55 ms |
| ``first`` | until the first event of a stream is there; it takes 15 ms |
| ``event`` | from the moment at which an event of a stream was made until it is there |

Rows: {what, way, p50_ms, p99_ms, added_p50_ms, added_p99_ms, requests, cpu_ms}. ``added`` is
what the percentile is over that of ``direct``; ``cpu_ms`` is the router's CPU time a request.

Then so many clients each have one turn of a session and stay connected, and so many streams are
open at once: {what, count, rss_mib, kib_each}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, percentile, write_rows

WAYS = ("direct", "router")
WHATS = ("whole", "first", "event")
BOUND_MS = 5.0
"""What a request may take more, p99."""
BOUND_MIB = 500.0
_ROOT = Path(__file__).resolve().parents[1]
_TOKENS = 5
_START_S = 60.0
_WORDS = "the agent reads the file and says what it would change in it, then runs the tests. "


@dataclass(frozen=True, slots=True)
class Row:
    """One way to be served."""

    what: str
    way: str
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    requests: int
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of the router's process."""

    what: str
    count: int
    rss_mib: float
    kib_each: float


@dataclass(slots=True)
class Took:
    """Seconds, of one way."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    event: list[float] = field(default_factory=list)
    requests: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bed:
    """What stands.

    Args:
        router: its process.
        url: of the router.
        ports: of the stubs, by role.
    """

    router: psutil.Process
    url: str
    ports: dict[str, list[int]]

    def cpu_s(self) -> float:
        times = self.router.cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        return int(self.router.memory_info().rss)


@contextlib.contextmanager
def process(args: Sequence[str], core: int | None, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process on one core."""
    pin = [] if core is None else ["taskset", "-c", str(core)]
    child = subprocess.Popen([*pin, *args], cwd=_ROOT, text=True, **how)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def standing(prefill: int, decode: int) -> Iterator[Bed]:
    """Stubs and a router over them."""
    cores = sorted(os.sched_getaffinity(0))
    mine, other = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    if other is not None:
        os.sched_setaffinity(0, {other})
    with contextlib.ExitStack() as stack:
        args = [sys.executable, "-m", "bench.router_stubs", str(prefill), str(decode)]
        stubs = stack.enter_context(
            process(args, other, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        assert stubs.stdout is not None
        ports = json_module.loads(stubs.stdout.readline())
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        args = [sys.executable, "-m", "dualpath_sglang.cli", "router", "--port", str(port)]
        for role in ("prefill", "decode"):
            for i, each in enumerate(ports[role]):
                args += [f"--{role}", f"http://127.0.0.1:{each},node={role}{i}"]
        router = stack.enter_context(process(args, mine, stderr=subprocess.DEVNULL))
        bed = Bed(psutil.Process(router.pid), f"http://127.0.0.1:{port}", ports)
        asyncio.run(_up(bed))
        yield bed


async def _up(bed: Bed) -> None:
    end = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(bed.url + "/health") as answer:
                    if answer.status == 200:
                        return
            if time.monotonic() > end:
                raise BenchError("The router does not come up")
            await asyncio.sleep(0.1)


def chat(number: int, stream: bool) -> dict[str, Any]:
    """A request with about 4 KiB of messages, each another session."""
    messages = [{"role": "system", "content": _WORDS * 24}]
    messages += [{"role": "user", "content": f"{number} {_WORDS * 12}"}]
    return {"model": "m", "messages": messages, "stream": stream, "max_tokens": _TOKENS}


class Client:
    """Sends requests either way."""

    def __init__(self, bed: Bed, session: aiohttp.ClientSession) -> None:
        self._bed = bed
        self._session = session

    async def ask(self, way: str, number: int, stream: bool, took: Took) -> None:
        """One request, whose times are noted."""
        body = chat(number, stream)
        began = time.monotonic()
        if way == "router":
            await self._read(self._bed.url, body, began, took)
        else:
            ports = self._bed.ports
            body |= {"rid": secrets.token_hex(8), "bootstrap_room": secrets.randbits(62)}
            prefill, decode = (random.choice(ports[role]) for role in ("prefill", "decode"))
            await asyncio.gather(
                self._read(f"http://127.0.0.1:{decode}", body, began, took),
                self._read(f"http://127.0.0.1:{prefill}", {**body, "stream": False}, began, None),
            )
        took.requests += 1

    async def _read(self, url: str, body: dict[str, Any], began: float, took: Took | None) -> None:
        async with self._session.post(
            url + "/v1/chat/completions",
            data=orjson.dumps(body),
            headers={"Content-Type": "application/json"},
        ) as answer:
            if answer.status != 200:
                raise BenchError(f"{url} answered {answer.status}: {await answer.text()}")
            if not body["stream"]:
                await answer.read()
                if took is not None:
                    took.whole.append(time.monotonic() - began)
                return
            first = True
            async for line in answer.content:
                if took is not None and line.startswith(b"data: {"):
                    now = time.monotonic()
                    took.event.append(now - orjson.loads(line[6:])["at"])
                    if first:
                        took.first.append(now - began)
                    first = False


async def load(bed: Bed, way: str, rate: float, seconds: float, took: Took, seed: int) -> None:
    """Requests at random moments, half of them streams."""
    dice = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(bed, session)
        cpu = bed.cpu_s()
        loop, tasks = asyncio.get_running_loop(), []
        at, end = loop.time(), loop.time() + seconds
        while at < end:
            at += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, at - loop.time()))
            number = len(tasks)
            tasks.append(
                asyncio.create_task(client.ask(way, seed << 20 | number, number % 2 == 0, took))
            )
        await asyncio.gather(*tasks)
        took.cpu_s += bed.cpu_s() - cpu


def rows(took: dict[str, Took]) -> list[Row]:
    """Percentiles, and what they are over those of ``direct``."""
    found = []
    for what in WHATS:
        base = getattr(took["direct"], what)
        for way in WAYS:
            values, of = getattr(took[way], what), took[way]
            p50, p99 = (1e3 * percentile(values, share) for share in (0.5, 0.99))
            found.append(
                Row(
                    what,
                    way,
                    round(p50, 2),
                    round(p99, 2),
                    round(p50 - 1e3 * percentile(base, 0.5), 2),
                    round(p99 - 1e3 * percentile(base, 0.99), 2),
                    len(values),
                    round(1e3 * of.cpu_s / max(1, of.requests), 2) if way == "router" else 0.0,
                )
            )
    return found


async def idle(bed: Bed, count: int) -> Held:
    """Clients that had one turn of a session each, and stay connected."""
    before = bed.rss()
    port = int(bed.url.rsplit(":", 1)[1])
    held: list[asyncio.StreamWriter] = []

    async def turn(i: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = orjson.dumps(chat(i, True))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        answer = await reader.readuntil(b"0\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BenchError(f"A session got {answer[:200]!r}")
        held.append(writer)

    for at in range(0, count, 50):
        await asyncio.gather(*(turn(i) for i in range(at, min(count, at + 50))))
    await asyncio.sleep(2.0)
    if any(writer.is_closing() for writer in held):
        raise BenchError("A client that was idle was thrown out")
    after = bed.rss()
    for writer in held:
        writer.close()
    return _held("idle sessions", count, before, after)


def _held(what: str, count: int, before: int, after: int) -> Held:
    return Held(what, count, round(after / 2**20, 1), round((after - before) / 1024 / count, 1))


async def streams(bed: Bed, count: int) -> Held:
    """Streams that are all open at once."""
    before = bed.rss()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = []

        async def begin(i: int) -> None:
            body = orjson.dumps({**chat(i, True), "max_tokens": 10_000})
            answer = await session.post(bed.url + "/v1/chat/completions", data=body)
            await answer.content.readline()
            answers.append(answer)

        for at in range(0, count, 50):
            await asyncio.gather(*(begin(i) for i in range(at, min(count, at + 50))))
        after = bed.rss()
        for answer in answers:
            answer.close()
    return _held("open streams", count, before, after)


def show(found: Sequence[Row], held: Sequence[Held], rate: float) -> None:
    """As tables."""
    table = Table(title=f"{rate:g} requests/s, half of them streams")
    for column in ("what", "way", "p50 ms", "p99 ms", "added p50", "added p99", "n", "CPU ms"):
        table.add_column(column, justify="left" if column in ("what", "way") else "right")
    for row in found:
        times = (row.p50_ms, row.p99_ms, row.added_p50_ms, row.added_p99_ms, row.cpu_ms)
        p50, p99, added_p50, added_p99, cpu = (f"{figure:.2f}" for figure in times)
        table.add_row(row.what, row.way, p50, p99, added_p50, added_p99, str(row.requests), cpu)
    Console().print(table)
    table = Table(title="Memory of the router")
    for column in ("what", "count", "RSS MiB", "KiB each"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for each in held:
        table.add_row(each.what, str(each.count), f"{each.rss_mib:.0f}", f"{each.kib_each:.1f}")
    Console().print(table)


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    rate: Annotated[float, typer.Option(min=1, help="requests a second")] = 200.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="length of a round")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each way")] = 3,
    sessions: Annotated[int, typer.Option(min=0, help="clients that stay connected")] = 10_000,
    open_streams: Annotated[int, typer.Option(min=0, help="streams open at once")] = 500,
    engines: Annotated[int, typer.Option(min=1, help="stubs of each role")] = 2,
) -> None:
    """Measure a router against stub engines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    took = {way: Took() for way in WAYS}
    held: list[Held] = []
    with standing(engines, engines) as bed:
        for way in WAYS:
            asyncio.run(load(bed, way, rate, 1.0, Took(), 99))  # warm
        for i in range(rounds):
            for way in WAYS:
                asyncio.run(load(bed, way, rate, seconds, took[way], i))
        if open_streams:
            held.append(asyncio.run(streams(bed, open_streams)))
        if sessions:
            held.append(asyncio.run(idle(bed, sessions)))
    found = rows(took)
    show(found, held, rate)
    if json is not None:
        write_rows(json, [*found, *held])


if __name__ == "__main__":
    typer.run(main)
