"""The indexes that :mod:`bench.index` compares, behind one small interface."""

from __future__ import annotations

import secrets
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import lmdb

from dualpath_sglang.index import EmbeddedIndex, Index, Record
from dualpath_sglang.index.redis import RedisSettings, open_redis_index
from dualpath_storage import Geometry, Placement
from tests.support.redis_server import RedisServer

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

    def scan(self) -> int:
        """Walk over every row; how many there are."""
        return sum(1 for _ in self._index.entries())

    def close(self) -> None:
        self._index.close()


class Embedded(Ours):
    """Our index in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(EmbeddedIndex(path))


class Redis(Ours):
    """Our index in a server of its own."""

    def __init__(self, path: Path) -> None:
        del path
        self._server = RedisServer().start()
        settings = RedisSettings.parse(self._server.url)
        store = secrets.token_hex(8)
        super().__init__(open_redis_index(settings, store, lookup_timeout_s=_TIMEOUT_S))
        self._empty_bytes = self._used_bytes()

    def stored_bytes(self) -> int:
        """Memory that the server needs for what is in it."""
        return self._used_bytes() - self._empty_bytes

    def _used_bytes(self) -> int:
        with self._server.admin() as admin:
            return int(admin.info("memory")["used_memory"])

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


def _name(key: bytes) -> bytes:
    return GEOMETRY.unit + key + GEOMETRY.id_bytes


def _packed(place: Placement) -> bytes:
    return _PLACE.pack(place.segment, place.slot, place.generation)


def _parts(values: Sequence[bytes | int], size: int) -> Iterator[Sequence[bytes | int]]:
    return (values[i : i + size] for i in range(0, len(values), size))
