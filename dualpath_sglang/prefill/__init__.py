"""Prefill admission by compute quota: the profile of a model's attention, and what it is for."""

from __future__ import annotations
