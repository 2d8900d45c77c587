"""What is done to the cluster while it serves. Each is injected, lasts a while, and is repaired."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.cluster import RATE, Cluster
from tests.chaos.spec import Mode

LASTS_S = 5.0

Do = Callable[[Cluster], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind.

    Args:
        do: injects it, waits, and repairs it; returns when all is as it was.
        shows: what of the prefill process's counts grows, one of them at least: a fault that does
            nothing proves nothing. Of some nothing may be seen.
        may: how loads may end beside ``ok``.
        proxied: whether it needs somebody between the hosts.
        modes: in which hits are loaded.
    """

    do: Do
    shows: tuple[str, ...] = ()
    may: frozenset[str] = frozenset()
    proxied: bool = False
    modes: tuple[Mode, ...] = ("streaming",)

    @property
    def name(self) -> str:
        """For people."""
        return self.do.__name__.replace("_", " ")


def agent_killed(cluster: Cluster) -> None:
    """In the middle of what it sends; started anew two seconds later."""
    host = cluster.decode[0]
    assert host.agent is not None
    host.agent.kill()
    time.sleep(2.0)
    host.start()


def agent_stopped(cluster: Cluster) -> None:
    """Its connections stand, and nothing comes."""
    agent = cluster.decode[0].agent
    assert agent is not None
    agent.send(signal.SIGSTOP)
    time.sleep(LASTS_S)
    agent.send(signal.SIGCONT)


def agent_restarted(cluster: Cluster) -> None:
    """In order: it lets fetches end."""
    host = cluster.decode[0]
    assert host.agent is not None
    host.agent.send(signal.SIGTERM)
    assert host.agent.process.wait(30.0) == 0
    host.start()


def both_agents_killed(cluster: Cluster) -> None:
    """At once."""
    for host in cluster.decode:
        assert host.agent is not None
        host.agent.kill()
    time.sleep(2.0)
    for host in cluster.decode:
        host.start()


def other_agent_killed_while_one_restarts(cluster: Cluster) -> None:
    """A second fault before the first is over."""
    one, other = cluster.decode
    assert one.agent is not None
    assert other.agent is not None
    one.agent.kill()
    time.sleep(1.0)
    one.begin()
    other.agent.kill()
    one.await_start()
    other.start()


def link_down(cluster: Cluster) -> None:
    """Nothing passes, and nobody is told."""
    cluster.decode[0].link_down()
    time.sleep(LASTS_S)
    cluster.decode[0].link_up()


def link_at_one_percent(cluster: Cluster) -> None:
    """It carries a hundredth of what it did."""
    cluster.decode[0].set_rate("4mbit")
    time.sleep(LASTS_S)
    cluster.decode[0].set_rate(RATE)


def bits_flipped(cluster: Cluster) -> None:
    """Somewhere on the way, in any part of any frame, about one in 2 MiB."""
    proxy = cluster.decode[0].use_proxy(True)
    assert proxy is not None
    proxy.tell(flip_every=2 << 20)
    time.sleep(LASTS_S)
    proxy.tell()


def stops_in_the_middle_of_a_layer(cluster: Cluster) -> None:
    """On each connection, also on new ones: 100 KiB more, and then nothing."""
    proxy = cluster.decode[0].use_proxy(True)
    assert proxy is not None
    proxy.tell(stop_after=100 << 10)
    time.sleep(LASTS_S)
    proxy.tell()


def garbage_answered(cluster: Cluster) -> None:
    """By something that knows the secret and stands where the agent stood."""
    host = cluster.decode[0]
    assert host.agent is not None
    host.agent.kill()
    garbage = host.pose()
    time.sleep(LASTS_S)
    garbage.kill()
    host.start()


def clocks_jump_an_hour(cluster: Cluster) -> None:
    """That of an agent ahead, that of the prefill host back; and then to the right time again."""
    cluster.clock("d0", 3600.0)
    cluster.clock("p0", -3600.0)
    time.sleep(LASTS_S)
    cluster.clock("d0", 0.0)
    cluster.clock("p0", 0.0)


def clocks_apart_from_the_start(cluster: Cluster) -> None:
    """Agents that are started an hour early and an hour late, which is never repaired."""
    for host, wrong_by_s in zip(cluster.decode, (-3600.0, 3600.0), strict=True):
        cluster.clock(host.name, wrong_by_s)
        assert host.agent is not None
        host.agent.kill()
        host.start()


def redis_stopped(cluster: Cluster) -> None:
    """Its connections stand, and it does not answer."""
    cluster.redis.send(signal.SIGSTOP)
    time.sleep(LASTS_S)
    cluster.redis.send(signal.SIGCONT)


def redis_killed(cluster: Cluster) -> None:
    """And it comes back with nothing in it."""
    cluster.redis.kill()
    time.sleep(LASTS_S)
    cluster.start_redis()


def own_store_hangs(cluster: Cluster) -> None:
    """Of the prefill host, for two seconds."""
    cluster.hang_store(2.0)
    time.sleep(2.0)


_BOTH: tuple[Mode, ...] = ("streaming", "host")
_UNKNOWN = frozenset({"not_found", "miss"})
"""Without an index nobody knows where blocks are: there is nothing to load."""

_BROKEN, _LATE = ("lost",), ("late",)

FAULTS = (
    Fault(agent_killed, _BROKEN, modes=_BOTH),
    Fault(agent_stopped, _LATE, modes=_BOTH),
    Fault(agent_restarted),
    Fault(both_agents_killed, _BROKEN),
    Fault(other_agent_killed_while_one_restarts, _BROKEN),
    Fault(link_down, _LATE, modes=_BOTH),
    Fault(link_at_one_percent, _LATE),
    Fault(garbage_answered, ("bad", "failed"), modes=_BOTH),
    Fault(clocks_jump_an_hour),
    Fault(redis_stopped, may=_UNKNOWN),
    Fault(redis_killed, may=_UNKNOWN),
    Fault(own_store_hangs, modes=_BOTH),
    Fault(bits_flipped, ("bad", "lost"), proxied=True, modes=_BOTH),
    Fault(stops_in_the_middle_of_a_layer, _LATE, proxied=True, modes=_BOTH),
    Fault(clocks_apart_from_the_start, _BROKEN),
)
"""The last one leaves the agents with wrong clocks, which nobody may notice."""
