"""Rates of links, weights of lanes and code points: from text, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_DSCP = 8
"""Class selector 1, "scavenger": what KV traffic is marked with unless told otherwise."""

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_LEAST_BIT_S = 10**6
_MOST_BIT_S = 10**13
_MOST_WEIGHT = 255


def parse_rate(text: str) -> int:
    """Bits a second of a text such as ``400gbit`` or ``2.5gbit``.

    Raises:
        ValueError: it is not a rate of a link; the message is a sentence.
    """
    match = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{1,12}))?([a-z]+)", text.strip().lower())
    if match is None or match.group(3) not in _UNITS:
        raise ValueError(f'A rate is a number and a unit, such as "400gbit", unlike {text!r}')
    whole, part, unit = match.group(1), match.group(2) or "", _UNITS[match.group(3)]
    scale: int = 10 ** len(part)
    bit_s, left = divmod(int(whole + part) * unit, scale)
    if left or not _LEAST_BIT_S <= bit_s <= _MOST_BIT_S:
        raise ValueError(f"A link has 1mbit to 10tbit, in whole bits, unlike {text!r}")
    return bit_s


def rate_text(bit_s: int) -> str:
    """A rate in the largest unit in which it is a whole number."""
    unit = max((name for name in _UNITS if bit_s % _UNITS[name] == 0), key=_UNITS.__getitem__)
    return f"{bit_s // _UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Share:
    """How a busy link is divided.

    Args:
        model, kv: weights, 1 to 255 each. Either takes the whole link while the other is idle.
    """

    model: int = 99
    kv: int = 1

    def __str__(self) -> str:
        return f"{self.model}:{self.kv}"

    def kv_bit_s(self, bit_s: int) -> int:
        """What KV is sure of on a link of that rate, at least 1 kbit/s."""
        return max(1000, bit_s * self.kv // (self.model + self.kv))


def parse_share(text: str) -> Share:
    """Weights of model and KV traffic from a text such as ``99:1``.

    Raises:
        ValueError: there are not two weights, or KV would get more than the model.
    """
    match = re.fullmatch(r"([0-9]{1,3}):([0-9]{1,3})", text.strip())
    if match is None:
        raise ValueError(f'A share is MODEL:KV in whole numbers, such as "99:1", unlike {text!r}')
    share = Share(int(match.group(1)), int(match.group(2)))
    if not (1 <= share.model <= _MOST_WEIGHT and 1 <= share.kv <= _MOST_WEIGHT):
        raise ValueError(f"Weights lie in 1..{_MOST_WEIGHT}, unlike {text!r}")
    if share.kv > share.model:
        raise ValueError(f"The share {text!r} would put the model's traffic behind KV")
    return share


def check_dscp(dscp: int) -> int:
    """The code point, if KV can be told by it.

    Raises:
        ValueError: there is no such code point, or unmarked packets carry it.
    """
    if not 0 <= dscp <= 63:
        raise ValueError(f"A code point lies in 1..63, unlike {dscp}")
    if dscp == 0:
        raise ValueError("Code point 0 is on every packet that nobody marks, so KV needs another")
    return dscp
