"""Agent sessions through a router to two prefill and two decode servers answer as a single server
without a cache does, whoever reads what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.router import trace
from tests.support.pd import Figures, PdCluster
from tests.support.pd_router import RouterProcess, end, routers
from tests.support.pd_sessions import FORMS, Post, Said, Session
from tests.support.server import Server
from tests.support.stores import replace_blocks
from tests.support.streaming import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

PATHS = ("pe", "de", "split", "shorter_queue", "free")
TURNS = 10
"""Of each session; four sessions a path and five paths are 200 turns a model."""
CALM = ("--dead-after", "30", "--stuck-after", "120")
"""On a busy machine nobody is dead because it is slow."""
SPOILED = len(PATHS)
"""Number of the sessions of the negative control."""


def sessions(number: int) -> list[Session]:
    """One of each form, and others for each number."""
    return [Session(form, seed=100 * number + i) for i, form in enumerate(FORMS)]


def direct(server: Server) -> Post:
    """To a server without a router."""

    def post(path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        status, text = server.request("POST", path, body)
        return status, text.decode()

    return post


def turn_of_all(pool: ThreadPoolExecutor, of: list[Session], post: Post) -> list[Said]:
    """A turn of each session, all at once."""
    return list(pool.map(lambda session: session.turn(post), of))


@dataclass
class Bed:
    """Servers, and the answers of a single uncached one to the sessions of each number."""

    cluster: PdCluster
    expected: dict[int, list[list[Said]]]


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v2"])
def bed(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bed]:
    of, folder = model(request.param), tmp_path_factory.mktemp("pd-router")
    expected = {}
    flags = ["--disable-radix-cache"]
    with (
        Server(of, flags, log=folder / "uncached.log") as server,
        ThreadPoolExecutor(len(FORMS)) as pool,
    ):
        for number in range(len(PATHS) + 1):
            asked = sessions(number)
            for _ in range(TURNS):
                turn_of_all(pool, asked, direct(server))
            expected[number] = [session.answers for session in asked]
            assert not any(said.cached for session in asked for said in session.answers)
    with PdCluster(of, folder, prefill=2, decode=2, agents=True) as cluster:
        for engine in cluster.engines.values():
            wait_for(lambda e=engine: e.server.metric("dualpath_nodes") == 3, 90.0)
        yield Bed(cluster, expected)


def answers(of: list[Session]) -> list[list[tuple[int, ...] | str]]:
    return [[said.answer for said in session.answers] for session in of]


def run(bed: Bed, router: RouterProcess, asked: list[Session], turns: int) -> Figures:
    """Turns of all sessions at once; after each, no server has anything left in memory.

    Junk is written over what is freed, so what is answered next comes from the store.
    """
    before = bed.cluster.figures()
    with ThreadPoolExecutor(len(asked)) as pool:
        for _ in range(turns):
            turn_of_all(pool, asked, router.post)
            bed.cluster.flush()
    return bed.cluster.figures() - before


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_those_of_a_single_uncached_server(bed: Bed, path: str, tmp_path: Path) -> None:
    number = PATHS.index(path)
    asked, record = sessions(number), tmp_path / "rounds"
    with routers(bed.cluster, "--path", path, *CALM, record=record) as (router,):
        took = run(bed, router, asked, TURNS)
        wait_for(lambda: not router.busy())
        end(router)
    wanted = [[said.answer for said in said_all] for said_all in bed.expected[number]]
    assert answers(asked) == wanted
    # Each turn found in the store what the last one had computed, and nothing anywhere else.
    for session in asked:
        for said in session.answers[1:]:
            assert said.cached >= session.first
    _read_by(path, took)
    _replays(record, TURNS * len(FORMS))


def _read_by(path: str, took: Figures) -> None:
    """Storage was read on the side that was told to."""
    total = sum(took.read.values())
    share = sum(size for name, size in took.read.items() if name.startswith("d")) / total
    assert total > 2 << 20, took.read
    if path == "pe":
        assert share < 0.2, took.read
    elif path == "de":
        assert share > 0.8, took.read
    elif path == "split":
        assert 0.1 < share < 0.9, took.read


def _replays(record: Path, requests: int) -> None:
    """The pure functions place as the router did, from what it knew."""
    rounds = list(trace.read(record))
    assert sum(len(recorded.placements) for recorded in rounds) >= requests
    for recorded in rounds:
        assert trace.same(recorded, trace.replay(recorded))


def test_other_bytes_in_the_store_change_the_answers(bed: Bed) -> None:
    """The control. Last, for it spoils the store."""
    asked = sessions(SPOILED)
    with routers(bed.cluster, "--path", "split", *CALM) as (router,):
        run(bed, router, asked, 2)
        assert replace_blocks(bed.cluster.root, bed.cluster.redis.url) > 0
        for engine in bed.cluster.engines.values():  # whose memory has the right bytes
            assert engine.agent is not None
            engine.agent.kill()
            bed.cluster.start_agent(engine)
        bed.cluster.agents_known(len(bed.cluster.engines))
        run(bed, router, asked, 2)
    expected = [[said.answer for said in of] for of in bed.expected[SPOILED]]
    for got, wanted in zip(answers(asked), expected, strict=True):
        assert got[:2] == wanted[:2]
        assert got[2] != wanted[2]
