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
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import lmdb
import typer
from rich.console import Console
from rich.table import Table

from bench.local_redis import LocalRedis
from bench.measure import median, percentile, write_rows
from dualpath_sglang.index import EmbeddedIndex, Index, Record
from dualpath_storage import NO_PARENT, Geometry, Placement

BATCH = 128
CHAIN = 256
"""Pages of one conversation."""

GEOMETRY = Geometry(
    model="bench",
    weights="0",
    pool="kv",
    dtype="bfloat16",
    page_tokens=64,
    layers=16,
    layer_bytes=131072,
    form="mha k[token,head=8,dim=64] v[token,head=8,dim=64]",
)
_TIMEOUT_S = 60.0
_PLACE = struct.Struct("<IIQ")
_PARAMETERS = 500  # of one IN list; SQLite's default limit was 999 for long


class Candidate(Protocol):
    """What an index is asked here."""

    def publish(self, records: Sequence[Record]) -> None: ...

    def prefix(self, keys: Sequence[bytes]) -> int: ...

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def evict(self, count: int) -> int: ...

    def close(self) -> None: ...


class Ours:
    """Our interface as this bench asks it."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def publish(self, records: Sequence[Record]) -> None:
        assert all(self._index.publish(GEOMETRY, records, _TIMEOUT_S))

    def prefix(self, keys: Sequence[bytes]) -> int:
        return self._index.prefix(GEOMETRY, keys)

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]:
        return self._index.lookup(GEOMETRY, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._index.touch(GEOMETRY.unit, keys, _TIMEOUT_S)

    def evict(self, count: int) -> int:
        size = {GEOMETRY.id_bytes: GEOMETRY.slot_bytes}
        return len(self._index.evict(size, count * GEOMETRY.slot_bytes, _TIMEOUT_S))

    def close(self) -> None:
        self._index.close()


class Embedded(Ours):
    """Our index in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(EmbeddedIndex(path))


class Redis(Ours):
    """Our index in a server of its own."""

    def __init__(self, path: Path) -> None:
        self._server = LocalRedis(path.with_name("redis"))
        super().__init__(self._server.open_index(_TIMEOUT_S))
        self._empty_bytes = self._server.used_bytes()

    def stored_bytes(self) -> int:
        """Memory that the server needs for what is in it."""
        return self._server.used_bytes() - self._empty_bytes

    def close(self) -> None:
        super().close()
        self._server.close()


class BareLmdb:
    """LMDB with one table and no order of use: :meth:`touch` and :meth:`evict` do nothing."""

    def __init__(self, path: Path) -> None:
        self._env = lmdb.open(
            str(path), map_size=64 << 30, subdir=False, sync=False, metasync=False, max_dbs=1
        )
        self._table = self._env.open_db(b"blocks")

    def publish(self, records: Sequence[Record]) -> None:
        with self._env.begin(write=True, db=self._table) as txn:
            for record in records:
                txn.put(_name(record.key), _packed(record.placement), overwrite=False)

    def prefix(self, keys: Sequence[bytes]) -> int:
        with self._env.begin(db=self._table) as txn:
            for i, key in enumerate(keys):
                if txn.get(_name(key)) is None:
                    return i
        return len(keys)

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]:
        with self._env.begin(db=self._table) as txn:
            rows = [txn.get(_name(key)) for key in keys]
        return [None if row is None else Placement(*_PLACE.unpack(row)) for row in rows]

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def evict(self, count: int) -> int:
        return 0 * count

    def close(self) -> None:
        self._env.close()


