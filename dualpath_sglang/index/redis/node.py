"""One Redis server as seen from here: its connections, and whether it is worth asking."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import exceptions
from redis.exceptions import RedisError

from dualpath_sglang.index.base import IndexUnavailableError
from dualpath_sglang.index.redis.breaker import CircuitBreaker
from dualpath_sglang.index.redis.faults import explained
from dualpath_sglang.index.redis.link import Command, Link

logger = logging.getLogger(__name__)

DIAL_S = 1.0
"""How long a connection may take to stand. Whoever waits for it waits no longer than its own
deadline; the connection then serves the next call."""
_MOST_DIALING = 4
_MOST_IDLE = 16


class Node:
    """A server, or the one that has its part now. Thread-safe.

    Args:
        name: for messages.
        dial: makes a connection by a deadline (monotonic seconds); called in threads of its own.
    """

    def __init__(self, name: str, dial: Callable[[float], Link]) -> None:
        self.name = name
        self._dial = dial
        self._breaker = CircuitBreaker()
        self._idle: list[Link] = []
        self._ready = threading.Condition()
        self._waiting = 0
        self._dialing = 0
        self._refusals = 0
        self._refusal: IndexUnavailableError | None = None
        self._round = 0
        self._closed = False
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """See :meth:`Link.exchange`.

        Raises:
            IndexUnavailableError: not every reply came by the deadline (monotonic seconds), or it
                has not been answering of late and was not asked.
        """
        if not self._breaker.enter():
            raise IndexUnavailableError(f"Redis at {self.name} has not been answering")
        answered = False
        try:
            link = self._take(deadline)
            began = self._round
            try:
                replies = link.exchange(commands, deadline)
            except (RedisError, OSError) as error:
                link.close()
                if not isinstance(error, (exceptions.TimeoutError, TimeoutError)):
                    self.drop_links()  # the others have ended as well
                raise explained(error, self.name, sent=True) from None
            except BaseException:
                link.close()
                raise
            self._put(link, began)
            answered = True
            return replies
        finally:
            if answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
                if self._breaker.is_open:  # connections may be dead without saying so
                    self.drop_links()

    def drop_links(self) -> None:
        """Use none of the connections again: nobody answers there, or the wrong one does."""
        with self._ready:
            links, self._idle = self._idle, []
            self._round += 1
        for link in links:
            link.close()

    def close(self) -> None:
        """End all connections; none is made any more."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        self.drop_links()

    def _take(self, deadline: float) -> Link:
        with self._ready:
            if self._pid != os.getpid():  # connections of the parent are not ours to speak on
                self._pid, self._idle, self._dialing, self._waiting = os.getpid(), [], 0, 0
            refusals = self._refusals
            self._waiting += 1
            try:
                while True:
                    while self._idle:
                        link = self._idle.pop()
                        if link.alive():
                            return link
                        link.close()
                    if self._closed:
                        raise IndexUnavailableError(f"The index in Redis at {self.name} is closed")
                    if self._refusals != refusals and self._refusal is not None:
                        raise self._refusal
                    if self._dialing < min(self._waiting, _MOST_DIALING):
                        self._dialing += 1
                        threading.Thread(
                            target=self._connect, name="dualpath-redis", daemon=True
                        ).start()
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise IndexUnavailableError(
                            f"Redis at {self.name} cannot be reached in time"
                        )
                    self._ready.wait(left_s)
            finally:
                self._waiting -= 1

    def _put(self, link: Link, began: int) -> None:
        with self._ready:
            if not self._closed and began == self._round and len(self._idle) < _MOST_IDLE:
                self._idle.append(link)
                self._ready.notify()
                return
        link.close()

    def _connect(self) -> None:
        link, refusal = None, None
        try:
            link = self._dial(time.monotonic() + DIAL_S)
        except IndexUnavailableError as error:
            refusal = error
        except (RedisError, OSError) as error:
            refusal = explained(error, self.name, sent=False)
        except Exception:
            logger.exception("A connection to Redis at %s failed", self.name)
            refusal = IndexUnavailableError(f"Redis at {self.name} cannot be reached")
        with self._ready:
            self._dialing -= 1
            if link is not None and not self._closed:
                self._idle.append(link)
                link = None
            elif refusal is not None:
                self._refusals += 1
                self._refusal = refusal
            self._ready.notify_all()
        if link is not None:
            link.close()
