"""The paper's algorithms (arXiv 2602.21548) as pure functions: no I/O, no clock, no other module.

What they decide depends on their arguments alone, so a server and a simulator decide alike.
"""

from __future__ import annotations
