"""Layer Blocks of prefix hits, read first layers first and announced layer by layer.

Knows no inference engine. Every byte is read into staging memory of a fixed size, checked there,
and only then put into the pages, by one thread: so an I/O that is late, or never comes back, can
be given up at its deadline and can still not touch pages that are somebody else's by then.
"""

from __future__ import annotations
