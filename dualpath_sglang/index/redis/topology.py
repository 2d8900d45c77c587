"""Which server has the keys: the one there is, the master of a Sentinel service, or by slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from redis.crc import key_slot
from redis.exceptions import RedisError

from dualpath_sglang.index.base import IndexUnavailableError
from dualpath_sglang.index.redis.faults import RedisMisconfiguredError
from dualpath_sglang.index.redis.link import Link
from dualpath_sglang.index.redis.node import DIAL_S, Node
from dualpath_sglang.index.redis.settings import Address, RedisSettings

_REFRESH_PAUSE_S = 0.1


class Topology(Protocol):
    """Thread-safe."""

    def node(self, tag: str, deadline: float) -> Node:
        """Who has the keys with a hash tag.

        Raises:
            IndexUnavailableError: that is not known by the deadline (monotonic seconds).
        """
        ...

    def moved(self, tag: str, address: Address) -> Node:
        """Redis said that the keys are there now."""
        ...

    def doubt(self, node: Node) -> None:
        """It did not answer, or was not the right one."""
        ...

    def close(self) -> None:
        """End all connections."""
        ...


def topology(settings: RedisSettings) -> Topology:
    """How the servers of these settings are found."""
    if settings.mode == "cluster":
        return _Cluster(settings)
    return _OneNode(settings)


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _dial(address: Address, settings: RedisSettings, deadline: float) -> Link:
    link = Link(address, settings, deadline)
    try:
        (reply,) = link.exchange([("INFO", "memory")], deadline)
        if isinstance(reply, Exception):
            raise reply
        _check_memory(reply.decode(errors="replace"), _name(address))
    except BaseException:
        link.close()
        raise
    return link


def _check_memory(info: str, name: str) -> None:
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "noeviction").strip()
    if facts.get("maxmemory", "0").strip() != "0" and policy != "noeviction":
        raise RedisMisconfiguredError(
            f"Redis at {name} would throw away parts of the index when its memory is full: "
            f"its maxmemory-policy is {policy}, and must be noeviction"
        )


class _OneNode:
    """One server, or the master that Sentinels name each time a connection is made."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        name = settings.service or _name(settings.hosts[0])
        self._node = Node(name, self._dial)

    def node(self, tag: str, deadline: float) -> Node:
        del tag, deadline
        return self._node

    def moved(self, tag: str, address: Address) -> Node:
        del tag, address
        raise IndexUnavailableError(
            f"Redis at {self._node.name} belongs to a cluster; say redis+cluster:// for the index"
        )

    def doubt(self, node: Node) -> None:
        """Sentinels are asked whenever a connection is made."""

    def close(self) -> None:
        self._node.close()

    def _dial(self, deadline: float) -> Link:
        if self._settings.mode != "sentinel":
            return _dial(self._settings.hosts[0], self._settings, deadline)
        address = self._master(deadline)
        link = _dial(address, self._settings, deadline)
        (role,) = link.exchange([("ROLE",)], deadline)
        if isinstance(role, Exception) or role[0] != b"master":
            link.close()
            raise IndexUnavailableError(f"Redis at {_name(address)} is not the master any more")
        return link

    def _master(self, deadline: float) -> Address:
        hosts = self._settings.hosts
        for i, host in enumerate(hosts):
            # A dead Sentinel must leave time for the others.
            until = time.monotonic() + (deadline - time.monotonic()) / (len(hosts) - i + 1)
            try:
                link = Link(host, self._settings, until, sentinel=True)
            except (RedisError, OSError):
                continue
            try:
                command = ("SENTINEL", "get-master-addr-by-name", self._settings.service)
                (reply,) = link.exchange([command], until)
                if isinstance(reply, list) and len(reply) == 2:
                    return reply[0].decode(), int(reply[1])
            except (RedisError, OSError, ValueError):
                continue
            finally:
                link.close()
        raise IndexUnavailableError(f"No Sentinel names a master of {self._settings.service}")


class _Cluster:
    """Servers by slot; the map is looked up again in the background when it seems wrong."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._nodes: dict[Address, Node] = {}
        self._slots: list[tuple[int, int, Address]] = []
        self._moved: dict[int, Address] = {}
        self._changed = threading.Condition()
        self._refreshing = False
        self._refreshed_at = float("-inf")
        self._closed = False

    def node(self, tag: str, deadline: float) -> Node:
        slot = key_slot(tag.encode())
        with self._changed:
            while True:
                address = self._address(slot)
                if address is not None:
                    return self._node(address)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closed:
                    raise IndexUnavailableError(
                        f"The Redis Cluster at {self._settings} does not say who has the keys"
                    )
                self._refresh_soon()
                self._changed.wait(min(left_s, _REFRESH_PAUSE_S))

    def moved(self, tag: str, address: Address) -> Node:
        slot = key_slot(tag.encode())
        with self._changed:
            host = address[0] or (self._address(slot) or self._settings.hosts[0])[0]
            self._moved[slot] = (host, address[1])
            self._refresh_soon()
            return self._node(self._moved[slot])

    def doubt(self, node: Node) -> None:
        del node
        with self._changed:
            self._refresh_soon()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            self._changed.notify_all()
        for node in nodes:
            node.close()

    def _address(self, slot: int) -> Address | None:
        if slot in self._moved:
            return self._moved[slot]
        return next((a for first, last, a in self._slots if first <= slot <= last), None)

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = Node(_name(address), lambda by: _dial(address, self._settings, by))
            self._nodes[address] = node
        return node

    def _refresh_soon(self) -> None:
        """With the lock held."""
        pause_over = time.monotonic() - self._refreshed_at >= _REFRESH_PAUSE_S
        if not self._refreshing and not self._closed and pause_over:
            self._refreshing = True
            known = list(dict.fromkeys(address for _, _, address in self._slots))
            threading.Thread(
                target=self._refresh, args=(known,), name="dualpath-redis", daemon=True
            ).start()

    def _refresh(self, known: Sequence[Address]) -> None:
        slots: list[tuple[int, int, Address]] = []
        try:
            for address in dict.fromkeys((*known, *self._settings.hosts)):
                slots = self._ask(address)
                if slots:
                    break
        finally:
            dropped: list[Node] = []
            with self._changed:
                self._refreshing = False
                self._refreshed_at = time.monotonic()
                if slots:
                    self._slots, self._moved = slots, {}
                    kept = {address for _, _, address in slots}
                    dropped = [self._nodes.pop(a) for a in list(self._nodes) if a not in kept]
                self._changed.notify_all()
            for node in dropped:
                node.close()

    def _ask(self, address: Address) -> list[tuple[int, int, Address]]:
        deadline = time.monotonic() + DIAL_S
        try:
            link = Link(address, self._settings, deadline)
            try:
                (reply,) = link.exchange([("CLUSTER", "SLOTS")], deadline)
            finally:
                link.close()
            return [_slot_range(row, address) for row in reply]
        except (RedisError, OSError, ValueError, TypeError, LookupError):
            return []


def _slot_range(row: Any, asked: Address) -> tuple[int, int, Address]:
    host = (row[2][0] or b"").decode()
    return int(row[0]), int(row[1]), (asked[0] if host in ("", "?") else host, int(row[2][1]))
