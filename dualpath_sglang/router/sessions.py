"""Where the prefixes of sessions are warm: which engines served a session's last request.

A request that continues a session begins with what the session's last request was. So one entry a
session is enough: it stands under the hash of that request's whole prompt (its last boundary), and
a later request finds it under one of its own boundaries, the longest first. Boundaries are the ends
of messages, for chat, and multiples of a fixed length for text and token ids.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Warm:
    """Where a prefix is.

    Args:
        prefill, decode: names of the engines that served it.
        tokens: its length.
        at: when, monotonic seconds.
    """

    prefill: str
    decode: str
    tokens: int
    at: float = field(default_factory=time.monotonic, compare=False)


class Sessions:
    """Bounded; the session that has been silent longest is forgotten first.

    Args:
        limit: how many are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._warm: OrderedDict[int, Warm] = OrderedDict()

    def __len__(self) -> int:
        return len(self._warm)

    def find(self, keys: Sequence[int]) -> tuple[int, Warm] | None:
        """The longest prefix that is known, and under which key.

        Args:
            keys: hashes of a request's boundaries, the shortest prefix first.
        """
        for key in reversed(keys):
            warm = self._warm.get(key)
            if warm is not None:
                self._warm.move_to_end(key)
                return key, warm
        return None

    def remember(self, key: int, warm: Warm, instead_of: int | None = None) -> None:
        """A request was served so.

        Args:
            instead_of: the key under which its session was found.
        """
        if instead_of is not None and instead_of != key:
            self._warm.pop(instead_of, None)
        self._warm[key] = warm
        self._warm.move_to_end(key)
        while len(self._warm) > self._limit:
            self._warm.popitem(last=False)
