"""Many clients and random faults at once, from a seed that is printed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.server import random_tokens
from tests.support.streaming import PAGE_TOKENS, Background, StreamingServer

pytestmark = pytest.mark.e2e

SECONDS = 20.0
CLIENTS = 6
FLAGS = [
    pytest.param(["--chunked-prefill-size", "128"], id="overlap"),
    pytest.param(["--disable-overlap-schedule"], id="no_overlap"),
]


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", FLAGS)
def test_every_answer_is_right_whatever_happens_to_the_store(
    scheduling: list[str], model: Callable[..., Path], tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    roots = [random_tokens(400, seed=s) for s in range(101, 105)]
    prompts = [
        roots[i % 4][: 16 * source.randrange(4, 26)] + random_tokens(30 + 5 * i, seed=110 + i)
        for i in range(16)
    ]
    settings = {"load_timeout_s": 1.0, "stall_budget_s": 1.0}
    # So small a pool that pages are evicted from the device all the time, and hit in the store.
    flags = [*scheduling, "--max-total-tokens", "1280"]
    with StreamingServer(model("qwen3"), tmp_path / "server", *flags, settings=settings) as server:
        wanted = [server.uncached(prompt, 8).tokens for prompt in prompts]
        server.store(*prompts)
        stop = threading.Event()
        answered = [0] * CLIENTS

        def client(number: int) -> None:
            chance = random.Random(seed + number)
            while not stop.is_set():
                i = chance.randrange(len(prompts))
                body = {
                    "input_ids": prompts[i],
                    "rid": f"{number}-{answered[number]}",
                    "sampling_params": {
                        "temperature": 0,
                        "max_new_tokens": 8,
                        "ignore_eos": True,
                    },
                }
                reply = server.post("/generate", body)
                answered[number] += 1
                reason = reply["meta_info"]["finish_reason"]["type"]
                if reason != "abort":  # our own: nothing else may abort a request
                    assert tuple(reply["output_ids"]) == wanted[i], f"prompt {i}, seed {seed}"

        clients = [Background(client, number) for number in range(CLIENTS)]
        end = time.monotonic() + SECONDS
        keys = [key for prompt in prompts for key in stores.keys_of(prompt, PAGE_TOKENS)]
        while time.monotonic() < end:
            time.sleep(source.uniform(0.0, 0.3))
            fault = source.choice(["corrupt", "corrupt", "slow", "fast", "die", "hang", "abort"])
            if fault == "corrupt":
                try:
                    stores.corrupt(server.root, source.choice(keys), source.randrange(4))
                except AssertionError:
                    continue  # that page is not stored now
            elif fault == "slow":
                server.faults.on("read_delay", 0.02)
            elif fault == "fast":
                server.faults.off("read_delay")
            elif fault == "die":
                server.faults.on(source.choice(["dead_reader", "dead_streamer"]))
            elif fault == "hang":
                server.faults.on("hang")
                time.sleep(source.uniform(0.0, 1.5))
                server.faults.off("hang")
            elif fault == "abort":
                number = source.randrange(CLIENTS)
                server.request("POST", "/abort_request", {"rid": f"{number}-{answered[number]}"})
        stop.set()
        for one in clients:
            one.result()
        server.faults.clear()
        assert min(answered) > 0
        assert server.metric("dualpath_loads_total", outcome="ok") > 20
        assert server.metric("dualpath_recomputes_total") > 0
        server.flush()
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert server.generate(prompt, 8).tokens == tokens
