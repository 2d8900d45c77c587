"""What stands where under a store's root: ``<geometry id>/geometry.json`` and its segment files."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from dualpath_storage.errors import StoreError
from dualpath_storage.geometry import Geometry

logger = logging.getLogger(__name__)

SEGMENT_PREFIX = "seg-"
GEOMETRY_FILE = "geometry.json"


def geometries(root: Path) -> list[Geometry]:
    """Every geometry under a root. One that cannot be read is left out, with a warning."""
    found = []
    for directory in geometry_directories(root):
        try:
            geometry = Geometry.from_json((directory / GEOMETRY_FILE).read_text())
        except (OSError, ValueError, StoreError) as error:  # ValueError: not even text
            logger.warning("%s is left out: %s", directory, error)
            continue
        if geometry.id == directory.name:
            found.append(geometry)
        else:
            logger.warning("%s is left out: its geometry belongs to another place", directory)
    return found


def geometry_directories(root: Path) -> list[Path]:
    """The directories of a root that hold a geometry."""
    return [path.parent for path in _glob(root, f"*/{GEOMETRY_FILE}")]


def every_segment(root: Path) -> list[Path]:
    """The segment files of all geometries, also of those that nobody can read."""
    return _glob(root, f"*/{SEGMENT_PREFIX}*")


def segment_paths(directory: Path) -> list[Path]:
    """The segment files of a geometry's directory."""
    return _glob(directory, f"{SEGMENT_PREFIX}*")


def _glob(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:  # removed meanwhile
        return []


def segment_path(directory: Path, number: int) -> Path:
    """Where segment ``number`` lies."""
    return directory / f"{SEGMENT_PREFIX}{number:08x}"


def segment_number(path: Path) -> int | None:
    """The number in a segment's name, or None when it is no such name."""
    try:
        number = int(path.name.removeprefix(SEGMENT_PREFIX), 16)
    except ValueError:
        return None
    return number if path.name == f"{SEGMENT_PREFIX}{number:08x}" else None


def on_read_only_mount(path: Path) -> bool:
    """Whether a place, or where it would be made, cannot be written for good."""
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is None:
        return False
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return True
    try:  # after an error of its device, a mount may only refuse to write
        os.close(os.open(existing, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EROFS
    return False
