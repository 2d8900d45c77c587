"""What the node agent costs, against a bare pair of processes, and against copying.

``python -m bench.agent --json FILE``. Rows: {what, layer_kib, layers, gb_s, of_bare, of_memcpy,
cpu_s_per_gb, cpu_of_bare, first_ms, ms}, medians over rounds that take turns. ``first_ms`` is when
the first piece has come (0 where there are none), ``ms`` when the last.

| what | |
|---|---|
| ``bare`` | ``sendall`` from and ``recv_into`` memory as large, over loopback, 1 MiB at a time,
  nothing looked at |
| ``memory`` | a fetch of blocks that the agent has in memory; checksums are checked on arrival |
| ``storage`` | the same blocks when it must read them first, from a warm page cache |
| ``memcpy`` | as many bytes copied in the receiving process, 1 MiB at a time |
| ``local`` | as ``memory``, by a reader on the agent's machine, who copies from its memory |
| ``local storage`` | as ``storage``, by such a reader |

CPU seconds are those of both processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, median, write_rows
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.transport.base import End, FetchRequest, Load, Span, StridedDestination
from dualpath_sglang.transport.client import Connection, PeerAddress
from dualpath_sglang.transport.local_client import LocalConnection
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.server import Server
from dualpath_sglang.transport.verify import bad_layer_blocks
from dualpath_storage import Geometry, StoreOptions, pieces_of
from dualpath_storage.memory import aligned

LAYERS = 32
_STEP_BYTES = 1 << 20
_SOCKET_BYTES = 4 << 20
_TIMEOUT_S = 120.0
SOCKET = "agent.sock"
DirectIo: TypeAlias = Literal["auto", "on", "off"]
WHATS = ("bare", "memory", "storage", "memcpy", "local", "local storage")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to get the same bytes.

    Args:
        of_bare, cpu_of_bare: the rate and the CPU time, as multiples of those of ``bare``.
        of_memcpy: the rate, as a multiple of that of ``memcpy``.
    """

    what: str
    layer_kib: int
    layers: int
    gb_s: float
    of_bare: float
    of_memcpy: float
    cpu_s_per_gb: float
    cpu_of_bare: float
    first_ms: float
    ms: float


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is moved."""

    geometry: Geometry
    keys: Sequence[bytes]

    @property
    def size(self) -> int:
        return len(self.keys) * self.geometry.block_bytes


class Checked:
    """A fetch whose bytes are compared with their checksums as they arrive, and its place."""

    def __init__(self, place: StridedDestination) -> None:
        self.layer_bytes = place.layer_bytes
        self.check = place.check
        self._place = place
        self._views: Sequence[memoryview] = ()
        self.bad = 0
        self.end = End.LOST
        self.first: float | None = None
        """When the first piece came, by ``perf_counter``."""

    def views(self, span: Span, deadline: float) -> Sequence[memoryview]:
        self._views = self._place.views(span, deadline)
        return self._views

    def landed(self, span: Span, checksums: Sequence[int]) -> None:
        del span
        if self.first is None:
            self.first = time.perf_counter()
        self.bad += len(bad_layer_blocks(self._views, self.layer_bytes, checksums))

    def missing(self, blocks: Sequence[int]) -> None:
        self.bad += len(blocks)

    def ended(self, end: End, load: Load | None) -> None:
        del load
        self.end = end


def blocks_of(layer_kib: int, count: int) -> Blocks:
    """Blocks of a model with layers of that size."""
    geometry = Geometry(
        model="bench",
        weights="0",
        pool="kv",
        dtype="bfloat16",
        page_tokens=64,
        layers=LAYERS,
        layer_bytes=layer_kib << 10,
        form="mha k[token] v[token]",
    )
    keys = [hashlib.sha256(str(i).encode()).digest() for i in range(count)]
    return Blocks(geometry, keys)


def serve(root: Path, blocks: Blocks, pipe: Pipe, direct_io: DirectIo = "off") -> None:
    """The other process: stores the blocks, then serves them, and as many bare bytes."""
    options = StoreOptions(root, 4 * blocks.size, min_free_fraction=0, direct_io=direct_io)
    with KVCache(options) as cache:
        pool = cache.attach(blocks.geometry)
        data = memoryview(bytearray(os.urandom(blocks.geometry.block_bytes)))
        for key in blocks.keys:
            cache.write(pool, [key], [pieces_of(data, blocks.geometry)])
        agent = Agent(cache, 2 * blocks.size)
        server = Server(agent)
        local = LocalServer(agent, root / SOCKET)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send((server.port, listener.getsockname()[1]))
            plain = written(blocks.size)
            while (asked := pipe.recv()) != "end":
                if asked == "bare":
                    client, _ = listener.accept()
                    with client:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
                        for at in range(0, blocks.size // _STEP_BYTES * _STEP_BYTES, _STEP_BYTES):
                            client.sendall(plain[at : at + _STEP_BYTES])
                elif asked == "forget":
                    agent.blocks.forget()
                pipe.send(time.process_time())
        server.close()
        local.close()
        agent.close()


@contextlib.contextmanager
def serving(
    root: Path, blocks: Blocks, direct_io: DirectIo = "off"
) -> Iterator[tuple[Pipe, int, int]]:
    """A process that serves; the pipe to it, and its two ports."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(root, blocks, theirs, direct_io), daemon=True
    )
    process.start()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise BenchError("The serving process does not come up")
        port, bare_port = ours.recv()
        yield ours, port, bare_port
        ours.send("end")
        process.join(_TIMEOUT_S)
    finally:
        process.kill()


