"""Two lanes on a Linux device: HTB classes, told apart by the code point of IPv4 and IPv6.

The model's class is sure of nearly the whole link and is served first; KV borrows what is left, up
to all of it. What can hold a packet of the model up is then what KV has already handed to the
device: one packet, if packets and bursts are small.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dualpath_sglang.qos.rates import DEFAULT_DSCP, Share, check_dscp, rate_text

ROOT, MODEL, KV = "1:1", "1:10", "1:20"
_ETHERNET_BYTES = 18
"""Addresses, type and a VLAN tag."""
_SUPER_S = 10e-6
"""A super-packet of KV holds the link no longer than this, or than one packet."""
_KV_BURST_S = 20e-6
_MODEL_BURST_S = 1e-3
_MODEL_BURST_PACKETS = 16
_QUEUE_S = 1e-3
_KV_PACKETS, _MODEL_PACKETS = 64, 1000
_MOST_SEGMENTS = 64
_MODEL_TURN = 20_000
_SLOW_BIT_S = 40 * 10**9


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ``tc`` is told about one device, and what it is checked against.

    Args:
        device: name of the network device.
        bit_s: rate of the link.
        dscp: code point of KV.
        share: weights of the lanes.
        mtu: bytes of the device's largest packet.

    Raises:
        ValueError: one of them makes no sense; the message is a sentence.
    """

    device: str
    bit_s: int
    dscp: int = DEFAULT_DSCP
    share: Share = field(default_factory=Share)
    mtu: int = 1500

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dscp(self.dscp)
        if not 576 <= self.mtu <= 65535:
            raise ValueError(f"An MTU lies in 576..65535, unlike {self.mtu}")

    @property
    def kv_bit_s(self) -> int:
        """What KV is sure of."""
        return self.share.kv_bit_s(self.bit_s)

    @property
    def model_bit_s(self) -> int:
        """What the model is sure of."""
        return self.bit_s - self.kv_bit_s

    @property
    def packet_bytes(self) -> int:
        """Of the largest packet, on the wire."""
        return self.mtu + _ETHERNET_BYTES

    @property
    def segments(self) -> int:
        """Packets that the kernel may hand over as one (GSO, TSO)."""
        return min(max(1, self._bytes(_SUPER_S) // self.packet_bytes), _MOST_SEGMENTS)

    @property
    def turn_bytes(self) -> int:
        """What KV sends in a turn: one such."""
        return self.segments * self.packet_bytes

    @property
    def kv_burst_bytes(self) -> int:
        """What KV may send at once, when timers were late."""
        return max(2 * self.turn_bytes, self._bytes(_KV_BURST_S))

    @property
    def model_burst_bytes(self) -> int:
        """The same for the model: much more, or late timers would cost it of its share."""
        return max(_MODEL_BURST_PACKETS * self.packet_bytes, self._bytes(_MODEL_BURST_S))

    @property
    def kv_queue_bytes(self) -> int:
        """What may wait in KV's lane."""
        return max(_KV_PACKETS * self.packet_bytes, self._bytes(_QUEUE_S))

    @property
    def model_queue_bytes(self) -> int:
        """What may wait in the model's lane."""
        return max(_MODEL_PACKETS * self.packet_bytes, self._bytes(_QUEUE_S))

    def _bytes(self, seconds: float) -> int:
        """That the link carries in that time."""
        return int(self.bit_s * seconds / 8)


def check_device(name: str) -> str:
    """The name, if a network device can have it.

    Raises:
        ValueError: none can.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,14}", name) is None:
        raise ValueError(f"A network device has a short name such as eth0, unlike {name!r}")
    return name


def script(lanes: Lanes) -> str:
    """A shell script that makes the lanes, with comments for whoever reviews it."""
    device, dscp, share, segments = lanes.device, lanes.dscp, lanes.share, lanes.segments
    rate, model, kv = (rate_text(r) for r in (lanes.bit_s, lanes.model_bit_s, lanes.kv_bit_s))
    burst, kv_burst, turn = lanes.model_burst_bytes, lanes.kv_burst_bytes, lanes.turn_bytes
    mark, at = f"{dscp << 2:#04x} 0xfc", f"dev {device}"
    turn_us = 8e6 * turn / lanes.bit_s
    packets = "one packet" if segments == 1 else f"{segments} packets"
    return f"""\
#!/bin/sh
# Two lanes on {device}, {rate}: model traffic {share.model}, KV {share.kv}, and either takes
# the whole link while the other is idle. KV is what carries DSCP {dscp}; all else is the model's.
#
# For each device that KV leaves by, as root, and for switch ports in the switch's own words. It
# replaces the device's queueing discipline, and lasts until the machine restarts.
# Look at it:  tc -s class show {at}
#              dualpath qos --check --device {device} --rate {rate} --dscp {dscp} --share {share}
# Undo:        tc qdisc del {at} root
#              ip link set {at} gso_max_segs 65535   # or what ip -d link calls tso_max_segs
set -eu

# KV must queue here, where there are lanes, and not in the device behind, where there are none: on
# a real NIC give --rate a little below its speed (95 %), or leave the lanes to the NIC
# (dualpath qos --print roce).{_slow_note(lanes)}

# Without this the kernel hands over up to 64 KiB of one connection as one packet (GSO, TSO), and a
# packet of the model waits for all of it. Now it is {packets}, {turn_us:.3g} us of this link.
ip link set {at} gso_max_segs {segments}

tc qdisc del {at} root 2> /dev/null || true
tc qdisc add {at} root handle 1: htb default {_minor(MODEL)}
tc class add {at} parent 1: classid {ROOT} htb rate {rate} ceil {rate} \\
    burst {kv_burst} cburst {kv_burst} quantum {max(_MODEL_TURN, turn)}

# The model: sure of its share, served first. What it sends at once, KV waits for.
tc class add {at} parent {ROOT} classid {MODEL} htb prio 0 rate {model} ceil {rate} \\
    burst {burst} cburst {burst} quantum {max(_MODEL_TURN, turn)}
tc qdisc add {at} parent {MODEL} handle {_minor(MODEL)}: bfifo limit {lanes.model_queue_bytes}

# KV: takes what is left, little at a time, and little waits below the sockets.
tc class add {at} parent {ROOT} classid {KV} htb prio 1 rate {kv} ceil {rate} \\
    burst {kv_burst} cburst {kv_burst} quantum {turn}
tc qdisc add {at} parent {KV} handle {_minor(KV)}: bfifo limit {lanes.kv_queue_bytes}

# DSCP {dscp} is {dscp << 2:#04x} in the traffic class, whose two lowest bits (ECN) do not count.
tc filter add {at} parent 1: protocol ip prio 1 u32 match ip dsfield {mark} flowid {KV}
tc filter add {at} parent 1: protocol ipv6 prio 2 u32 match ip6 priority {mark} flowid {KV}
"""


def _minor(classid: str) -> str:
    return classid.partition(":")[2]


def _slow_note(lanes: Lanes) -> str:
    if lanes.bit_s <= _SLOW_BIT_S:
        return ""
    return """
# So fast a link costs the kernel's shaper cores, and it may not keep up: prefer the NIC's."""
