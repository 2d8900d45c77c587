"""Layer Blocks from the store into the paged pools of a CUDA device: right bytes, and overlap.

``python -m bench.gpu_streaming --json FILE``; of torch it needs a build for CUDA, of SGLang
nothing. On a machine without a CUDA device it says so, and checks the bytes of the same code on
CPU tensors.

| mode | what is timed |
|---|---|
| ``bulk`` | staging memory to pages: a copy a piece, a kernel for each tensor of a layer |
| ``page_copies`` | the same bytes with a copy for each tensor of each layer of each page |
| ``load`` | store to pages, nothing else |
| ``compute`` | a forward of matrix products |
| ``streaming`` | both at once, each layer of the forward waiting for its layer of the hit |

``overlap`` is the share of the shorter of load and compute that is hidden behind the longer.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.measure import BenchError, median, write_rows
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.streaming.landing import Fence, Staged
from dualpath_sglang.streaming.load import Load, LoadRequest, PoolLoad
from dualpath_sglang.streaming.options import MIB, StreamOptions
from dualpath_sglang.streaming.streamer import LayerStreamer
from dualpath_sglang.streaming.tensors import DeviceCopier, TensorLanding, pinned_memory
from dualpath_storage import Geometry, StoreOptions, pieces_of
from dualpath_storage.ranges import RangeShape

PAGE_TOKENS = 64
FORMS = {
    "mha": (2, (8, 128)),  # K and V of Llama 3 8B
    "mla": (1, (1, 576)),  # DeepSeek V3
}


@dataclass(frozen=True, slots=True)
class Row:
    """See the module. ``None`` where a mode has no such figure."""

    form: str
    mode: str
    device: str
    bytes: int
    seconds: float
    gb_s: float | None
    layer0_s: float | None = None
    overlap: float | None = None


class Hit:
    """A stored prefix, a device's pool for it, and a streamer between them."""

    def __init__(self, form: str, device: torch.device, pages: int, layers: int, root: Path):
        self.form, self.device, self.count = form, device, pages
        parts, row = FORMS[form]
        slots = (2 * pages + 1) * PAGE_TOKENS
        self.tensors = [
            [torch.zeros(slots, *row, dtype=torch.bfloat16, device=device) for _ in range(parts)]
            for _ in range(layers)
        ]
        options = StreamOptions(staging_bytes=64 * MIB)
        self.copier = DeviceCopier(device, options.piece_bytes)
        self.landing = TensorLanding(self.tensors, page_rows=PAGE_TOKENS, copier=self.copier)
        geometry = Geometry(
            "bench",
            "none",
            "kv",
            "bfloat16",
            PAGE_TOKENS,
            layers,
            self.landing.layer_bytes[0],
            form,
        )
        self.cache = KVCache(
            StoreOptions(
                root=root, capacity_bytes=4 * pages * geometry.slot_bytes, min_free_fraction=0.0
            )
        )
        self.pool = self.cache.attach(geometry)
        rng = np.random.default_rng(1)
        self.keys = [rng.bytes(32) for _ in range(pages)]
        # Every second page, so that no two lie side by side in the pool.
        self.numbers = [2 * int(n) + 1 for n in rng.permutation(pages)]
        self.stored = bytearray(rng.bytes(pages * geometry.block_bytes))
        view = memoryview(self.stored)
        size = geometry.block_bytes
        blocks = [pieces_of(view[i * size : (i + 1) * size], geometry) for i in range(pages)]
        self.cache.write(self.pool, self.keys, blocks, timeout_s=300)
        memory = pinned_memory(options.staging_bytes) if device.type == "cuda" else None
        self.streamer = LayerStreamer(self.cache, options, memory=memory)

    def close(self) -> None:
        """Stop every thread."""
        self.streamer.close()
        self.cache.close()

    def start(self) -> tuple[Load, list[Sequence[Fence]]]:
        """Begin to load; the fences of each announced layer come to the list."""
        fences: list[Sequence[Fence]] = []
        part = PoolLoad(
            self.pool, self.landing, self.keys, self.numbers, range(self.pool.geometry.layers)
        )
        load = self.streamer.start(
            [LoadRequest("bench", [part])],
            layers=self.pool.geometry.layers,
            deadline=time.monotonic() + 300,
            on_layer=lambda _, found: fences.append(found),
        )
        return load, fences

    def finish(self, load: Load) -> None:
        """Wait for the end, and for the device.

        Raises:
            BenchError: the load failed.
        """
        result = load.wait()["bench"]
        if not result.ok:
            raise BenchError(f"the load ended with {result.outcome.value} {result.reason}")
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all that the device was told."""
        torch.get_device_module(self.device).synchronize()

    def clear(self) -> None:
        """Forget what was loaded."""
        for layer in self.tensors:
            for tensor in layer:
                tensor.zero_()
        self.synchronize()

    def check(self) -> None:
        """Compare every page, and see that no other was written.

        Raises:
            BenchError: a byte is wrong.
        """
        size = self.pool.geometry.layer_bytes // len(self.tensors[0])
        stored = np.frombuffer(self.stored, np.uint8).reshape(self.count, -1, size)
        others = np.setdiff1d(np.arange(2 * self.count + 1), self.numbers)
        for i, tensor in enumerate(t for layer in self.tensors for t in layer):
            found = tensor.view(torch.uint8).cpu().numpy().reshape(2 * self.count + 1, -1)
            if not np.array_equal(found[self.numbers], stored[:, i]):
                raise BenchError(f"{self.form}: tensor {i} holds wrong bytes")
            if found[others].any():
                raise BenchError(f"{self.form}: tensor {i} was written where nothing belongs")


def check_bytes(hit: Hit) -> None:
    """Load once and compare; and see that the comparison would notice one wrong bit."""
    load, _ = hit.start()
    hit.finish(load)
    hit.check()
    page = hit.tensors[-1][-1][hit.numbers[-1] * PAGE_TOKENS]
    page.view(torch.uint8)[0, -1] ^= 1
    try:
        hit.check()
    except BenchError:
        return
    raise BenchError("a wrong bit went unnoticed")


class Forward:
    """Matrix products that take about ``seconds`` on the device.

    The size of a product is fixed; how many make a layer is measured.
    """

    def __init__(self, hit: Hit, seconds: float) -> None:
        self._hit = hit
        self._a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=hit.device)
        self.products = 1
        self.run()
        took = self.run()
        self.products = max(1, round(seconds / took))

    def run(self, load: Load | None = None, fences: Sequence[Sequence[Fence]] = ()) -> float:
        """Compute every layer, after its fences when there is a load; seconds."""
        began = time.perf_counter()
        for layer in range(len(self._hit.tensors)):
            if load is not None:
                if not load.wait_layer(layer, 300):
                    raise BenchError(f"layer {layer} was never announced")
                for fence in _of(fences, layer):
                    fence.wait()
            for _ in range(self.products):
                torch.mm(self._a, self._a)
        self._hit.synchronize()
        return time.perf_counter() - began


def _of(fences: Sequence[Sequence[Fence]], layer: int) -> Sequence[Fence]:
    """The fences of an announced layer: the list grows right after the announcement."""
    end = time.monotonic() + 10
    while len(fences) <= layer:
        if time.monotonic() > end:
            raise BenchError(f"nobody listened to layer {layer}")
        time.sleep(0)
    return fences[layer]


def time_bulk(hit: Hit) -> tuple[float, float]:
    """Seconds to land every page from pinned memory, in bulk and with a copy for each part."""
    geometry = hit.pool.geometry
    shape = RangeShape(geometry, 0, geometry.layers, header=False)
    memory = pinned_memory(hit.count * shape.stride)
    staged = Staged(memory, shape, 0, hit.count)
    target = hit.landing.target(hit.numbers)
    target.land(staged)
    hit.synchronize()
    began = time.perf_counter()
    target.land(staged)
    hit.synchronize()
    bulk_s = time.perf_counter() - began

    source = torch.frombuffer(memory, dtype=torch.uint8)
    size = geometry.layer_bytes // len(hit.tensors[0])
    pages = [t.view(torch.uint8).view(-1, size) for layer in hit.tensors for t in layer]
    began = time.perf_counter()
    with hit.copier.on_stream():
        for i, tensor in enumerate(pages):
            for block, number in enumerate(hit.numbers):
                begin = block * shape.stride + shape.lead + i * size
                tensor[number].copy_(source[begin : begin + size], non_blocking=True)
    hit.synchronize()
    return bulk_s, time.perf_counter() - began


def measure(hit: Hit, rounds: int, device: str) -> list[Row]:
    """Every mode, medians of the rounds."""
    size = len(hit.stored)
    bulk, single, loads, computes, both, first = [], [], [], [], [], []
    began = time.perf_counter()
    load, _ = hit.start()
    hit.finish(load)
    forward = Forward(hit, time.perf_counter() - began)
    for _ in range(rounds):
        bulk_s, single_s = time_bulk(hit)
        bulk.append(bulk_s)
        single.append(single_s)
        began = time.perf_counter()
        load, _ = hit.start()
        hit.finish(load)
        loads.append(time.perf_counter() - began)
        computes.append(forward.run())
        hit.clear()
        began = time.perf_counter()
        load, fences = hit.start()
        forward.run(load, fences)
        both.append(time.perf_counter() - began)
        hit.finish(load)
        hit.check()
        first.append(load.ready_s[0])
    load_s, compute_s, both_s = median(loads), median(computes), median(both)

    def row(mode: str, seconds: float, **more: float) -> Row:
        rate = None if mode == "compute" else size / seconds / 1e9
        return Row(hit.form, mode, device, size, seconds, rate, **more)

    return [
        row("bulk", median(bulk)),
        row("page_copies", median(single)),
        row("load", load_s),
        row("compute", compute_s),
        row(
            "streaming",
            both_s,
            layer0_s=median(first),
            overlap=(load_s + compute_s - both_s) / min(load_s, compute_s),
        ),
    ]


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    pages: Annotated[int, typer.Option(min=2, help="of the hit")] = 128,
    layers: Annotated[int, typer.Option(min=2, help="of the model")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    cpu: Annotated[bool, typer.Option("--cpu", help="check bytes on CPU tensors only")] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="where the stores are put; default: in this repository"),
    ] = None,
) -> None:
    """Check the bytes of layer-wise loads on a device, and measure how much of them is hidden."""
    console = Console(soft_wrap=True)
    cuda = torch.cuda.is_available() and not cpu
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    if not cuda:
        reason = "as asked" if cpu else "because there is no CUDA device here"
        console.print(
            f"Nothing is measured, {reason}: only the bytes are checked, with CPU tensors."
        )
    rows: list[Row] = []
    root = directory or Path(__file__).resolve().parents[1]
    for form in FORMS:
        base = Path(tempfile.mkdtemp(prefix=".bench-", dir=root))
        try:
            hit = Hit(form, device, pages, layers, base / "store")
            try:
                check_bytes(hit)
                console.print(f"{form}: {len(hit.stored)} bytes in {pages} pages are right")
                if cuda:
                    hit.clear()
                    rows += measure(hit, rounds, name)
            finally:
                hit.close()
        finally:
            shutil.rmtree(base)
    if rows:
        console.print(_table(rows))
    if json is not None:
        write_rows(json, rows)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"Layer-wise loads into {rows[0].device}")
    for column in ("form", "mode", "s", "GB/s", "layer 0 s", "overlap"):
        table.add_column(column, justify="left" if column in ("form", "mode") else "right")
    for row in rows:
        table.add_row(
            row.form,
            row.mode,
            f"{row.seconds:.4f}",
            "" if row.gb_s is None else f"{row.gb_s:.2f}",
            "" if row.layer0_s is None else f"{row.layer0_s:.4f}",
            "" if row.overlap is None else f"{row.overlap:.0%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
