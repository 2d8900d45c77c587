"""Helpers for tests, the demo and the benches: tiny models, real servers, faults."""

from __future__ import annotations
