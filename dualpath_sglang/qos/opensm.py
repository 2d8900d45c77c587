"""Two lanes on InfiniBand: virtual lanes and their arbitration, as opensm sets them up.

With its defaults these are the settings of DualPath (arXiv 2602.21548): the model's traffic is on
virtual lanes 0, 1 and 3, KV on 2, which has no place among those of high priority.
"""

from __future__ import annotations

from dualpath_sglang.qos.rates import Share

KV_SL = KV_VL = 2
HIGH = "0:192,1:192,2:0,3:192"
LOW = "0:192,1:192,2:64,3:192"
# Service levels that nobody should use are the model's, lest they slow it or are lost.
SL2VL = ",".join(str(sl if sl < 4 else 0) for sl in range(16))
_HIGH_LIMIT = 240
_DEFAULT = Share()


def high_limit(share: Share) -> int:
    """Units of 4 KiB of high priority between two turns of low priority: 240 for 99:1."""
    of_default = (share.model / share.kv) / (_DEFAULT.model / _DEFAULT.kv)
    # 255 would mean that low priority never gets a turn.
    return min(254, max(1, round(_HIGH_LIMIT * of_default)))


def settings(share: Share) -> dict[str, str]:
    """Lines of ``opensm.conf``."""
    return {
        "qos": "TRUE",
        "qos_max_vls": "4",
        "qos_high_limit": str(high_limit(share)),
        "qos_vlarb_high": HIGH,
        "qos_vlarb_low": LOW,
        "qos_sl2vl": SL2VL,
    }


def script(share: Share) -> str:
    """A shell script that puts the settings into opensm's file, with comments for a reviewer."""
    lines = "\n".join(f"{name} {value}" for name, value in settings(share).items())
    return f"""\
#!/bin/sh
# Virtual lanes for an InfiniBand fabric: KV on service level {KV_SL} and virtual lane {KV_VL}, the
# model on the others. KV is sent while no other lane has anything, and else once in
# {high_limit(share)} x 4 KiB of the model's.
#
# As root, where the subnet manager runs and where its standbys do; it is for all links.
# Look at it:  smpquery vlarb LID PORT;  smpquery sl2vl LID
# Undo:        cp -p "$CONF.before-dualpath" "$CONF", and restart opensm
set -eu
CONF=${{CONF:-/etc/opensm/opensm.conf}}
RESTART=${{RESTART:-systemctl restart opensm}}

# The file as it was is kept. Settings for one kind of port would win over those for all: they go.
[ -e "$CONF.before-dualpath" ] || cp -p "$CONF" "$CONF.before-dualpath"
names='max_vls|high_limit|vlarb_high|vlarb_low|sl2vl'
sed -i -E "/^[[:space:]]*qos(_((ca|rtr|sw0|swe)_)?($names))?[[:space:]]/d" "$CONF"
cat >> "$CONF" <<'END'
{lines}
END
$RESTART

# Then KV must use service level {KV_SL}. Queue pairs of verbs set it themselves (ah_attr.sl).
# TCP over IPoIB takes it from its partition: give KV one of its own in partitions.conf, and the
# nodes its addresses for KV:
#     KV=0x8010, ipoib, sl={KV_SL} : ALL=full;
"""
