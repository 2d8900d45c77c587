"""An authority of a test's own, and certificates by it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def authority(folder: Path, name: str = "ca") -> Path:
    """Its certificate; the key stands beside it as ``.key``."""
    certificate = folder / f"{name}.crt"
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-keyout", str(folder / f"{name}.key")),
        *("-out", str(certificate)),
    )
    return certificate


def certificate(ca: Path, name: str, address: str) -> tuple[Path, Path]:
    """Certificate and key for an IP address."""
    folder = ca.parent
    request, key, out = (folder / f"{name}.{end}" for end in ("csr", "key", "crt"))
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=IP:{address}\n")
    _openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-days", "2", "-in", str(request), "-CA", str(ca)),
        *("-CAkey", str(ca.with_suffix(".key")), "-CAcreateserial"),
        *("-extfile", str(extensions), "-out", str(out)),
    )
    return out, key
