"""Sessions go on through two routers over two prefill and two decode servers while a part of it
dies or hangs: no wrong token, every request answered or refused soon, and nothing left behind."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.pd_load import Asked, Load, expected
from tests.support.pd import Engine, PdCluster
from tests.support.pd_router import RouterProcess, routers
from tests.support.server import Server
from tests.support.stores import replace_blocks
from tests.support.streaming import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LASTS_S = 6.0
"""Longer than a router waits for a silent server."""
ERROR_S = 10.0
"""A request that fails does so within this."""
LATE_S = 5.0
"""What a busy machine adds."""
LONGEST_S = 45.0
"""No request takes longer: nobody waits for SGLang's 300 s."""
SENTENCES = (
    "prefill server cannot be reached",
    "decode server cannot be reached",
    "connection to the prefill server was lost",
    "connection to the decode server was lost",
    "prefill server is dead",
    "decode server is dead",
    "prefill server gave the request up",
    "decode server gave the request up",
    "prefill server answered 5",
    "decode server answered 5",
    "No prefill server has been ready",
    "No decode server has been ready",
)
"""What clients may be told; docs/router.md explains them."""
SETTINGS = {
    "load_timeout_s": 4,
    "index_timeout_s": 0.5,
    "split_floor": 0,
}


@dataclass
class Bed:
    """What stands; routers know each other over Redis."""

    cluster: PdCluster
    routers: list[RouterProcess]
    expected: Mapping[tuple[int, int], list[Any]]

    def whole(self) -> bool:
        """Whether all parts are there, and the routers know."""
        for router in self.routers:
            engines = router.engines().values()
            if any(engine["state"] != "ready" for engine in engines):
                return False
            if not router.health()["index_answers"]:
                return False
        return True

    def left_behind(self) -> dict[str, Any]:
        """Whatever is counted anywhere though nothing is asked any more."""
        found: dict[str, Any] = {}
        for number, router in enumerate(self.routers):
            found |= {f"router {number} {k}": v for k, v in router.busy().items()}
        for name, engine in self.cluster.engines.items():
            found |= {f"{name} {k}": v for k, v in queues(engine).items()}
        with self.cluster.cache() as cache:
            reports = cache.index.nodes()
        for report in reports.values():
            for key, value in report.items():
                if key.startswith("read_queue") and value:
                    found[f"{report['role']} of {report['host']} {key}"] = value
        with self.cluster.redis.admin() as redis:
            claims = list(redis.scan_iter("*:claim:*", count=1000))
        if claims:
            found["claims"] = claims
        return found


def queues(engine: Engine) -> dict[str, Any]:
    """What a server counts, without what is nothing."""
    counts: dict[str, Any] = {}
    for rank in engine.server.get("/v1/loads?include=core,disagg,queues")["loads"]:
        counts |= {k: v for k, v in rank.items() if k in COUNTED}
        counts |= {k: v for k, v in rank["disaggregation"].items() if k.endswith("_reqs")}
        counts |= {f"queue {k}": v for k, v in rank["queues"].items()}
    return {name: count for name, count in counts.items() if count}


COUNTED = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_active_tokens")


