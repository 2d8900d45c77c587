"""For which ratio of prefill to decode nodes storage, and nothing else, is what limits reading.

From the paper (arXiv 2602.21548), section on the range of P/D: with all storage NICs busy, what the
two read paths put on each compute NIC and on DRAM must not be more than these bear. Loads are given
as parts of what there is; a constraint holds while its slack is not negative.

With g GPUs a node, s the node's storage bandwidth over that of a compute NIC (B), M the DRAM
bandwidth of a node, P prefill and D decode nodes, and a pair's share of the PE path Tp = Bs/(D g^2)
and of the DE path Tc = Bs/(P g^2):

=================  ==================  ==============================
resource           load                so that it holds
=================  ==================  ==============================
PE CNIC, reading   2 Tp D g            s <= g/2, whatever P/D
PE CNIC, writing   (Tp + Tc) D g       P/D >= s/(g - s)
DE CNIC, reading   (Tp + 2 Tc) P g     P/D <= (g - 2s)/s
DE CNIC, writing   (2 Tp + Tc) P g     P/D <= (g - s)/(2s)
PE DRAM            2 s B               2 s B <= M, whatever P/D
DE DRAM            (3 + 2 P/D) s B     P/D <= (M/(Bs) - 3)/2
=================  ==================  ==============================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bounds that are met exactly must not fail by a rounding error.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Machine:
    """A node, all alike.

    Args:
        gpus: a node, each with a compute NIC (g).
        storage_bandwidth: of a node's storage NIC or NICs, bytes/s (s x B).
        cnic_bandwidth: of one compute NIC in one direction, bytes/s (B).
        dram_bandwidth: of a node, reading and writing together, bytes/s (M).

    Raises:
        ValueError: a figure that is not positive and finite.
    """

    gpus: int
    storage_bandwidth: float
    cnic_bandwidth: float
    dram_bandwidth: float

    def __post_init__(self) -> None:
        for name in ("gpus", "storage_bandwidth", "cnic_bandwidth", "dram_bandwidth"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of a node must be positive and finite, not {value}")
        if not 0 < self.s < math.inf:
            raise ValueError(
                f"{self.storage_bandwidth} and {self.cnic_bandwidth} cannot be compared"
            )
        if self.gpus != int(self.gpus):
            raise ValueError(f"a node has a whole number of GPUs, not {self.gpus}")

    @property
    def s(self) -> float:
        """Storage bandwidth in compute NICs."""
        return self.storage_bandwidth / self.cnic_bandwidth


@dataclass(frozen=True, slots=True)
class Constraint:
    """What one resource says about P/D.

    Args:
        resource: its name.
        least: of P/D, 0 where it does not bound it from below; infinite: no P/D will do.
        most: of P/D, infinite where it does not bound it from above; less than 0: no P/D will do.
    """

    resource: str
    least: float = 0.0
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Load:
    """How a resource fares with given P and D.

    Args:
        resource: its name.
        used: of what it bears, 1.0 is all.
    """

    resource: str
    used: float

    @property
    def slack(self) -> float:
        """What is left, as a part of what it bears; negative when too much is asked of it."""
        return 1.0 - self.used

    @property
    def holds(self) -> bool:
        """Whether it bears its load."""
        return self.slack >= -_ROUNDING


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of P/D.

    Args:
        least: P/D must not be less.
        most: P/D must not be more; less than ``least`` when no ratio will do.
        binds_below: the resources that set ``least``, alike if several; none: any P/D is large
            enough.
        binds_above: the resources that set ``most``, likewise.
        constraints: all six.
    """

    least: float
    most: float
    binds_below: tuple[str, ...]
    binds_above: tuple[str, ...]
    constraints: tuple[Constraint, ...]

    @property
    def possible(self) -> bool:
        """Whether any ratio will do."""
        return self.least < math.inf and self.most > 0 and self.least <= self.most + _ROUNDING


def bounds(machine: Machine) -> Bounds:
    """The range of P/D for such nodes, and what sets it."""
    g, s = machine.gpus, machine.s
    dram = machine.dram_bandwidth / machine.storage_bandwidth
    constraints = (
        _fixed("PE CNIC read", 2 * s / g),
        Constraint("PE CNIC write", least=s / (g - s) if s < g else math.inf),
        Constraint("DE CNIC read", most=(g - 2 * s) / s),
        Constraint("DE CNIC write", most=(g - s) / (2 * s)),
        _fixed("PE DRAM", 2 / dram),
        Constraint("DE DRAM", most=(dram - 3) / 2),
    )
    least, most = max(c.least for c in constraints), min(c.most for c in constraints)
    return Bounds(
        least,
        most,
        tuple(c.resource for c in constraints if c.least > 0 and _same(c.least, least)),
        tuple(c.resource for c in constraints if c.most < math.inf and _same(c.most, most)),
        constraints,
    )


def loads(machine: Machine, prefill_nodes: int, decode_nodes: int) -> tuple[Load, ...]:
    """What all six resources bear with so many nodes, all storage NICs being busy.

    Raises:
        ValueError: not at least one node of each kind.
    """
    if not (prefill_nodes >= 1 and decode_nodes >= 1):
        raise ValueError(
            "at least one prefill and one decode node are needed, "
            f"not {prefill_nodes} and {decode_nodes}"
        )
    g, s, ratio = machine.gpus, machine.s, prefill_nodes / decode_nodes
    dram = machine.dram_bandwidth / machine.storage_bandwidth
    return (
        Load("PE CNIC read", 2 * s / g),
        Load("PE CNIC write", s / g * (1 + 1 / ratio)),
        Load("DE CNIC read", s / g * (ratio + 2)),
        Load("DE CNIC write", s / g * (2 * ratio + 1)),
        Load("PE DRAM", 2 / dram),
        Load("DE DRAM", (3 + 2 * ratio) / dram),
    )


def failing(machine: Machine, prefill_nodes: int, decode_nodes: int) -> list[str]:
    """The resources that would be the limit in place of storage; none when P and D are well chosen.

    Raises:
        ValueError: not at least one node of each kind.
    """
    return [load.resource for load in loads(machine, prefill_nodes, decode_nodes) if not load.holds]


def _fixed(resource: str, used: float) -> Constraint:
    """One that P/D does not change: it holds for all ratios or for none."""
    return Constraint(resource) if Load(resource, used).holds else Constraint(resource, math.inf)


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_ROUNDING)
