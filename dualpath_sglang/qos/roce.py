"""Two lanes on RoCE: code points to traffic classes, their weights, and which are lossless."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath_sglang.qos.rates import DEFAULT_DSCP, Share, check_dscp
from dualpath_sglang.qos.tc import check_device

KV_CLASS = 2
MODEL_CLASSES = (0, 1, 3)
_LOSSLESS = 4
_CLASSES = 8


def weights(share: Share) -> list[int]:
    """Percent of the link for each of the four classes in use; their sum is 100."""
    kv = max(1, round(100 * share.kv / (share.model + share.kv)))
    each, left = divmod(100 - kv, len(MODEL_CLASSES))
    percent = dict.fromkeys(MODEL_CLASSES, each) | {KV_CLASS: kv}
    for number in MODEL_CLASSES[:left]:
        percent[number] += 1
    return [percent[number] for number in range(_LOSSLESS)]


def priorities(dscp: int) -> dict[int, int]:
    """Code points that do not go where they would by default (their upper three bits)."""
    moved = dict.fromkeys(range(KV_CLASS << 3, KV_CLASS + 1 << 3), 0)  # else with KV
    return {**moved, dscp: KV_CLASS}


def script(device: str, dscp: int = DEFAULT_DSCP, share: Share | None = None) -> str:
    """A shell script that sets a NIC up, with comments for a reviewer.

    Raises:
        ValueError: an argument makes no sense.
    """
    check_device(device)
    share, moved = share or Share(), priorities(check_dscp(dscp))
    unused = _CLASSES - _LOSSLESS
    percent = weights(share)
    # Priorities above the four in use go with the model.
    classes = [*range(_LOSSLESS), *[0] * unused]
    lossless = [1] * _LOSSLESS + [0] * unused
    tsa = ["ets"] * _LOSSLESS + ["strict"] * unused
    others = " ".join(str(d) for d in moved if d != dscp)
    return f"""\
#!/bin/sh
# Traffic classes on {device} for RoCE: KV is what carries DSCP {dscp} and goes to class
# {KV_CLASS}, all else to classes 0, 1 and 3. Weights {share}; either takes the whole link while the
# other is idle.
#
# For each NIC that KV or the model uses, as root. Switches need the same: this mapping of code
# points, priority flow control on priorities 0 to 3, and these weights.
# Look at it:  mlnx_qos -i {device};  ethtool -S {device} | grep prio{KV_CLASS}
# Undo:        mlnx_qos -i {device} --trust pcp --pfc {_list([0] * _CLASSES)} \\
#                  --tsa {_list(["vendor"] * _CLASSES)}
#         or:  dcb app flush dev {device} dscp-prio; dcb pfc set dev {device} prio-pfc all:off
#              dcb ets set dev {device} tc-tsa all:strict
set -eu

if command -v mlnx_qos > /dev/null; then
    mlnx_qos -i {device} --trust dscp
    mlnx_qos -i {device} --prio_tc {_list(classes)} --tsa {_list(tsa)} \\
        --tcbw {_list([*percent, *[0] * unused])}
    mlnx_qos -i {device} --pfc {_list(lossless)}
    # By default these code points would share KV's class.
    for dscp in {others}; do
        mlnx_qos -i {device} --dscp2prio set,$dscp,0
    done
    mlnx_qos -i {device} --dscp2prio set,{dscp},{KV_CLASS}
else
    dcb ets set dev {device} willing off prio-tc {_map(classes)} \\
        tc-tsa {_map(tsa)} \\
        tc-bw {_map([*percent, *[0] * unused])}
    dcb pfc set dev {device} prio-pfc {_map(["on" if on else "off" for on in lossless])}
    for dscp in {others}; do
        dcb app replace dev {device} dscp-prio $dscp:0
    done
    dcb app replace dev {device} dscp-prio {dscp}:{KV_CLASS}
fi

# Queue pairs of KV must carry the mark, traffic class {dscp << 2} (DSCP {dscp} << 2). TCP's do.
"""


def _list(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def _map(values: Sequence[object]) -> str:
    return " ".join(f"{number}:{value}" for number, value in enumerate(values))
