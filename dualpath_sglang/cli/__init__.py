"""The command ``dualpath``: look at a store, check it, mend it, empty it."""

from __future__ import annotations

from dualpath_sglang.cli.app import app

__all__ = ["app"]