class Sqlite:
    """SQLite by whole keys, one SELECT a key."""

    _KEY = "BLOB"
    _SUFFIX = " WITHOUT ROWID"

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        for pragma in (
            "journal_mode=WAL",
            "synchronous=OFF",
            "cache_size=-262144",
            "mmap_size=4294967296",
            "temp_store=MEMORY",
            "wal_autocheckpoint=4000",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute(
            f"CREATE TABLE blocks (id {self._KEY} PRIMARY KEY, name BLOB, place BLOB,"
            f" used INTEGER, parent {self._KEY}, children INTEGER DEFAULT 0){self._SUFFIX}"
        )
        self._db.execute("CREATE INDEX leaves ON blocks (used) WHERE children = 0")

    def _id(self, key: bytes) -> bytes | int:
        return _name(key)

    def publish(self, records: Sequence[Record]) -> None:
        now = time.time_ns() // 1000
        rows = [
            (
                self._id(r.key),
                None if self._KEY == "BLOB" else _name(r.key),
                _packed(r.placement),
                now - i,
                self._id(r.parent),
            )
            for i, r in enumerate(records)
        ]
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO blocks (id, name, place, used, parent) VALUES (?,?,?,?,?)",
                rows,
            )
            self._db.executemany(
                "UPDATE blocks SET children = children + 1 WHERE id = ?", [(r[4],) for r in rows]
            )

    def prefix(self, keys: Sequence[bytes]) -> int:
        found = self.lookup(keys)
        return found.index(None) if None in found else len(found)

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]:
        rows = []
        for key in keys:
            query = self._db.execute("SELECT place FROM blocks WHERE id = ?", (self._id(key),))
            rows.append(query.fetchone())
        return [None if row is None else Placement(*_PLACE.unpack(row[0])) for row in rows]

    def touch(self, keys: Sequence[bytes]) -> None:
        now = time.time_ns() // 1000
        rows = [(now - i, self._id(key)) for i, key in enumerate(keys)]
        with self._transaction():
            self._db.executemany("UPDATE blocks SET used = ? WHERE id = ?", rows)

    def evict(self, count: int) -> int:
        gone = 0
        with self._transaction():
            while gone < count:
                row = self._db.execute(
                    "SELECT id, parent FROM blocks WHERE children = 0 ORDER BY used LIMIT 1"
                ).fetchone()
                if row is None:
                    break
                self._db.execute("DELETE FROM blocks WHERE id = ?", row[:1])
                self._db.execute("UPDATE blocks SET children = children - 1 WHERE id = ?", row[1:])
                gone += 1
        return gone

    def close(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def _transaction(self) -> sqlite3.Connection:
        self._db.execute("BEGIN IMMEDIATE")
        return self._db  # as a context manager it commits


class SqliteIn(Sqlite):
    """SQLite by whole keys, ``IN`` lists."""

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]:
        places: dict[bytes | int, bytes] = {}
        for part in _parts([self._id(key) for key in keys], _PARAMETERS):
            marks = ",".join("?" * len(part))
            places.update(
                self._db.execute(f"SELECT id, place FROM blocks WHERE id IN ({marks})", part)
            )
        rows = (places.get(self._id(key)) for key in keys)
        return [None if row is None else Placement(*_PLACE.unpack(row)) for row in rows]


class SqliteRowid(Sqlite):
    """SQLite by an integer digest of the key, ``IN`` lists; the row's key is compared."""

    _KEY = "INTEGER"
    _SUFFIX = ""

    def _id(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") >> 1

    def lookup(self, keys: Sequence[bytes]) -> list[Placement | None]:
        rows: dict[int, tuple[bytes, bytes]] = {}
        for part in _parts([self._id(key) for key in keys], _PARAMETERS):
            marks = ",".join("?" * len(part))
            query = f"SELECT id, name, place FROM blocks WHERE id IN ({marks})"
            rows.update((i, (name, place)) for i, name, place in self._db.execute(query, part))
        found: list[Placement | None] = []
        for key in keys:
            name, place = rows.get(self._id(key), (b"", b""))
            found.append(Placement(*_PLACE.unpack(place)) if name == _name(key) else None)
        return found


CANDIDATES: dict[str, Callable[[Path], Candidate]] = {
    "embedded": Embedded,
    "redis": Redis,
    "lmdb": BareLmdb,
    "sqlite": Sqlite,
    "sqlite_in": SqliteIn,
    "sqlite_rowid": SqliteRowid,
}


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


def _name(key: bytes) -> bytes:
    return GEOMETRY.unit + key + GEOMETRY.id_bytes


def _packed(place: Placement) -> bytes:
    return _PLACE.pack(place.segment, place.slot, place.generation)


def _parts(values: Sequence[bytes | int], size: int) -> Iterator[Sequence[bytes | int]]:
    return (values[i : i + size] for i in range(0, len(values), size))


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
    if "redis" in names and not LocalRedis.installed():
        names.remove("redis")
        progress.print("redis is left out: redis-server or the package redis is not installed")
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
