"""What ends the head of every frame, so that nobody's word but the peer's is taken.

Without a secret it is a crc32: damage is seen, intent is not. With one it is a MAC (BLAKE2b, 16
bytes) under a key of this connection and direction, over the number of the frame and all of it but
the payload. So whoever sits between two nodes, one who passed the handshake on included, can
neither ask for anything, nor change a frame, leave one out, repeat it, or bring two in another
order, without ending the connection.

The payload is bound by its checksums, which the MAC covers. They are xxh3-64, which finds damage
and is not made against intent: whoever can change bytes on the way can find others with the same
checksum. He can also read. Who needs more needs TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from dataclasses import dataclass
from typing import Protocol

from dualpath_sglang.transport.base import PeerLostError

CRC_BYTES = 4
MAC_BYTES = 16


class Digest(Protocol):
    """Of one frame, as it goes by."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Go on with these bytes."""
        ...

    def digest(self) -> bytes:
        """Over all of them."""
        ...


class _Crc:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(CRC_BYTES, "big")


class Seal:
    """Of the frames that go one way over one connection. Not thread-safe: frames have an order.

    Args:
        key: 32 bytes of this connection and direction; empty for a crc32.
    """

    def __init__(self, key: bytes = b"") -> None:
        self.size = MAC_BYTES if key else CRC_BYTES
        """Bytes of each."""
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES) if key else None
        self._number = 0

    def begin(self) -> Digest:
        """Of the frame whose turn it is."""
        if self._keyed is None:
            return _Crc()
        digest = self._keyed.copy()
        digest.update(self._number.to_bytes(8, "big"))
        return digest

    def over(self, *parts: bytes | memoryview) -> bytes:
        """Of the frame whose turn it is, made of these."""
        digest = self.begin()
        for part in parts:
            digest.update(part)
        return digest.digest()

    def passed(self) -> None:
        """The frame whose turn it was is sent, or has begun to be."""
        self._number += 1

    def check(self, digest: Digest, seal: bytes | memoryview) -> None:
        """The frame whose turn it is has come whole.

        Raises:
            PeerLostError: it is not what the peer sent, or not its turn.
        """
        if not hmac.compare_digest(digest.digest(), seal):
            raise PeerLostError("a frame came that is damaged, or not from the peer")
        self._number += 1


@dataclass(frozen=True, slots=True)
class Seals:
    """Of both directions of a connection, as one end has them.

    Args:
        sent, received: of the frames that this end sends, and that it receives.
    """

    sent: Seal
    received: Seal

    @classmethod
    def plain(cls) -> Seals:
        """Without a secret."""
        return cls(Seal(), Seal())
