"""How two nodes begin: who they are, whether they speak alike, and whether they share a secret.

| from | bytes |
|---|---|
| client | ``DUALPATH``, version (u16), nonce (16) |
| server | ``DUALPATH``, version (u16), nonce (16), whether it wants proof (u8) |
| client | proof (32, zeros without a secret) |
| server | 1 and its own proof (32), or 0 and why not (u8) |

A proof is HMAC-SHA256 with the secret over who proves and both nonces, so neither side can repeat
what it has heard. It says who is at the other end when the connection begins. Somebody between the
two may pass the proofs on, and then read, change and ask what he likes: only TLS keeps him out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping

from dualpath_sglang.transport.base import PeerLostError, RefusedError
from dualpath_sglang.transport.socket_io import SocketIo

VERSION = 1
_MAGIC = b"DUALPATH"
_HELLO = struct.Struct("!8sH16s")
_PROOF_BYTES = 32
_NO_PROOF = bytes(_PROOF_BYTES)
_SECRET = 2
_WHY: Mapping[int, str] = {_SECRET: "does not accept the secret"}


def _proof(secret: bytes, who: bytes, client: bytes, server: bytes) -> bytes:
    if not secret:
        return _NO_PROOF
    return hmac.new(secret, who + client + server, hashlib.sha256).digest()


def greet(io: SocketIo, secret: bytes, deadline: float) -> None:
    """The client's part.

    Args:
        secret: empty for none.
        deadline: monotonic seconds.

    Raises:
        RefusedError: the server is of another version, or the secrets differ.
        PeerLostError: it does not answer in time, or as it must.
    """
    mine = secrets.token_bytes(16)
    io.send([_HELLO.pack(_MAGIC, VERSION, mine)], deadline)
    magic, version, theirs = _HELLO.unpack(io.receive(_HELLO.size, deadline))
    if magic != _MAGIC:
        raise PeerLostError("something else than a DualPath node answers")
    (wants_proof,) = io.receive(1, deadline)
    if version != VERSION:
        raise RefusedError(f"the peer speaks version {version} of the protocol, not {VERSION}")
    if wants_proof and not secret:
        raise RefusedError("the peer wants a secret, and none is set here")
    if secret and not wants_proof:
        raise RefusedError("a secret is set here, and the peer has none")
    io.send([_proof(secret, b"client", mine, theirs)], deadline)
    (fine,) = io.receive(1, deadline)
    if not fine:
        (why,) = io.receive(1, deadline)
        raise RefusedError(f"the peer {_WHY.get(why, 'refuses the connection')}")
    proof = io.receive(_PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", mine, theirs)):
        raise RefusedError("the peer does not know the secret")


def admit(io: SocketIo, secret: bytes, deadline: float) -> None:
    """The server's part.

    Raises:
        RefusedError: the client is of another version, or the secrets differ; it was told.
        PeerLostError: it does not speak in time, or as it must.
    """
    magic, version, theirs = _HELLO.unpack(io.receive(_HELLO.size, deadline))
    if magic != _MAGIC:
        raise PeerLostError("something else than a DualPath node calls")
    mine = secrets.token_bytes(16)
    io.send([_HELLO.pack(_MAGIC, VERSION, mine), bytes([bool(secret)])], deadline)
    if version != VERSION:
        raise RefusedError(f"it speaks version {version} of the protocol, not {VERSION}")
    proof = io.receive(_PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"client", theirs, mine)):
        io.send([bytes([0, _SECRET])], deadline)
        raise RefusedError("it does not know the secret")
    io.send([b"\1", _proof(secret, b"server", theirs, mine)], deadline)
