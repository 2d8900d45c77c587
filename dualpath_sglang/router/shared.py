"""What routers on one Redis share: which engines joined, left or drain, and where sessions are.

| key | type | what |
|---|---|---|
| ``dualpath:router:{<group>}:engines`` | hash | by engine: what it is, as JSON, and its state |
| ``dualpath:router:{<group>}:warm`` | stream | batches of sessions, newest last, cut to a length |

No request waits for Redis: what others say is applied when it comes, and what is to be said goes
out behind the requests. While Redis is away each router goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import RedisError

from dualpath_sglang.index.redis.settings import RedisSettings
from dualpath_sglang.router.sessions import Warm

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_ENGINES_EVERY_S = 0.5
_SEND_EVERY_S = 0.1
_RETRY_S = 0.5
_BLOCK_MS = 1000
_MOST_BATCHES = 5000
_MOST_UNSENT = 10_000
_MOST_IN_BATCH = 200
"""With the former, about 40 MB in Redis at most."""
_FAULTS = (RedisError, OSError, TimeoutError, asyncio.TimeoutError)


def connect(settings: RedisSettings) -> Any:
    """A client for these settings; no connection is made yet."""
    options: dict[str, Any] = {
        "username": settings.username or None,
        "password": settings.password or None,
        "socket_connect_timeout": _TIMEOUT_S,
    }
    if settings.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": None if settings.ca_file is None else str(settings.ca_file),
            "ssl_certfile": None if settings.cert_file is None else str(settings.cert_file),
            "ssl_keyfile": None if settings.key_file is None else str(settings.key_file),
        }
    if settings.mode == "cluster":
        nodes = [ClusterNode(host, port) for host, port in settings.hosts]
        return RedisCluster(startup_nodes=nodes, **options)
    if settings.mode == "sentinel":
        asked = {} if settings.sentinel_auth else {"username": None, "password": None}
        kind: Any = Sentinel  # without types
        sentinel = kind(list(settings.hosts), sentinel_kwargs={**options, **asked})
        return sentinel.master_for(settings.service, db=settings.db, **options)
    host, port = settings.hosts[0]
    return Redis(host=host, port=port, db=settings.db, **options)


class Shared:
    """One router's part in what they share.

    Args:
        engines: is given all records of engines by name, whenever they have been read.
        warm: is given what other routers say of sessions: (key, what).
    """

    def __init__(
        self,
        settings: RedisSettings,
        group: str,
        engines: Callable[[Mapping[str, Mapping[str, object]]], None],
        warm: Callable[[int, Warm], None],
    ) -> None:
        self._settings = settings
        self._key = f"dualpath:router:{{{group}}}:"
        self._engines = engines
        self._warm = warm
        self._id = secrets.token_hex(8)
        self._unsent: deque[tuple[int, Warm]] = deque(maxlen=_MOST_UNSENT)
        self._clients: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._put: dict[str, bytes] = {}
        """Records that Redis has not been told yet."""
        self.answers: bool | None = None

    def start(self) -> None:
        """From now on."""
        for job in (self._follow_engines, self._send_warm, self._follow_warm):
            client = connect(self._settings)
            self._clients.append(client)
            self._tasks.append(asyncio.create_task(self._keep(job, client)))

    async def close(self) -> None:
        """Not any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            with contextlib.suppress(*_FAULTS):
                await asyncio.wait_for(client.aclose(), _TIMEOUT_S)

    def put_engine(self, name: str, record: Mapping[str, object]) -> None:
        """Have all routers know what became of an engine, as soon as Redis can be told."""
        self._put[name] = orjson.dumps(record)

    def say(self, key: int, warm: Warm) -> None:
        """Have other routers know where a session is."""
        self._unsent.append((key, warm))

    async def _keep(self, job: Callable[[Any], Any], client: Any) -> None:
        while True:
            try:
                await job(client)
            except _FAULTS as error:
                if self.answers is not False:
                    logger.warning("Redis does not answer, what was known stays: %r", error)
                self.answers = False
            except Exception:
                logger.exception("Sharing with other routers failed")
            await asyncio.sleep(_RETRY_S)

    def _answered(self) -> None:
        if self.answers is False:
            logger.info("Redis answers again")
        self.answers = True

    async def _follow_engines(self, client: Any) -> None:
        while True:
            async with asyncio.timeout(_TIMEOUT_S):
                for name, record in list(self._put.items()):
                    await client.hset(self._key + "engines", name, record)
                    if self._put.get(name) == record:
                        del self._put[name]
                rows = await client.hgetall(self._key + "engines")
            self._answered()
            records = {}
            for name, text in rows.items():
                with contextlib.suppress(ValueError):
                    record = orjson.loads(text)
                    if isinstance(record, dict):
                        records[name.decode(errors="replace")] = record
            records |= {name: orjson.loads(text) for name, text in self._put.items()}
            self._engines(records)
            await asyncio.sleep(_ENGINES_EVERY_S)

    async def _send_warm(self, client: Any) -> None:
        while True:
            await asyncio.sleep(_SEND_EVERY_S)
            if not self._unsent:
                continue
            batch = [self._unsent.popleft() for _ in range(min(_MOST_IN_BATCH, len(self._unsent)))]
            rows = [[key, w.prefill, w.decode, w.tokens] for key, w in batch]
            fields = {"from": self._id, "rows": orjson.dumps(rows)}
            async with asyncio.timeout(_TIMEOUT_S):
                await client.xadd(
                    self._key + "warm", fields, maxlen=_MOST_BATCHES, approximate=True
                )

    async def _follow_warm(self, client: Any) -> None:
        last: Any = "0"  # a new router hears what was said before it came
        while True:
            began = time.monotonic()
            async with asyncio.timeout(_TIMEOUT_S + _BLOCK_MS / 1000):
                streams = await client.xread({self._key + "warm": last}, count=100, block=_BLOCK_MS)
            if not streams and time.monotonic() - began < 0.5 * _BLOCK_MS / 1000:
                await asyncio.sleep(_RETRY_S)  # the end of a key that was removed
            for _, entries in streams.items() if isinstance(streams, dict) else streams:
                for last, fields in _entries(entries):  # noqa: B007 -- the last one is gone on from
                    if fields.get(b"from") != self._id.encode():
                        self._hear(fields.get(b"rows", b""))
                    await asyncio.sleep(0)

    def _hear(self, text: bytes) -> None:
        try:
            for key, prefill, decode, tokens in orjson.loads(text):
                if isinstance(key, int) and isinstance(tokens, int):
                    self._warm(key, Warm(str(prefill), str(decode), tokens))
        except (ValueError, TypeError):
            logger.debug("Another router says what cannot be read")


def _entries(entries: Any) -> list[tuple[Any, dict[bytes, bytes]]]:
    """One list, whichever version of the protocol brought it."""
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], list):
        return [entry for group in entries for entry in group]
    return list(entries)
