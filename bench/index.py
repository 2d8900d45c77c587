"""What the indexes cost, and why the embedded one is LMDB: the same on bare LMDB and on SQLite.

``python -m bench.index --json FILE``. Rows: {index, op, n, p50_ms, p99_ms, per_s, bytes_per_block}.

| index | what it is |
|---|---|
| ``embedded`` | ours: blocks, units, order of use and children, guarded against damage |
| ``redis`` | ours in a ``redis-server`` of this machine, begun by the bench; bytes of memory |
| ``lmdb`` | one LMDB table from key to placement: what the library itself costs |
| ``sqlite`` | rows by 56-byte key ``WITHOUT ROWID``, one prepared SELECT a key |
| ``sqlite_in`` | the same table, ``IN`` lists of 500 keys |
| ``sqlite_rowid`` | rows by a 63-bit digest of the key, the key itself compared; ``IN`` lists |

SQLite gets its best: WAL, ``synchronous=OFF``, a 256 MiB cache, the file mapped, prepared
statements, one transaction a batch, the order of use as a partial index over leaves. Both let
readers see a snapshot while somebody writes, and neither leaves a lock or half a batch behind when
a writer is killed. So speed decides: SGLang asks for whole chains, 16 384 keys of a 1M-token
prompt, on the way to every request.

Damage, tried on files of 20 000 blocks, 12 files each, opened afterwards and read in full:

| damage | SQLite | LMDB alone |
|---|---|---|
| 8 pages zeroed, or overwritten | ``database disk image is malformed`` | ``CorruptedError`` |
| 8 bits flipped | 10 of 12: wrong or missing rows, no error | 8 of 12: the same; 4 an error |
| cut to half | ``malformed`` | SIGBUS kills the process, 12 of 12 |

So neither can be believed after damage, and LMDB alone is the more dangerous. Our index is
therefore checked by a child process before it is opened, guards its memory map against changes by
others at every use, and is thrown away and rebuilt from the block store when anything is wrong.
It is only a cache of the block headers: what it says is verified whenever a block is read.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.index_candidates import CANDIDATES, Ours, Redis
from bench.measure import median, percentile, write_rows
from dualpath_sglang.index import Record
from dualpath_storage import NO_PARENT, Placement
from tests.support.redis_server import REDIS_SERVER

BATCH = 128
CHAIN = 256
"""Pages of one conversation."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one index.

    Args:
        n: keys of one call.
        per_s: keys a second, at the median.
        bytes_per_block: bytes of file or memory a block, with all blocks in it.
    """

    index: str
    op: str
    n: int
    p50_ms: float
    p99_ms: float
    per_s: float
    bytes_per_block: float


def chains(blocks: int, seed: str) -> list[list[Record]]:
    """Conversations of ``CHAIN`` pages, ``blocks`` pages together."""
    made: list[list[Record]] = []
    for first in range(0, blocks, CHAIN):
        parent, records = NO_PARENT, []
        for number in range(first, min(first + CHAIN, blocks)):
            key = hashlib.sha256(f"{seed} {number}".encode()).digest()
            records.append(Record(key, parent, Placement(number >> 10, number & 1023, number)))
            parent = key
        made.append(records)
    return made


def measure(name: str, path: Path, blocks: int, counts: Sequence[int], calls: int) -> list[Row]:
    """All operations on one index, which is filled first."""
    known = chains(blocks, "known")
    keys = [[record.key for record in chain] for chain in known]
    index = CANDIDATES[name](path)
    rng = random.Random(3)
    timings: dict[tuple[str, int], list[float]] = {}

    def timed(op: str, n: int, call: Callable[[], object]) -> object:
        began = time.perf_counter()
        answer = call()
        timings.setdefault((op, n), []).append(1000 * (time.perf_counter() - began))
        return answer

    for chain in known:
        for i in range(0, len(chain), BATCH):
            index.publish(chain[i : i + BATCH])
    if isinstance(index, Redis):
        stored = index.stored_bytes()
    else:
        stored = sum(f.stat().st_size for f in path.parent.glob(path.name + "*"))
    bytes_per_block = stored / blocks
    for chain in chains(calls * BATCH, "new"):
        for i in range(0, len(chain), BATCH):
            part = chain[i : i + BATCH]
            timed("publish", len(part), lambda part=part: index.publish(part))  # type: ignore[misc]
    for _ in range(calls):
        for n in counts:
            asked = [k for chain in rng.sample(keys, -(-n // CHAIN)) for k in chain][:n]
            found = timed("exists", n, lambda: index.prefix(asked))  # noqa: B023
            assert found == n, f"{name} found {found} of {n}"
        asked = rng.choice(keys)[:BATCH]
        places = timed("lookup", len(asked), lambda: index.lookup(asked))  # noqa: B023
        assert isinstance(places, list) and None not in places
    if isinstance(index, Ours):
        total = blocks + calls * BATCH
        for _ in range(3):
            assert timed("scan", total, index.scan) == total
    if name != "lmdb":
        for _ in range(calls):
            asked = rng.choice(keys)
            timed("touch", len(asked), lambda: index.touch(asked))  # noqa: B023
        for _ in range(calls):
            gone = timed("evict", BATCH, lambda: index.evict(BATCH))
            assert gone == BATCH
    index.close()
    return [
        Row(
            index=name,
            op=op,
            n=n,
            p50_ms=float(f"{median(ms):.4g}"),
            p99_ms=float(f"{percentile(ms, 0.99):.4g}"),
            per_s=float(f"{1000 * n / median(ms):.4g}"),
            bytes_per_block=float(f"{bytes_per_block:.4g}"),
        )
        for (op, n), ms in timings.items()
    ]


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    blocks: Annotated[int, typer.Option(min=CHAIN, help="blocks in the index")] = 500_000,
    calls: Annotated[int, typer.Option(min=2, help="calls of each operation")] = 50,
    indexes: Annotated[str, typer.Option(help="comma-separated")] = ",".join(CANDIDATES),
    directory: Annotated[
        Path | None, typer.Option("--dir", help="where the files are put; default: here")
    ] = None,
) -> None:
    """Measure our indexes, and candidates for the embedded one."""
    progress = Console(stderr=True)
    names = indexes.split(",")
    if unknown := [name for name in names if name not in CANDIDATES]:
        raise typer.BadParameter(f"no index {unknown[0]}; there are {', '.join(CANDIDATES)}")
    if "redis" in names and REDIS_SERVER is None:
        names.remove("redis")
        progress.print("redis is left out: redis-server is not installed")
    counts = [n for n in (256, 2048, 16384) if n <= blocks]
    rows: list[Row] = []
    root = directory or Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=root) as base:
        for name in names:
            began = time.monotonic()
            rows += measure(name, Path(base) / name, blocks, counts, calls)
            progress.print(f"{name}: {time.monotonic() - began:.0f} s", style="dim")
    table = Table(title=f"{blocks} blocks in the index")
    for column in ("op", "keys", "index", "p50 ms", "p99 ms", "keys/s", "bytes a block"):
        table.add_column(column, justify="left" if column in ("op", "index") else "right")
    for row in sorted(rows, key=lambda r: (r.op, r.n, r.p50_ms)):
        table.add_row(
            row.op,
            str(row.n),
            row.index,
            f"{row.p50_ms:.3f}",
            f"{row.p99_ms:.3f}",
            f"{row.per_s:,.0f}",
            f"{row.bytes_per_block:.0f}",
        )
    Console().print(table)
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
