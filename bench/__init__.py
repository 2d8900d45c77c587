"""Benchmarks. Each takes ``--json FILE`` and writes a list of row objects."""

from __future__ import annotations
