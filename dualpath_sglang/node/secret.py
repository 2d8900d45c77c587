"""What nodes prove to each other that they know: a setting, or what they share over the index."""

from __future__ import annotations

import secrets
import threading

from dualpath_sglang.index import Index

_BYTES = 32


class NodeSecret:
    """Thread-safe.

    Args:
        given: by the operator; empty for the one in the index.
        offers: whether it makes one when none stands in the index, and brings the one that it
            knows back to an index that was emptied. Agents do; who only asks them looks.
    """

    def __init__(self, given: bytes = b"", *, offers: bool = False) -> None:
        self._given = given
        self._offers = offers
        self._lock = threading.Lock()
        self._value = given

    @property
    def value(self) -> bytes:
        """Empty while it is not known yet. Without it nobody is let in."""
        return self._value

    def look(self, index: Index) -> bool:
        """Ask the index, now and then or when a peer refuses us; whether it is another one now.

        Raises:
            IndexUnavailableError: the index does not answer.
        """
        if self._given:
            return False
        with self._lock:
            offered = b""
            if self._offers:
                offered = self._value or secrets.token_hex(_BYTES).encode()
            found = index.secret(offered) or self._value
            changed = found != self._value
            self._value = found
            return changed
