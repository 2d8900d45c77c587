"""Requests through a router to stub engines, when nothing goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest

from dualpath_sglang.read_hint import from_kv_hints, from_rid
from tests.router.bed import asynchronous, bed, until

BODIES = {
    "/generate": {"text": "one two", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"model": "tiny", "prompt": "one two", "max_tokens": 3},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 3,
    },
}


def said(path: str, told: Any) -> str:
    if path == "/generate":
        return str(told["text"])
    choice = told["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_both_sides_get_the_request_and_the_client_the_decode_answer(path: str) -> None:
    async with bed() as b:
        status, told = await b.post(path, **BODIES[path])
        assert status == 200
        assert said(path, told) == "w0 w1 w2"
        (prefill,), (decode,) = b.prefill[0].seen, b.decode[0].seen
        assert b.prefill[0].paths == b.decode[0].paths == [path]
        for name in ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
            assert prefill[name] == decode[name]
        assert (decode["bootstrap_host"], decode["bootstrap_port"]) == (
            "127.0.0.1",
            b.prefill[0].port,
        )
        assert 0 <= decode["bootstrap_room"] < 1 << 63
        for name, value in BODIES[path].items():
            assert prefill[name] == decode[name] == value
        await until(b.is_empty)


@pytest.mark.parametrize("path", BODIES)
@asynchronous
async def test_a_stream_is_passed_on_byte_for_byte(path: str) -> None:
    async with bed() as b:
        events = await b.events(path, **BODIES[path], stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        texts = json.dumps(events)
        assert [f"w{i}" in texts for i in range(4)] == [True, True, True, False]
        assert b.decode[0].seen[0]["stream"] is True
        assert "stream_options" in b.decode[0].seen[0]
        assert b.prefill[0].seen[0]["stream"] is False
        assert "stream_options" not in b.prefill[0].seen[0]
        await until(b.is_empty)


@asynchronous
async def test_an_event_is_passed_on_before_the_next_one_exists() -> None:
    async with bed() as b:
        b.decode[0].do.token_s = 0.05
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 5}}
        arrived = []
        async with b.http.post(b.url + "/generate", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    arrived.append((json.loads(line[5:])["at"], time.monotonic()))
        assert len(arrived) == 5
        for (_, came), (made, _) in itertools.pairwise(arrived):
            assert came < made  # one clock: stub and client are one process


@asynchronous
async def test_a_client_of_a_whole_answer_gets_logprobs_of_prefill_before_those_of_decode() -> None:
    async with bed() as b:
        _, told = await b.generate("a b c", return_logprob=True)
        names = [name for _, _, name in told["meta_info"]["input_token_logprobs"]]
        assert names == ["prefill"] * 3 + ["decode"]
        _, told = await b.generate("a b c")
        assert "input_token_logprobs" not in told["meta_info"]


@asynchronous
async def test_so_does_one_of_a_stream_and_of_a_batch() -> None:
    async with bed() as b:
        # The prefill answer comes last, and is waited for.
        events = await b.events("/generate", text="a b c", return_logprob=True)
        assert len(events) == 5
        for event in events[:-1]:
            names = [name for _, _, name in event["meta_info"]["input_token_logprobs"]]
            assert names == ["prefill"] * 3 + ["decode"]
        _, told = await b.generate(["a b", "c"], return_logprob=True)
        sizes = [len(item["meta_info"]["input_token_logprobs"]) for item in told]
        assert sizes == [3, 2]


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        ("/generate", {"text": ["a b", "c", "d"]}),
        ("/generate", {"input_ids": [[1, 2], [3], [4]]}),
        ("/v1/completions", {"prompt": ["a b", "c", "d"], "model": "tiny"}),
    ],
)
@asynchronous
async def test_a_batch_goes_as_a_whole_with_one_room_from_which_sglang_counts(
    path: str, prompts: dict[str, Any]
) -> None:
    async with bed() as b:
        status, _ = await b.post(path, **prompts)
        assert status == 200
        (prefill,), (decode,) = b.prefill[0].seen, b.decode[0].seen
        assert isinstance(decode["bootstrap_room"], int)
        assert decode["bootstrap_room"] == prefill["bootstrap_room"]
        assert len(set(decode["rid"])) == 3
        assert decode["rid"] == prefill["rid"]
        assert not any(a != c and a.startswith(c) for a in decode["rid"] for c in decode["rid"])


@asynchronous
async def test_the_choice_of_who_reads_is_told_to_both_in_the_form_of_the_endpoint() -> None:
    async with bed(path="de") as b:
        await b.generate()
        await b.post("/v1/completions", **BODIES["/v1/completions"])
        for stub in b.stubs:
            first, second = stub.seen
            hint = from_kv_hints(first["kv_hints"])
            assert hint is not None
            assert hint == from_rid(second["rid"])
            assert hint.shares == (("node1", 1.0),)
            assert from_rid(first["rid"]) is None
            assert "kv_hints" not in second


@pytest.mark.parametrize("given", [{"path": "free"}, {"nodes": False}])
@asynchronous
async def test_nobody_is_told_who_reads_when_it_is_free_or_nodes_are_not_known(
    given: dict[str, Any],
) -> None:
    async with bed(**given) as b:
        await b.generate(kv_hints={"protocol_version": "1"}, rid="mine|dp1|x=1.0|")
        assert "kv_hints" not in b.decode[0].seen[0]
        assert from_rid(b.decode[0].seen[0]["rid"]) is None


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/generate", "{", "no JSON"),
        ("/generate", "[]", "JSON object"),
        ("/generate", "{}", "text and input_ids"),
        ("/generate", '{"text": []}', "not empty"),
        ("/generate", '{"input_ids": [1, "x"]}', "token ids"),
        ("/generate", '{"input_ids": [99999999999999999999]}', "token ids"),
        ("/generate", '{"input_embeds": [[1.0]]}', "not routed"),
        ("/generate", '{"text": "a", "rid": 5}', "rid"),
        ("/generate", '{"text": ["a", "b"], "rid": ["x"]}', "as many rids"),
        ("/generate", '{"text": ["a", "b"], "rid": ["x", "x"]}', "twice"),
        ("/generate", '{"text": "a", "sampling_params": {"n": 2}}', "n must be 1"),
        ("/generate", '{"text": "a", "stream": "yes"}', "stream"),
        ("/v1/completions", "{}", "prompt"),
        ("/v1/completions", '{"prompt": "a", "n": 2}', "n must be 1"),
        ("/v1/chat/completions", '{"messages": "a"}', "messages"),
        ("/v1/chat/completions", '{"messages": []}', "messages"),
        ("/v1/chat/completions", '{"messages": ["a"]}', "object"),
    ],
)
@asynchronous
async def test_what_makes_no_sense_is_refused_with_a_sentence(
    path: str, body: str, sentence: str
) -> None:
    async with bed() as b:
        async with b.http.post(b.url + path, data=body) as answer:
            told = await answer.json()
            assert answer.status == 400
            assert sentence in told["error"]["message"]
            if path.startswith("/v1"):
                assert told["error"]["type"] == "invalid_request_error"
                assert "param" in told["error"]
        assert not any(stub.seen for stub in b.stubs)
        assert await b.metric('dualpath_router_requests_total{endpoint="') == 1


@asynchronous
async def test_a_body_that_is_too_large_and_a_path_that_is_not_there_are_refused() -> None:
    async with bed(max_body=4096) as b:
        status, told = await b.generate("a " * 4096)
        assert status == 413
        assert "4096 bytes" in told["error"]["message"]
        status, told = await b.get("/v1/nothing")
        assert status == 404
        assert told["error"]["type"] == "invalid_request_error"


@asynchronous
async def test_what_an_engine_refuses_is_the_clients_answer_and_ends_on_both_sides() -> None:
    async with bed() as b:
        b.prefill[0].do.status = 400
        b.decode[0].do.hang = True
        status, told = await b.generate()
        assert (status, told["message"]) == (400, "a stub was told so")
        await until(lambda: not b.decode[0].running)
        await until(lambda: bool(b.decode[0].aborts))
        assert len(b.prefill[0].seen) == 1  # not placed again
        await until(b.is_empty)


@pytest.mark.parametrize("lend", [True, False])
@asynchronous
async def test_headers_that_engines_read_are_passed_on(*, lend: bool) -> None:
    async with bed(engine_key="router-key", lend_engine_key=lend) as b:
        headers = {"Authorization": "Bearer client-key", "traceparent": "00-1-2-01", "X-Other": "x"}
        await b.http.post(b.url + "/generate", json=BODIES["/generate"], headers=headers)
        await b.generate()
        for stub in b.stubs:
            first, second = stub.headers
            assert first["Authorization"] == "Bearer client-key"
            assert first["traceparent"] == "00-1-2-01"
            assert "X-Other" not in first
            assert second.get("Authorization") == ("Bearer router-key" if lend else None)


@asynchronous
async def test_models_health_engines_and_metrics_are_told() -> None:
    async with bed(1, 2) as b:
        assert (await b.get("/v1/models"))[1]["data"][0]["id"] == "tiny"
        status, told = await b.get("/health")
        assert status == 200
        assert (told["prefill_ready"], told["decode_ready"], told["status"]) == (1, 2, "ok")
        await b.generate()
        _, told = await b.get("/engines")
        engines = {engine["name"]: engine for engine in told["engines"]}
        assert {e["state"] for e in engines.values()} == {"ready"}
        assert [e["role"] for e in engines.values()] == ["prefill", "decode", "decode"]
        assert engines[b.prefill[0].name]["node"] == "node0"
        assert await b.metric("dualpath_router_engine_up") == 3
        assert await b.metric("dualpath_router_requests_total") == 1
        assert await b.metric("dualpath_router_placements_total") == 1


@asynchronous
async def test_without_a_decode_server_it_is_not_healthy_and_says_so() -> None:
    async with bed(1, 0, engine_wait_s=0.2) as b:
        status, told = await b.get("/health")
        assert (status, told["decode_known"]) == (503, 0)
        async with b.http.post(b.url + "/v1/completions", json={"prompt": "a"}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"]
            error = (await answer.json())["error"]
        assert "No decode server has been ready" in error["message"]
        assert error["type"] == "service_unavailable"


@pytest.mark.parametrize("by", ["its own id", "the id of its answer"])
@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_request_is_aborted_on_both_sides_by_the_client(by: str, stream: bool) -> None:
    async with bed() as b:
        b.decode[0].do.token_s = 5.0
        asked = asyncio.create_task(
            b.http.post(
                b.url + "/generate",
                json={"text": "a", "rid": "mine", "stream": stream},
            )
        )
        await until(lambda: bool(b.decode[0].running and b.prefill[0].seen))
        rid = "mine" if by == "its own id" else b.decode[0].seen[0]["rid"]
        await asyncio.sleep(0.05)
        _, told = await b.post("/abort_request", rid=rid)
        assert told["found"] is True
        answer = await asked
        text = await answer.text()
        assert answer.status == 200
        assert '"abort"' in text
        assert len(b.decode[0].seen) == 1  # not placed again
        assert b.decode[0].ended[0][1] == "aborted"
        await until(b.is_empty)
        assert (await b.post("/abort_request", rid="mine"))[1]["found"] is False
        assert (await b.post("/abort_request", id="mine"))[0] == 400


@asynchronous
async def test_one_clients_rid_does_not_touch_another_ones_request() -> None:
    async with bed() as b:
        b.decode[0].do.token_s = 0.2
        tasks = [asyncio.create_task(b.generate(rid=rid, tokens=2)) for rid in ("a", "ab")]
        await until(lambda: len(b.decode[0].running) == 2)
        await asyncio.sleep(0.05)
        await b.post("/abort_request", rid="a")
        (_, first), (_, second) = await asyncio.gather(*tasks)
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert second["meta_info"]["finish_reason"]["type"] == "length"


@asynchronous
async def test_a_session_returns_to_its_engines_by_its_prefix_alone() -> None:
    async with bed(3, 3) as b:
        messages = [{"role": "user", "content": "hello " * 50}]
        used = []
        for turn in range(4):
            status, told = await b.post("/v1/chat/completions", messages=messages, max_tokens=2)
            assert status == 200
            used.append([i for i, stub in enumerate(b.stubs) if len(stub.seen) == turn + 1])
            content = told["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": f"more {turn}"}]
        assert used[0] == used[1] == used[2] == used[3]
        assert len(used[0]) == 2
        assert len(b.router.sessions) == 1
        assert await b.metric('dualpath_router_warm_total{placed="both"}') == 3


@asynchronous
async def test_without_affinity_it_does_not() -> None:
    async with bed(3, 3, policy="round_robin", affinity=False) as b:
        for _ in range(3):
            messages = [{"role": "user", "content": "hello " * 50}]
            await b.post("/v1/chat/completions", messages=messages)
        assert [len(stub.seen) for stub in b.stubs] == [1] * 6


@asynchronous
async def test_in_round_robin_sides_read_in_turn_too() -> None:
    async with bed(2, 2, policy="round_robin", affinity=False) as b:
        for i in range(4):
            await b.generate(f"{i} something", session_id="one")
        read = [from_kv_hints(body["kv_hints"]) for stub in b.prefill for body in stub.seen]
        sides = [hint.shares[0][0] in ("node0", "node1") for hint in read if hint is not None]
        assert sorted(sides) == [False, False, True, True]


@asynchronous
async def test_a_session_that_is_named_returns_whatever_its_prompt() -> None:
    async with bed(3, 3) as b:
        for i in range(4):
            headers = {"x-dualpath-session": "agent-7"}
            body = {"text": f"{i} something", "sampling_params": {"max_new_tokens": 1}}
            async with b.http.post(b.url + "/generate", json=body, headers=headers) as answer:
                assert answer.status == 200
        assert sorted(len(stub.seen) for stub in b.stubs) == [0, 0, 0, 0, 4, 4]


@asynchronous
async def test_token_counts_of_texts_are_learned_from_answers() -> None:
    async with bed() as b:
        b.prefill[0].do.prompt_tokens = 1000
        for _ in range(30):
            await b.generate("x" * 500)
        assert 1.5 < b.router.forwarder._tokens.ratio < 2.5
        assert await b.metric("dualpath_router_prompt_tokens_total") == 30_000
