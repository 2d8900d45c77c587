"""A prefill and a decode server that restore the same prefix: storage is read once for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from dualpath_sglang.read_hint import ReadHint, into_rid, kv_hints
from dualpath_sglang.scheduling.assign import assign
from dualpath_storage import Geometry
from tests.support.pd import Figures, Mode, PdAnswer, PdCluster
from tests.support.pd_router import routers
from tests.support.pd_sessions import Form, Said, parse
from tests.support.server import random_tokens
from tests.support.stores import replace_blocks
from tests.support.streaming import PAGE_TOKENS, Background, wait_for

pytestmark = pytest.mark.e2e

TOKENS = 500
PAGES = TOKENS // PAGE_TOKENS
NOISE_BYTES = 128 << 10
"""What processes read beside blocks while a request is served: their own files, /proc."""
PE, DE = ReadHint((("p0", 1.0),)), ReadHint((("d0", 1.0),))
SPLIT = ReadHint((("p0", 0.5), ("d0", 0.5)))
PATHS = {"pe": PE, "de": DE, "split": SPLIT}
slow = pytest.mark.slow


@dataclass
class Bed:
    """A pair of servers with agents, and prompts that nobody has read yet."""

    cluster: PdCluster
    geometry: Geometry
    seeds: Iterator[int] = field(default_factory=lambda: count(100))
    cold: dict[tuple[int, ...], PdAnswer] = field(default_factory=dict)

    def stored(self) -> list[int]:
        """A prompt that is in the store and in no memory, answered without a cache before."""
        prompt = random_tokens(TOKENS, seed=next(self.seeds))
        self.cold[tuple(prompt)] = self.cluster.generate(prompt)
        self.cluster.flush()
        return prompt

    def restored(self, prompt: list[int], **fields: Any) -> tuple[PdAnswer, Figures]:
        """The answer, and what it took."""
        before = self.cluster.figures()
        answer = self.cluster.generate(prompt, **fields)
        return answer, self.cluster.figures() - before

    def right(self, prompt: list[int], answer: PdAnswer) -> bool:
        return answer.tokens == self.cold[tuple(prompt)].tokens

    @property
    def page_bytes(self) -> int:
        """Of a page in the store, with its header."""
        return self.geometry.slot_bytes

    def hinted_reads(self, kind: str) -> dict[str, float]:
        """By server."""
        return {
            name: engine.server.metric("dualpath_hinted_reads_total", kind=kind)
            for name, engine in self.cluster.engines.items()
        }


def case(mode: Mode, kind: str, *, slowly: bool = True) -> Any:
    return pytest.param((mode, kind), id=f"{mode}-{kind}", marks=[slow] if slowly else [])


@pytest.fixture(
    scope="module",
    params=[
        case("streaming", "qwen3", slowly=False),
        case("hicache", "qwen3"),
        case("streaming", "deepseek_v2"),
        case("hicache", "deepseek_v2"),
    ],
)
def bed(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bed]:
    mode, kind = request.param
    with PdCluster(
        model(kind), tmp_path_factory.mktemp("pd"), prefill_mode=mode, agents=True
    ) as cluster:
        for engine in cluster.engines.values():
            wait_for(lambda e=engine: e.server.metric("dualpath_nodes") == 1, 90.0)
        time.sleep(1.0)  # and each has found its own machine's agent
        cluster.generate(random_tokens(TOKENS, seed=1))
        cluster.flush()
        with cluster.cache() as cache:
            (geometry,) = cache.geometries()
        yield Bed(cluster, geometry)


@pytest.mark.parametrize(
    ("path", "carrier"),
    [
        pytest.param("de", "kv_hints"),
        pytest.param("pe", "kv_hints", marks=slow),
        pytest.param("split", "kv_hints", marks=slow),
        pytest.param("de", "rid", marks=slow),
        pytest.param("split", "rid", marks=slow),
    ],
)
def test_a_hit_is_read_once_for_both_sides(
    bed: Bed, path: str, carrier: Literal["kv_hints", "rid"]
) -> None:
    hint = PATHS[path]
    prompt = bed.stored()
    fields: dict[str, Any] = {"rid": f"r-{path}-{carrier}"}
    if carrier == "rid":
        fields["rid"] = into_rid(fields["rid"], hint)
    else:
        fields["kv_hints"] = kv_hints(hint, "m")
    replaced = bed.hinted_reads("replaced")
    answer, took = bed.restored(prompt, **fields)
    assert bed.right(prompt, answer)
    assert answer.prefill.cached.storage == PAGES * PAGE_TOKENS
    read = sum(took.read.values())
    assert PAGES * bed.page_bytes <= read < PAGES * bed.page_bytes + NOISE_BYTES
    for name, pages in who_reads(bed, prompt, hint).items():
        assert 0 <= took.read[name] - pages * bed.page_bytes < NOISE_BYTES
    missed = -(-TOKENS // PAGE_TOKENS) - PAGES
    assert took.sent <= (missed + 1) * bed.geometry.block_bytes
    assert bed.hinted_reads("replaced") == replaced
    wait_for(lambda: all(bed.hinted_reads("honoured").values()))


@pytest.mark.parametrize(
    ("path", "form"),
    [
        pytest.param("de", "generate"),
        pytest.param("de", "generate-stream", marks=slow),
        pytest.param("pe", "generate", marks=slow),
        pytest.param("split", "generate", marks=slow),
    ],
)
def test_through_a_router_a_hit_is_read_once_for_both_sides(
    bed: Bed, path: str, form: Form
) -> None:
    prompt = bed.stored()
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": form.endswith("stream")}
    with routers(bed.cluster, "--path", path) as (router,):
        before = bed.cluster.figures()
        said: Said = parse(form, *router.post("/generate", body))
        took = bed.cluster.figures() - before
        wait_for(lambda: not router.busy())
    assert said.answer == bed.cold[tuple(prompt)].tokens
    assert said.cached == PAGES * PAGE_TOKENS
    assert 0 <= sum(took.read.values()) - PAGES * bed.page_bytes < NOISE_BYTES
    for name, share in {"pe": {"p0": 1, "d0": 0}, "de": {"p0": 0, "d0": 1}}.get(path, {}).items():
        assert 0 <= took.read[name] - share * PAGES * bed.page_bytes < NOISE_BYTES
    missed = -(-TOKENS // PAGE_TOKENS) - PAGES
    assert took.sent <= (missed + 1) * bed.geometry.block_bytes


def who_reads(bed: Bed, prompt: list[int], hint: ReadHint) -> dict[str, int]:
    """Pages by machine."""
    with bed.cluster.cache() as cache:
        keys = stored_keys(cache, bed.geometry, prompt)
    index = assign(keys, [weight for _, weight in hint.shares])
    pages = {"p0": 0, "d0": 0}
    for i, (name, _) in enumerate(hint.shares):
        pages[name] = index.count(i)
    return pages


def stored_keys(cache: Any, geometry: Geometry, prompt: list[int]) -> list[bytes]:
    """The keys of a prompt's whole pages, as SGLang makes them."""
    from sglang.srt.mem_cache.utils import get_hash_str

    keys: list[str] = []
    for page in range(PAGES):
        tokens = prompt[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        keys.append(get_hash_str(tokens, keys[-1] if keys else None))
    raw = [bytes.fromhex(key) for key in keys]
    assert all(cache.lookup(cache.attach(geometry, writer=False), raw))
    return raw


@slow
def test_with_a_hint_each_both_sides_read(bed: Bed) -> None:
    """The control: the measure sees a second read."""
    prompt = bed.stored()
    fields = {**bed.cluster.bootstrap(), "rid": "differs"}
    before = bed.cluster.figures()
    prefill = bed.cluster["p0"].server.generate
    first = Background(prefill, prompt, 16, **fields, kv_hints=kv_hints(PE, "m"))
    decode = bed.cluster["d0"].server.generate(prompt, 16, **fields, kv_hints=kv_hints(DE, "m"))
    took = bed.cluster.figures() - before
    assert bed.right(prompt, PdAnswer(decode, first.result()))
    for name in ("p0", "d0"):
        assert 0 <= took.read[name] - PAGES * bed.page_bytes < NOISE_BYTES


@slow
def test_with_the_hinted_agent_dead_the_answer_is_the_same(bed: Bed) -> None:
    prompt = bed.stored()
    engine = bed.cluster["d0"]
    assert engine.agent is not None
    engine.agent.kill()
    try:
        answer, took = bed.restored(prompt, kv_hints=kv_hints(DE, "m"))
        assert bed.right(prompt, answer)
        assert answer.prefill.cached.storage == PAGES * PAGE_TOKENS
        assert sum(took.read.values()) >= PAGES * bed.page_bytes
        unknown = ReadHint((("nobody", 1.0),))
        answer, took = bed.restored(bed.stored(), kv_hints=kv_hints(unknown, "m"))
        assert answer.prefill.cached.storage == PAGES * PAGE_TOKENS
        wait_for(lambda: bed.hinted_reads("replaced")["p0"] > 0)
    finally:
        bed.cluster.start_agent(engine)
        bed.cluster.agents_known(2)
        wait_for(lambda: bed.cluster["p0"].server.metric("dualpath_nodes") == 1, 90.0)
        time.sleep(1.0)


@slow
def test_other_bytes_in_the_store_change_the_answer(bed: Bed) -> None:
    """The control of the answers. Last, for it spoils the store."""
    prompt = bed.stored()
    assert replace_blocks(bed.cluster.root, bed.cluster.redis.url) > 0
    answer, _ = bed.restored(prompt, kv_hints=kv_hints(DE, "m"))
    assert answer.prefill.cached.storage == PAGES * PAGE_TOKENS
    assert not bed.right(prompt, answer)
