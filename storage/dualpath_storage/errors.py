"""The one exception family of the store. Reads and writes of blocks never raise it."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot be opened or used as asked; the message is a plain sentence."""
