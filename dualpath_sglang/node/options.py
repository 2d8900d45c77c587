"""What the agent of a machine needs to know beside the store's options."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from dualpath_sglang.node.listen import ListenSpec


class NodeError(Exception):
    """The agent cannot be as asked; the message is one plain sentence for the operator."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How the agent of a machine is, and where its processes meet.

    Args:
        store: what identifies the store for this machine: its root and its index.
        index_address: host and port of the index, or of the first to ask.
        automatic: whether a server starts an agent when none runs.
        directory: where the machine's processes meet; None for the user's own.
        name: of the machine, in reports.
        listen: where the agent listens.
        secret: that all nodes know; empty for the one that they share over the index.
        memory_bytes: most memory for blocks.
        dscp: traffic class of KV.
        tls_cert, tls_key, tls_ca: all or none.
    """

    store: str
    index_address: tuple[str, int] = ("127.0.0.1", 6379)
    automatic: bool = False
    directory: Path | None = None
    name: str = field(default_factory=socket.gethostname)
    listen: ListenSpec = field(default_factory=ListenSpec)
    secret: bytes = field(default=b"", repr=False)
    memory_bytes: int = 4 << 30
    dscp: int = 8
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    @property
    def base(self) -> Path:
        """The directory of this machine and user."""
        if self.directory is not None:
            return self.directory.expanduser().absolute()
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if runtime and Path(runtime).is_dir():
            return Path(runtime) / "dualpath"
        return Path(f"/tmp/dualpath-{os.getuid()}")

    def server_tls(self) -> ssl.SSLContext | None:
        """For who listens: it asks every caller for a certificate of the same authority.

        Raises:
            NodeError: a file cannot be used.
        """
        return self._tls(ssl.PROTOCOL_TLS_SERVER)

    def client_tls(self) -> ssl.SSLContext | None:
        """For who calls: the certificate must name the address that is called.

        Raises:
            NodeError: a file cannot be used.
        """
        return self._tls(ssl.PROTOCOL_TLS_CLIENT)

    def _tls(self, side: int) -> ssl.SSLContext | None:
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.tls_ca.expanduser())
            context.load_cert_chain(self.tls_cert.expanduser(), self.tls_key.expanduser())
        except (OSError, ssl.SSLError) as error:
            raise NodeError(
                f"The files of node_tls_cert, node_tls_key and node_tls_ca cannot be used: {error}"
            ) from None
        return context