def ask(pipe: Pipe, what: str) -> float:
    """Have the other process do something; its CPU seconds so far."""
    pipe.send(what)
    seconds: float = pipe.recv()
    return seconds


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds: of a call, of the processors of both processes for it, until the first piece."""

    wall: float
    cpu: float
    first: float


def timed(pipe: Pipe, call: Callable[[], float | None]) -> Took:
    """What a call takes; it returns when the first piece came."""
    theirs, ours, began = ask(pipe, "time"), time.process_time(), time.perf_counter()
    first = call()
    wall, ours = time.perf_counter() - began, time.process_time() - ours
    return Took(wall, ours + ask(pipe, "time") - theirs, 0.0 if first is None else first - began)


def measure(blocks: Blocks, root: Path, rounds: int) -> list[Row]:
    """All of them, round by round."""
    memory, other = written(blocks.size), written(blocks.size)
    took: dict[str, list[Took]] = {what: [] for what in WHATS}
    with serving(root, blocks) as (pipe, port, bare_port), contextlib.ExitStack() as stack:
        deadline = time.monotonic() + 10.0
        connection = Connection(PeerAddress("127.0.0.1", port), deadline)
        stack.callback(connection.close)
        local = LocalConnection(root / SOCKET, deadline)
        stack.callback(local.close)

        def bare() -> None:
            pipe.send("bare")
            with socket.create_connection(("127.0.0.1", bare_port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
                done = 0
                while done < blocks.size // _STEP_BYTES * _STEP_BYTES:
                    done += sock.recv_into(memory[done : done + _STEP_BYTES])
            pipe.recv()

        def memcpy() -> None:
            for at in range(0, blocks.size, _STEP_BYTES):
                memory[at : at + _STEP_BYTES] = other[at : at + _STEP_BYTES]

        def fetch(over: Connection | LocalConnection) -> float | None:
            layers, size = blocks.geometry.layers, blocks.geometry.layer_bytes
            request = FetchRequest(blocks.geometry.id_bytes, blocks.keys, 0, layers, _TIMEOUT_S)
            told = Checked(StridedDestination.of_layers(memory, size, len(blocks.keys)))
            over.fetch(request, told, told).wait(_TIMEOUT_S)
            if told.end is not End.OK or told.bad:
                raise BenchError(f"A fetch ended {told.end.name}, with {told.bad} bad Layer Blocks")
            return told.first

        fetch(local)  # the agent's memory, and the map of it, are there from now on
        for _ in range(rounds):
            took["bare"].append(timed(pipe, bare))
            ask(pipe, "forget")
            took["storage"].append(timed(pipe, lambda: fetch(connection)))
            took["memory"].append(timed(pipe, lambda: fetch(connection)))
            took["memcpy"].append(timed(pipe, memcpy))
            took["local"].append(timed(pipe, lambda: fetch(local)))
            ask(pipe, "forget")
            took["local storage"].append(timed(pipe, lambda: fetch(local)))
    return [row(what, blocks, took) for what in WHATS]


def written(size: int) -> memoryview:
    """Memory as an engine's, on page borders: to copy to any other costs much more.

    It was written to, or the first to use it would pay for its pages.
    """
    memory = aligned(size)[:size]
    memory[::4096] = b"\1" * len(memory[::4096])
    return memory


def row(what: str, blocks: Blocks, took: dict[str, list[Took]]) -> Row:
    """Medians of all rounds."""
    gigabytes = blocks.size / 1e9

    def wall(of: str) -> float:
        return median([each.wall for each in took[of]])

    cpu, bare_cpu = (median([each.cpu for each in took[of]]) for of in (what, "bare"))
    return Row(
        what,
        blocks.geometry.layer_bytes >> 10,
        blocks.geometry.layers,
        round(gigabytes / wall(what), 3),
        round(wall("bare") / wall(what), 3),
        round(wall("memcpy") / wall(what), 3),
        round(cpu / gigabytes, 3),
        round(cpu / bare_cpu, 3),
        round(1e3 * median([each.first for each in took[what]]), 2),
        round(1e3 * wall(what), 1),
    )


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    layer_kib: Annotated[str, typer.Option(help="KiB of a Layer Block, comma-separated")] = "16,64",
    size_mib: Annotated[int, typer.Option(min=1, help="MiB of one fetch")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which the medians count")] = 7,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="where the store is put; default: here")
    ] = None,
) -> None:
    """Measure what the node agent adds to bare sockets and to copying."""
    root = directory or Path(__file__).resolve().parents[1]
    rows: list[Row] = []
    for kib in (int(text) for text in layer_kib.split(",")):
        count = max(1, (size_mib << 10) // (kib * LAYERS))
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=root) as base:
            rows += measure(blocks_of(kib, count), Path(base), rounds)
        Console(stderr=True).print(f"{kib} KiB: {count} blocks", style="dim")
    table = Table(title=f"{size_mib} MiB a fetch, blocks of {LAYERS} layers")
    columns = ("of bare", "of memcpy", "CPU s/GB", "of bare", "first ms", "ms")
    for column in ("what", "layer KiB", "GB/s", *columns):
        table.add_column(column, justify="left" if column == "what" else "right")
    for each in rows:
        table.add_row(
            each.what,
            str(each.layer_kib),
            f"{each.gb_s:.2f}",
            f"{each.of_bare:.2f}",
            f"{each.of_memcpy:.2f}",
            f"{each.cpu_s_per_gb:.3f}",
            f"{each.cpu_of_bare:.2f}",
            f"{each.first_ms:.1f}",
            f"{each.ms:.0f}",
        )
    Console().print(table)
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
