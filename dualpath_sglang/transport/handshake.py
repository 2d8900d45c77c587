"""How two nodes begin: who they are, whether they speak alike, and whether they share a secret.

| from | bytes |
|---|---|
| client | ``DUALPATH``, version (u16), nonce (16) |
| server | ``DUALPATH``, version (u16), nonce (16), whether it wants proof (u8) |
| client | proof (32, zeros without a secret) |
| server | 1 and its own proof (32), or 0 and why not (u8) |

A proof is HMAC-SHA256 with the secret over who proves, the version and both nonces, so neither side
can repeat what it has heard. The keys of the frames that follow are made alike, one a direction
(:mod:`.seal`): whoever only passed the proofs on does not have them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from dualpath_sglang.transport.base import PeerLostError, RefusedError
from dualpath_sglang.transport.seal import Seal, Seals
from dualpath_sglang.transport.socket_io import SocketIo

VERSION = 2
_MAGIC = b"DUALPATH"
_HELLO = struct.Struct("!8sH16s")
_PROOF_BYTES = 32
_NO_PROOF = bytes(_PROOF_BYTES)
_SECRET, _FULL = 2, 3


class WrongSecretError(RefusedError):
    """The two do not share a secret."""


class OtherVersionError(RefusedError):
    """The two speak different versions of the protocol."""


class FullError(PeerLostError):
    """The server has as many connections as it may; a later try may do."""


def _derived(secret: bytes, what: bytes, client: bytes, server: bytes) -> bytes:
    version = VERSION.to_bytes(2, "big")
    return hmac.new(secret, what + version + client + server, hashlib.sha256).digest()


def _proof(secret: bytes, who: bytes, client: bytes, server: bytes) -> bytes:
    return _derived(secret, who + b" proves", client, server) if secret else _NO_PROOF


def _seal(secret: bytes, who: bytes, client: bytes, server: bytes) -> Seal:
    return Seal(_derived(secret, who + b" sends", client, server)) if secret else Seal()


def greet(io: SocketIo, secret: bytes, deadline: float) -> Seals:
    """The client's part.

    Args:
        secret: empty for none.
        deadline: monotonic seconds.

    Raises:
        WrongSecretError: the secrets differ, or only one of the two has one.
        OtherVersionError: the server is of another version.
        PeerLostError: it does not answer in time, or as it must, or has too much to do.
    """
    mine = secrets.token_bytes(16)
    io.send([_HELLO.pack(_MAGIC, VERSION, mine)], deadline)
    magic, version, theirs = _HELLO.unpack(io.receive(_HELLO.size, deadline))
    if magic != _MAGIC:
        raise PeerLostError("something else than a DualPath node answers")
    if version != VERSION:
        raise OtherVersionError(
            f"the peer speaks version {version} of the protocol, and this node version {VERSION}"
        )
    (wants_proof,) = io.receive(1, deadline)
    if wants_proof and not secret:
        raise WrongSecretError("the peer wants a secret, and none is set here")
    if secret and not wants_proof:
        raise WrongSecretError("a secret is set here, and the peer has none")
    io.send([_proof(secret, b"client", mine, theirs)], deadline)
    (fine,) = io.receive(1, deadline)
    if not fine:
        (why,) = io.receive(1, deadline)
        if why == _FULL:
            raise FullError("the peer has as many connections as it may have")
        if why == _SECRET:
            raise WrongSecretError("the peer does not accept the secret")
        raise RefusedError("the peer refuses the connection")
    proof = io.receive(_PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", mine, theirs)):
        raise WrongSecretError("the peer does not know the secret")
    names = (b"client", b"server")
    return Seals(*(_seal(secret, who, mine, theirs) for who in names))


def admit(
    io: SocketIo, secret: bytes, deadline: float, take_place: Callable[[], bool] = lambda: True
) -> Seals:
    """The server's part.

    Args:
        take_place: called once the client is known to be one; whether there is a place for it.

    Raises:
        WrongSecretError, OtherVersionError: the two do not fit together; it was told.
        FullError: there is no place; it was told.
        PeerLostError: it does not speak in time, or as it must.
    """
    magic, version, theirs = _HELLO.unpack(io.receive(_HELLO.size, deadline))
    if magic != _MAGIC:
        raise PeerLostError("something else than a DualPath node calls")
    mine = secrets.token_bytes(16)
    io.send([_HELLO.pack(_MAGIC, VERSION, mine), bytes([bool(secret)])], deadline)
    if version != VERSION:
        raise OtherVersionError(
            f"it speaks version {version} of the protocol, and this node version {VERSION}"
        )
    proof = io.receive(_PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"client", theirs, mine)):
        io.send([bytes([0, _SECRET])], deadline)
        raise WrongSecretError("it does not know the secret")
    if not take_place():
        io.send([bytes([0, _FULL])], deadline)
        raise FullError("there are as many connections as there may be")
    io.send([b"\1", _proof(secret, b"server", theirs, mine)], deadline)
    names = (b"server", b"client")
    return Seals(*(_seal(secret, who, theirs, mine) for who in names))
