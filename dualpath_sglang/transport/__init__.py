"""Moving Layer Blocks from one node's memory to another's: the interface (:mod:`.base`), and TCP.

Arrows point down: what is moved is decided elsewhere.
"""
