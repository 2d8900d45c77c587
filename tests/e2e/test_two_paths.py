"""A server whose hits are read by the agents of two other machines, or by both sides at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.node.agents import AgentProcess, Place
from tests.support.redis_server import RedisServer
from tests.support.server import Answer, Server, hicache_flags, random_tokens
from tests.support.stores import replace_blocks
from tests.support.streaming import PAGE_TOKENS, SETTINGS, StreamingServer, wait_for

pytestmark = pytest.mark.e2e

PROMPT = random_tokens(500, seed=1)
OTHER = random_tokens(300, seed=2)
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
AGENTS = ("d0", "d1")
IO = {"page_first_direct": "direct", "layer_first": "direct", "page_first": "kernel"}
"""What goes with the layouts of SGLang's host pool."""


@dataclass
class Fleet:
    """A server, and agents in directories of their own, as if on machines of their own."""

    policy: str
    server: Server
    agents: dict[str, AgentProcess]
    places: dict[str, Place]
    root: Path
    url: str

    def path_bytes(self, path: str) -> float:
        """Of hits that came over a path."""
        return self.server.metric("dualpath_path_bytes_total", path=path)

    def nodes(self, count: int) -> None:
        """Until the server can ask that many."""
        wait_for(lambda: self.server.metric("dualpath_nodes") == count, 90.0)

    def restored(self, prompt: list[int]) -> tuple[Answer, float, float]:
        """The answer for a prompt that is only in storage, and its bytes over either path."""
        self.server.flush()
        before = self.path_bytes("pe"), self.path_bytes("de")
        answer = self.server.generate(prompt)
        wait_for(lambda: (self.path_bytes("pe"), self.path_bytes("de")) != before)
        pe, de = self.path_bytes("pe"), self.path_bytes("de")
        return answer, pe - before[0], de - before[1]


def case(
    policy: str, mode: str, kind: str, *, slow: bool = True, layout: str = "page_first_direct"
) -> object:
    marks = [pytest.mark.slow] if slow else []
    name = f"{policy}-{mode}-{kind}" + (f"-{layout}" if layout != "page_first_direct" else "")
    return pytest.param((policy, mode, kind, layout), id=name, marks=marks)


CASES = [
    case("split", "streaming", "qwen3", slow=False),
    case("peer", "hicache", "qwen3"),
    case("peer", "streaming", "qwen3"),
    case("local", "streaming", "qwen3"),
    case("split", "hicache", "qwen3"),
    case("local", "hicache", "qwen3"),
    case("split", "streaming", "deepseek_v2"),
    case("peer", "streaming", "deepseek_v2"),
    case("local", "streaming", "deepseek_v2"),
    case("split", "hicache", "deepseek_v2"),
    case("split", "hicache", "qwen3", layout="layer_first"),
    case("split", "hicache", "qwen3", layout="page_first"),
    case("peer", "hicache", "deepseek_v2", layout="layer_first"),
]


@pytest.fixture(scope="module", params=CASES)
def fleet(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    policy, mode, kind, layout = request.param
    folder = tmp_path_factory.mktemp(f"{policy}-{mode}")
    root = folder / "store"
    with RedisServer() as redis:
        shared = {"index": redis.url, "index_timeout_s": 2.0, "capacity": "512MiB"}
        settings = {
            **shared,
            "read_paths": policy,
            "split_floor": 0,
            "node": "off",
            "node_dir": str(folder / "machine-p"),
        }
        places = {
            name: Place(
                folder,
                redis.url,
                {
                    "root": str(root),
                    "node_dir": str(folder / f"machine-{name}"),
                    "node_name": name,
                    "capacity": "512MiB",
                },
            )
            for name in AGENTS
        }
        server: Server
        if mode == "streaming":
            server = StreamingServer(model(kind), folder / "server", root=root, settings=settings)
        else:
            own = {**SETTINGS, **settings, "root": str(root), "prefetch_threshold": PAGE_TOKENS}
            flags = [
                *hicache_flags("dualpath", own, layout=layout, io=IO[layout]),
                "--enable-metrics",
            ]
            server = Server(model(kind), flags, log=folder / "server.log")
        with server:
            agents = {name: place.start(log=f"{name}.txt") for name, place in places.items()}
            try:
                yield Fleet(policy, server, agents, places, root, redis.url)
                assert server.alive
            finally:
                for agent in agents.values():
                    agent.kill()


def stored(fleet: Fleet) -> dict[tuple[int, ...], Answer]:
    """Both prompts in the store; their answers without any cache."""
    cold = {}
    for prompt in (PROMPT, OTHER):
        cold[tuple(prompt)] = fleet.server.generate(prompt)
    fleet.server.flush()
    fleet.nodes(0 if fleet.policy == "local" else len(AGENTS))
    wait_for(lambda: fleet.restored(PROMPT)[0].cached.storage == WHOLE, 60.0)
    return cold


def test_answers_are_the_same_over_every_path(fleet: Fleet) -> None:
    cold = stored(fleet)
    for prompt in (PROMPT, OTHER, PROMPT):
        answer, pe, de = fleet.restored(prompt)
        assert answer.tokens == cold[tuple(prompt)].tokens
        assert answer.cached.storage >= len(prompt) // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
        assert (pe > 0) == (fleet.policy != "peer")
        assert (de > 0) == (fleet.policy != "local")


def test_with_an_agent_killed_and_then_the_other_the_answer_is_the_same(fleet: Fleet) -> None:
    cold = stored(fleet)
    asked = 0 if fleet.policy == "local" else 1
    for left, name in enumerate(reversed(AGENTS)):
        fleet.agents[name].kill()
        answer, _, _ = fleet.restored(PROMPT)
        assert answer.tokens == cold[tuple(PROMPT)].tokens
        fleet.nodes(asked * (len(AGENTS) - 1 - left))
    answer, pe, de = fleet.restored(PROMPT)
    assert answer.tokens == cold[tuple(PROMPT)].tokens
    assert (answer.cached.storage, de) == (WHOLE, 0)
    assert pe > 0
    for name in AGENTS:
        fleet.agents[name] = fleet.places[name].start(log=f"{name}.txt")
    fleet.nodes(asked * len(AGENTS))
    assert (fleet.restored(PROMPT)[2] > 0) == (asked > 0)


def test_other_bytes_in_the_store_change_the_answer(fleet: Fleet) -> None:
    """The control: answers do depend on what the agents send. Last, for it spoils the store."""
    cold = stored(fleet)
    fleet.server.flush()
    for name in AGENTS:  # what they have in memory is what was there
        fleet.agents[name].kill()
    fleet.nodes(0)
    assert replace_blocks(fleet.root, fleet.url) > 0
    for name in AGENTS:
        fleet.agents[name] = fleet.places[name].start(log=f"{name}.txt")
    fleet.nodes(0 if fleet.policy == "local" else len(AGENTS))
    answer, _, de = fleet.restored(PROMPT)
    assert answer.cached.storage == WHOLE
    assert (de > 0) == (fleet.policy != "local")
    assert answer.tokens != cold[tuple(PROMPT)].tokens
