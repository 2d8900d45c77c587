"""Whether the lanes of a device are as :func:`dualpath_sglang.qos.tc.script` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dualpath_sglang.qos.rates import DEFAULT_DSCP, Share, rate_text
from dualpath_sglang.qos.read import DeviceState, Filter, HtbClass
from dualpath_sglang.qos.tc import Lanes

_NEAR = 0.005
"""tc rounds what it prints, and the kernel what it is told."""
_PROTOCOLS = (("ip", "IPv4", 16), ("ipv6", "IPv6", 20))
"""Of the filters: as tc calls them, as people do, and bits right of the traffic class."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer.

    Args:
        ok: whether it is as it should be.
        text: a sentence.
    """

    ok: bool
    text: str


def findings(
    device: str,
    state: DeviceState,
    bit_s: int | None = None,
    dscp: int = DEFAULT_DSCP,
    share: Share | None = None,
) -> list[Finding]:
    """What is as it should be on a device, and what is not.

    Args:
        bit_s: rate of the link; None: whatever the device is shaped to.

    Raises:
        ValueError: an argument makes no sense.
    """
    Lanes(device, bit_s or 10**9, dscp)  # the arguments are looked at, whatever the device does
    return list(_findings(device, state, bit_s, dscp, share or Share()))


def _findings(
    device: str, state: DeviceState, bit_s: int | None, dscp: int, share: Share
) -> Iterator[Finding]:
    if state.root != "htb":
        yield Finding(False, f"The root of {device} is {state.root or 'nothing'}, not htb")
        return
    yield Finding(True, f"The root of {device} is htb")
    kv_name = None
    for protocol, name, shift in _PROTOCOLS:
        at = _class_of(state.filters, protocol, shift, dscp)
        kv_name = kv_name or at
        text = f"{name} packets with DSCP {dscp}"
        yield (
            Finding(True, f"{text} go to class {at}")
            if at
            else Finding(False, f"{text} are matched by no filter")
        )
        if at and at != kv_name:
            yield Finding(False, f"IPv4 and IPv6 go to different classes, {kv_name} and {at}")
    others = [f for f in state.filters if not _is_ours(f, dscp)]
    if others:
        yield Finding(False, f"Other filters ({len(others)}) may take packets elsewhere")
    model = state.classes.get(state.default or "")
    if model is None:
        yield Finding(False, "Packets without a mark go to no class, so they are not shaped at all")
    if kv_name is None or model is None:
        return
    kv = state.classes.get(kv_name)
    if kv is None:
        yield Finding(False, f"There is no class {kv_name}")
        return
    if kv.classid == model.classid:
        yield Finding(False, f"KV and the model share the class {kv_name}")
        return
    yield Finding(True, f"Everything else goes to class {model.classid}, the model's")
    yield from _judge_classes(device, state, bit_s, share, model, kv)


def _judge_classes(
    device: str,
    state: DeviceState,
    bit_s: int | None,
    share: Share,
    model: HtbClass,
    kv: HtbClass,
) -> Iterator[Finding]:
    root = state.classes.get(kv.parent or "")
    if root is None or root.parent is not None or model.parent != kv.parent:
        yield Finding(False, "The two classes have no parent in common, so neither can borrow")
        return
    link = bit_s or root.ceil
    yield _equal(
        "The link is shaped to {}", max((root.rate, root.ceil), key=lambda r: abs(r - link)), link
    )
    for name, one in (("The model alone", model), ("KV alone", kv)):
        yield _equal(f"{name} may take {{}}", one.ceil, link)
    kv_share, sure = share.kv / (share.model + share.kv), kv.rate / max(1, model.rate + kv.rate)
    ok = abs(sure - kv_share) <= _NEAR * kv_share
    rates = f"{rate_text(model.rate)} and {rate_text(kv.rate)}"
    yield Finding(ok, f"Model and KV are sure of {rates}{'' if ok else f', which is not {share}'}")
    ok = model.prio < kv.prio
    yield Finding(ok, f"The model is {'' if ok else 'not '}served before KV")
    want = Lanes(device, link, share=share, mtu=max(576, state.mtu))
    for text, has, most in (
        ("KV sends {} bytes in a turn", kv.quantum, want.turn_bytes),
        ("KV sends {} bytes at once", max(kv.burst, kv.cburst), want.kv_burst_bytes),
        ("The kernel makes one packet of {}", state.gso_max_segs, want.segments),
        ("Of KV {} bytes may wait on the device", _limit(state, kv), want.kv_queue_bytes),
    ):
        yield _at_most(text, has, most)


def _class_of(filters: list[Filter], protocol: str, shift: int, dscp: int) -> str | None:
    """Where a filter sends packets with a code point."""
    for each in filters:
        if each.protocol == protocol and _matches(each, shift, dscp):
            return each.classid
    return None


def _matches(each: Filter, shift: int, dscp: int) -> bool:
    return each.understood and each.matches == ((0, dscp << (shift + 2), 0x3F << (shift + 2)),)


def _is_ours(each: Filter, dscp: int) -> bool:
    return any(each.protocol == name and _matches(each, at, dscp) for name, _, at in _PROTOCOLS)


def _limit(state: DeviceState, kv: HtbClass) -> int | None:
    """Bytes that may wait in the class; None when nothing bounds them."""
    kind, limit = state.leaves.get(kv.classid, ("pfifo", None))
    if limit is None or kind not in ("pfifo", "bfifo"):
        return None
    return limit if kind == "bfifo" else limit * state.mtu * max(1, state.gso_max_segs)


def _equal(text: str, has: int, wanted: int) -> Finding:
    if abs(has - wanted) <= _NEAR * wanted:
        return Finding(True, text.format(rate_text(wanted)))
    return Finding(False, f"{text.format(rate_text(has))}: not {rate_text(wanted)}")


def _at_most(text: str, has: int | None, most: int) -> Finding:
    if has is None or has < 1:
        return Finding(False, f"{text.format('any number of')}: there is no limit such as {most}")
    if has > most * (1 + _NEAR):
        return Finding(False, f"{text.format(has)}: more than {most}")
    return Finding(True, text.format(has))