@pytest.fixture(scope="module")
def bed(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    of, folder = model("qwen3"), tmp_path_factory.mktemp("pd-failures")
    with Server(of, ["--disable-radix-cache"], log=folder / "uncached.log") as server:

        def ask(session: Any) -> Any:
            return session.turn(
                lambda path, body: (
                    (reply := server.request("POST", path, body))[0],
                    reply[1].decode(),
                )
            ).answer

        right = expected(ask)
    # Smaller than what all sessions take: hits come from the store.
    flags = {"prefill": ["--max-total-tokens", "2048"]}
    with (
        PdCluster(
            of, folder, prefill=2, decode=2, agents=True, settings=SETTINGS, flags=flags
        ) as cluster,
        routers(cluster, "--stuck-after", "5", "--dead-after", "3", count=2) as both,
    ):
        yield Bed(cluster, both, right)


# ---- what goes wrong


def nothing(bed: Bed) -> None:
    """The control."""
    time.sleep(LASTS_S)


def kill_engine(bed: Bed, name: str) -> None:
    """All of its processes at once; it is started anew."""
    server = bed.cluster[name].server
    server.kill9()
    time.sleep(2.0)
    server.start()


def stop_engine(bed: Bed, name: str, parts: slice = slice(None)) -> None:
    """Its sockets stay open, and nobody answers."""
    pids = bed.cluster[name].server.pids[parts]
    each(pids, signal.SIGSTOP)
    time.sleep(LASTS_S)
    each(pids, signal.SIGCONT)


def stop_scheduler(bed: Bed, name: str) -> None:
    """Its HTTP server answers, and nothing is computed."""
    stop_engine(bed, name, slice(1, None))


def each(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        psutil.Process(pid).send_signal(number)


def kill_agent(bed: Bed, name: str) -> None:
    engine = bed.cluster[name]
    assert engine.agent is not None
    engine.agent.kill()
    time.sleep(2.0)
    bed.cluster.start_agent(engine)


def stop_agent(bed: Bed, name: str) -> None:
    agent = bed.cluster[name].agent
    assert agent is not None
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(LASTS_S)
    agent.process.send_signal(signal.SIGCONT)


def kill_router(bed: Bed, _: str) -> None:
    """Its clients go to the other one; it is started anew."""
    bed.routers[0].kill()
    time.sleep(2.0)
    bed.routers[0].start()
    bed.routers[0].ready()


def stop_router(bed: Bed, _: str) -> None:
    bed.routers[0].send(signal.SIGSTOP)
    time.sleep(LASTS_S)
    bed.routers[0].send(signal.SIGCONT)


def kill_redis(bed: Bed, _: str) -> None:
    """It comes back with nothing in it."""
    bed.cluster.redis.kill()
    time.sleep(LASTS_S)
    bed.cluster.redis.start()


def stop_redis(bed: Bed, _: str) -> None:
    bed.cluster.redis.stop()
    time.sleep(LASTS_S)
    bed.cluster.redis.cont()


def fail_loads(bed: Bed, name: str) -> None:
    """What lands and announces layers of hits fails, three times, in the middle of loads."""
    faults = bed.cluster[name].faults
    for _ in range(3):
        faults.on("dead_streamer")
        wait_for(lambda: not faults.is_on("dead_streamer"), 60.0)


Fault = Callable[[Bed, str], None]

CASES: dict[str, tuple[Fault, str]] = {
    "prefill-killed": (kill_engine, "p0"),
    "prefill-stopped": (stop_engine, "p0"),
    "prefill-scheduler-stopped": (stop_scheduler, "p1"),
    "prefill-loads-fail": (fail_loads, "p0"),
    "decode-killed": (kill_engine, "d0"),
    "decode-stopped": (stop_engine, "d0"),
    "decode-scheduler-stopped": (stop_scheduler, "d1"),
    "prefill-agent-killed": (kill_agent, "p0"),
    "decode-agent-killed": (kill_agent, "d0"),
    "decode-agent-stopped": (stop_agent, "d0"),
    "router-killed": (kill_router, ""),
    "router-stopped": (stop_router, ""),
    "redis-killed": (kill_redis, ""),
    "redis-stopped": (stop_redis, ""),
    "nothing": (lambda bed, _: nothing(bed), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_costs_time_and_no_answer(
    bed: Bed, case: str, record_property: Callable[[str, object], None]
) -> None:
    fault, name = CASES[case]
    with Load(bed.routers, bed.expected) as load:
        load.more(8)
        before = retries(bed)
        began = time.monotonic()
        fault(bed, name)
        repaired = time.monotonic()
        wait_for(bed.whole, 60.0)
        whole = time.monotonic()
        load.more(8)
        ended = time.monotonic()
    assert load.errors == []
    # A router that was started anew counts anew.
    again = sum(max(0.0, now - then) for now, then in zip(retries(bed), before, strict=True))
    told = table(case, load, began, ended, again)
    print(f"{told}; whole again {whole - repaired:.1f} s after")
    record_property("figures", told)
    check(load.asked, nothing_happened=case == "nothing")
    end = time.monotonic() + 30.0
    while left := bed.left_behind():
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_wrong_bytes_in_the_store_are_seen(bed: Bed) -> None:
    """The control of the answers. Last, for it spoils the store."""
    cluster = bed.cluster
    cluster.flush()
    assert replace_blocks(cluster.root, cluster.redis.url) > 0
    for engine in cluster.engines.values():  # whose memory has the right bytes
        assert engine.agent is not None
        engine.agent.kill()
        cluster.start_agent(engine)
    cluster.agents_known(len(cluster.engines))
    with Load(bed.routers, bed.expected) as load:
        wait_for(lambda: any(one.outcome == "wrong" for one in list(load.asked)), 90.0)


def retries(bed: Bed) -> list[float]:
    """By router."""
    return [router.metric("dualpath_router_retries_total") for router in bed.routers]


def check(asked: list[Asked], *, nothing_happened: bool) -> None:
    """What must be so of every request."""
    outcomes = Counter(one.outcome for one in asked)
    wrong = [one for one in asked if one.outcome == "wrong"]
    assert wrong == []
    assert not outcomes["hangs"], [one for one in asked if one.outcome == "hangs"]
    for one in asked:
        assert one.seconds < LONGEST_S, one
        if one.outcome == "error":
            assert any(sentence in one.text for sentence in SENTENCES), one
            assert one.seconds < ERROR_S + LATE_S, one
    if nothing_happened:
        assert set(outcomes) == {"right"}


def table(case: str, load: Load, began: float, ended: float, retried: float) -> str:
    """One line of figures."""
    during = load.between(began, ended)
    outcomes = dict(Counter(one.outcome for one in during))
    texts = Counter(json.dumps(one.text)[:200] for one in during if one.outcome != "right")
    slowest = max((one.seconds for one in during), default=0.0)
    return f"{case}: {outcomes}, placed again {retried:.0f}, slowest {slowest:.1f} s, {dict(texts)}"
