"""A cluster of network namespaces on one machine, driven by the real cache, agents and transport.

``python -m bench.cluster --json FILE``, as root. A storage host, P prefill hosts and D decode
hosts; every P and D host has a shaped storage NIC and a compute NIC of 8 times its rate. Segment
data goes over the storage network, Layer Blocks between hosts over the compute network, the index
and what the driver says over a third one that is not shaped. Only the engine is a stand-in: it
computes nothing, but occupies each layer for the time that a model of it says.
"""

from __future__ import annotations
