"""The name of a store, by which several can share a Redis."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from dualpath_sglang.index.base import IndexUnavailableError

STORE_ID_FILE = "store-id"


def store_id(root: Path, *, create: bool = True) -> str:
    """16 hex digits that name the store at ``root``, the same for everybody who has it mounted.

    Args:
        create: make the name when there is none.

    Raises:
        IndexUnavailableError: there is none, it cannot be read or made, or it is no such name.
    """
    path = root / STORE_ID_FILE
    try:
        if create and not path.exists():
            _create(path)
        text = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise IndexUnavailableError(f"{path} cannot be used: {error}") from error
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise IndexUnavailableError(f"{path} does not hold the name of a store")
    return text


def _create(path: Path) -> None:
    """Whole or not at all, and never over another: the first of several nodes decides."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(8) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
