"""Settings that keep KV traffic out of the way of model traffic: pure functions that print them."""

from __future__ import annotations
