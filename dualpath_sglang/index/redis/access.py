"""Calls on the keys of one store, answered only by the index that this process has open."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dualpath_sglang.index.base import IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.redis.client import Call, Client, Run, Script

FORMAT = b"1"
BATCH, WRITE_BATCH = 1024, 256
"""Keys of one script call: Redis serves nobody else meanwhile, for two milliseconds at most."""

_OPEN = Script.of("open")
_START_OVER = Script.of("start_over")
_FILLED = Script.of("filled")
_ENLIST = Script.of("enlist")
_REGISTER = Script.of("register")
_ROWS = ("meta", "rows", "lru", "orphans", "freed")


class Access:
    """The keys of a store. Thread-safe.

    Args:
        client: the connections.
        store: the store's name, 16 hex digits.
        read_only: never write, not even what an index begins with.
        deadline: monotonic seconds.

    Raises:
        IndexUnavailableError: Redis does not answer, or there is no index to read.
        IndexDamagedError: its format is not ours.
    """

    def __init__(self, client: Client, store: str, *, read_only: bool, deadline: float) -> None:
        self.client = client
        self.read_only = read_only
        self.store = store
        self._seen: set[bytes] = set()
        self._unit_of: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        call: Call = ("HMGET", self.key("index"), "token", "format", "filled")
        if not read_only:
            call = Run(_OPEN, [self.key("index")], [FORMAT, secrets.token_bytes(8)])
        ((token, version, _),) = client.call(store, [call], deadline)
        if token is None:
            raise IndexUnavailableError(f"Redis has no index of the store {store}")
        if version != FORMAT:
            raise IndexUnavailableError(
                f"The index of the store {store} in Redis has a format that this version cannot "
                "read"
            )
        self.token: bytes = token

    # -- names ------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """A key of the store itself."""
        return f"dualpath:{{{self.store}}}:{name}"

    def unit_tag(self, unit: bytes) -> str:
        """What the keys of a unit share."""
        return f"{self.store}:{unit.hex()}"

    def unit_key(self, unit: bytes, name: str) -> str:
        """A key of a unit."""
        return f"dualpath:{{{self.unit_tag(unit)}}}:{name}"

    # -- the store --------------------------------------------------------------------------

    def call_store(self, calls: Sequence[Call], deadline: float) -> list[Any]:
        """Replies of calls on keys of the store itself."""
        return self.client.call(self.store, calls, deadline)

    def check(self, deadline: float) -> None:
        """Look whether the index is still the one that was opened, and whole.

        Raises:
            IndexDamagedError: it was emptied, replaced, or a part of it is gone.
        """
        calls: list[Call] = [
            ("HGET", self.key("index"), "token"),
            ("HGETALL", self.key("geometries")),
        ]
        token, geometries = self.call_store(calls, deadline)
        if token != self.token:
            raise IndexDamagedError(f"The index of the store {self.store} in Redis was emptied")
        for unit in self._note_geometries(geometries):
            self._seen.add(unit)
            (found,) = self.client.call(
                self.unit_tag(unit), [("HGET", self.unit_key(unit, "meta"), "token")], deadline
            )
            if found != self.token:
                self._lost(unit)

    def units(self, deadline: float) -> list[bytes]:
        """Every unit, in order."""
        (geometries,) = self.call_store([("HGETALL", self.key("geometries"))], deadline)
        return self._note_geometries(geometries)

    def unit_of(self, geometry_id: bytes, deadline: float) -> bytes | None:
        """The unit of a geometry that has, or had, blocks in the index."""
        if geometry_id not in self._unit_of:
            self.units(deadline)
        return self._unit_of.get(geometry_id)

    def _note_geometries(self, flat: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            self._unit_of.update(zip(flat[::2], flat[1::2], strict=True))
        return sorted(set(flat[1::2]))

    def filled(self, deadline: float) -> bool:
        """Whether the index has been filled from the store since it began."""
        (flag,) = self.call_store([("HGET", self.key("index"), "filled")], deadline)
        return bool(flag)

    def set_filled(self, deadline: float) -> None:
        """Note that it has."""
        run = Run(_FILLED, [self.key("index")], [self.token])
        if self.call_store([run], deadline) == [0]:
            raise IndexDamagedError(f"The index of the store {self.store} in Redis was emptied")

    def start_over(self, deadline: float) -> None:
        """Have this index, as it stands, count as empty for everybody."""
        keys = [self.key(name) for name in ("index", "geometries", "wanted")]
        run = Run(_START_OVER, keys, [self.token, secrets.token_bytes(8)])
        self.call_store([run], deadline)

    # -- units ------------------------------------------------------------------------------

    def run(
        self, unit: bytes, script: Script, calls: Sequence[Sequence[bytes | str | int]], end: float
    ) -> list[Any] | None:
        """Replies of a script to each list of arguments; None when the unit has no rows.

        Raises:
            IndexDamagedError: the unit belongs to another index, or had rows and lost them.
        """
        if not calls:
            return []
        seen = unit in self._seen  # before the call: others may register it meanwhile
        keys = [self.unit_key(unit, name) for name in _ROWS]
        runs = [Run(script, keys, [self.token, *arguments]) for arguments in calls]
        replies = self.client.call(self.unit_tag(unit), runs, end)
        for reply in replies:
            if reply == 0:
                raise IndexDamagedError(f"The index of the store {self.store} was begun anew")
            if reply is None:
                if seen:
                    self._lost(unit)
                return None
        self._seen.add(unit)
        return replies

    def register(self, unit: bytes, geometry_id: bytes, deadline: float) -> None:
        """Let a geometry have blocks.

        Raises:
            IndexDamagedError: it had some, which are gone.
        """
        registry = self.key("geometries")
        token, known = self.call_store(
            [("HGET", self.key("index"), "token"), ("HEXISTS", registry, geometry_id)], deadline
        )
        if token != self.token:
            raise IndexDamagedError(f"The index of the store {self.store} was begun anew")
        keys = [self.unit_key(unit, name) for name in _ROWS]
        run = Run(_REGISTER, keys, [self.token, geometry_id])
        (new,) = self.client.call(self.unit_tag(unit), [run], deadline)
        if new == b"late":
            raise IndexDamagedError(f"The index of the store {self.store} was begun anew")
        if new == 1 and known:
            self._lost(unit)
        enlist = Run(_ENLIST, [self.key("index"), registry], [self.token, geometry_id, unit])
        if self.call_store([enlist], deadline) == [0]:
            raise IndexDamagedError(f"The index of the store {self.store} was begun anew")
        self._seen.add(unit)

    def _lost(self, unit: bytes) -> None:
        """A server of a cluster was emptied: what is left is begun anew, or nobody would know."""
        if not self.read_only:
            self.start_over(time.monotonic() + 1.0)
        raise IndexDamagedError(
            f"A part of the index of the store {self.store} in Redis is gone ({unit.hex()})"
        )


def batches(count: int, size: int = BATCH) -> Iterator[slice]:
    """Slices of up to ``size``, together ``count``, from the first to the last."""
    return (slice(i, min(i + size, count)) for i in range(0, count, size))
