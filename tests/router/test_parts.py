"""The parts of a router by themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dualpath_sglang.router.engines import Engine, Load, Registry
from dualpath_sglang.router.loads import LoadError, parse_loads
from dualpath_sglang.router.logprobs import Events
from dualpath_sglang.router.nodes import ReadQueues, engines_among
from dualpath_sglang.router.options import EngineSpec, OptionsError, RouterOptions
from dualpath_sglang.router.requests import IDS_CHUNK, TEXT_CHUNK, Incoming, parse
from dualpath_sglang.router.sessions import Sessions, Warm
from dualpath_sglang.router.tokens import HitShare, TokenEstimator
from dualpath_sglang.router.upstream import UpstreamError, bodies, judge

# -- options ----------------------------------------------------------------------------------


def test_an_engine_is_read_from_a_command_line() -> None:
    spec = EngineSpec.parse("http://10.0.0.1:30000,bootstrap_port=9001,node=a", "prefill")
    assert spec == EngineSpec("http://10.0.0.1:30000", "prefill", 9001, "a")
    assert (spec.name, spec.host) == ("10.0.0.1:30000", "10.0.0.1")
    assert EngineSpec.parse("host:1/", "decode") == EngineSpec("http://host:1", "decode")
    assert EngineSpec.of(spec.as_json()) == spec
    assert EngineSpec.parse("http://[::1]:30", "decode").host == "::1"
    assert EngineSpec.parse("http://h:1,group=7", "decode").group == "7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://host",
        "ftp://host:1",
        "http://u:p@host:1",
        "http://host:1/path",
        "http://host:99999",
        "http://host:1,bootstrap_port=x",
        "http://host:1,bootstrap_port=0",
        "http://host:1,what=1",
        "http://host:1,node=\x01",
    ],
)
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(OptionsError):
        EngineSpec.parse(text, "prefill")


def test_decode_servers_are_grouped_by_name_or_else_by_node() -> None:
    named = Engine(EngineSpec("http://a:1", "decode", node="n", group="g"), "flags")
    alone = Engine(EngineSpec("http://b:1", "decode", node="n"), "flags")
    assert [engine.as_decode().group for engine in (named, alone)] == ["g", "n"]


def test_an_engine_that_is_named_twice_is_refused() -> None:
    with pytest.raises(OptionsError, match="twice"):
        RouterOptions(engines=(EngineSpec("http://a:1", "prefill"),) * 2)


# -- requests ---------------------------------------------------------------------------------


def incoming(
    kind: Any = "generate", headers: dict[str, str] | None = None, **body: Any
) -> Incoming:
    return parse(kind, json.dumps(body).encode(), headers or {})


def test_token_ids_are_counted_and_texts_are_measured() -> None:
    ids = incoming(input_ids=[1] * 600, sampling_params={"max_new_tokens": 7})
    assert (ids.exact, ids.size, ids.output_tokens, ids.items) == (True, 600, 7, 1)
    assert [b.size for b in ids.boundaries] == [IDS_CHUNK, 2 * IDS_CHUNK]
    text = incoming(text="ä" * TEXT_CHUNK)
    assert (text.exact, text.size, text.output_tokens) == (False, 2 * TEXT_CHUNK, None)
    assert [b.size for b in text.boundaries] == [TEXT_CHUNK, 2 * TEXT_CHUNK]
    batch = incoming(text=["a", "bc"], sampling_params={"max_new_tokens": 7})
    assert (batch.items, batch.size, batch.output_tokens, batch.boundaries) == (2, 3, 14, ())


def test_a_longer_prompt_shares_the_boundaries_of_its_prefix() -> None:
    for short, long in (
        (incoming(text="a" * 5000), incoming(text="a" * 5000 + "b" * 5000)),
        (incoming(input_ids=[1] * 600), incoming(input_ids=[1] * 600 + [2] * 600)),
        (
            incoming("chat", messages=[{"role": "user", "content": "a"}]),
            incoming(
                "chat",
                messages=[{"content": "a", "role": "user"}, {"role": "user", "content": "b"}],
            ),
        ),
    ):
        count = len(short.boundaries)
        assert count
        assert long.boundaries[:count] == short.boundaries
        assert len({b.key for b in long.boundaries}) == len(long.boundaries) > count


@pytest.mark.parametrize("name", ["model", "lora_path", "cache_salt", "extra_key"])
def test_what_makes_kv_another_makes_the_prefix_another(name: str) -> None:
    plain = incoming(text="a" * 5000)
    assert incoming(text="a" * 5000, **{name: "x"}).boundaries[0] != plain.boundaries[0]


def test_tools_are_part_of_a_chats_prefix() -> None:
    messages = [{"role": "user", "content": "a"}]
    plain = incoming("chat", messages=messages)
    tools = incoming("chat", messages=messages, tools=[{"type": "function"}])
    assert plain.boundaries[0].key != tools.boundaries[0].key


def test_a_picture_does_not_count_by_its_bytes() -> None:
    content = [
        {"type": "text", "text": "what is it"},
        {"type": "image_url", "image_url": {"url": "data:" + "A" * 1_000_000}},
    ]
    assert incoming("chat", messages=[{"role": "user", "content": content}]).size < 5000


def test_sessions_are_named_by_header_or_field() -> None:
    by = {"x-dualpath-session": "s"}
    named = incoming(text="a", headers=by).session
    assert named
    assert incoming(text="b", session_id="s").session == named
    assert incoming(text="b", routing_key="s").session == named
    assert incoming(text="b", session_params={"id": "s"}).session == named
    assert incoming(text="b", session_id="t", headers=by).session == named
    assert incoming(text="b", user="s").session == 0
    assert incoming(text="b", user="s").user == named


def test_bodies_have_what_is_needed_and_nothing_else_changes() -> None:
    engines = Registry()
    engine = engines.add(EngineSpec("http://10.0.0.7:30000", "prefill", 9000), "flags")
    asked = incoming(text="a", stream=True, stream_options={"x": 1}, bootstrap_room=7, rid="me")
    made = bodies(asked, engine, None)
    prefill, decode = json.loads(made.prefill), json.loads(made.decode)
    assert decode.pop("stream") is True
    assert prefill.pop("stream") is False
    assert decode.pop("stream_options") == {"x": 1}
    assert prefill == decode
    assert decode["text"] == "a"
    assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("10.0.0.7", 9000)
    assert decode["bootstrap_room"] != 7
    assert decode["rid"].endswith("-me")
    assert made.rids == (decode["rid"],)
    assert bodies(asked, engine, None).rids != made.rids


# -- sessions ---------------------------------------------------------------------------------


def test_the_longest_prefix_counts_and_a_session_has_one_entry() -> None:
    sessions = Sessions(10)
    sessions.remember(1, Warm("p1", "d1", 10))
    sessions.remember(2, Warm("p2", "d2", 20))
    assert sessions.find([1, 2, 3]) == (2, Warm("p2", "d2", 20))
    sessions.remember(3, Warm("p2", "d2", 30), instead_of=2)
    assert sessions.find([2]) is None
    assert len(sessions) == 2
    assert sessions.find([]) is None


def test_the_session_that_was_silent_longest_is_forgotten() -> None:
    sessions = Sessions(2)
    for key in (1, 2):
        sessions.remember(key, Warm("p", "d", 1))
    sessions.find([1])
    sessions.remember(3, Warm("p", "d", 1))
    assert sessions.find([2]) is None
    assert sessions.find([1]) is not None


def test_tokens_a_byte_are_learned_within_reason() -> None:
    tokens = TokenEstimator()
    for _ in range(100):
        tokens.learn(1000, 500)
    assert tokens.estimate(1000) == pytest.approx(500, rel=0.01)
    tokens.learn(10, 1_000_000)  # too short to tell
    tokens.learn(1000, 0)
    assert tokens.estimate(1000) == pytest.approx(500, rel=0.01)
    assert tokens.estimate(0) == 1


def test_prompts_have_more_tokens_than_are_computed() -> None:
    share = HitShare()
    assert share.factor == 1.0
    for _ in range(200):
        share.learn(1000, 950)
    assert share.factor == pytest.approx(20)
    for _ in range(200):
        share.learn(1000, 0)
    assert share.factor == pytest.approx(1, rel=0.01)
    for _ in range(400):
        share.learn(1000, 1000)
    assert share.factor <= 100


# -- loads ------------------------------------------------------------------------------------


def rank(**fields: Any) -> dict[str, Any]:
    return {
        "timestamp": 5.0,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_total_tokens": 100,
        "max_total_num_tokens": 1000,
        "disaggregation": {"mode": "decode"},
        **fields,
    }


def test_loads_of_all_ranks_add_up() -> None:
    body = json.dumps({"loads": [rank(), rank(timestamp=3.0)]}).encode()
    assert parse_loads(body) == Load(6, 200, 2000, "decode", 3.0)
    assert parse_loads(b'{"loads": []}') == Load()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"loads": [{}]}', b'{"loads": [7]}', b"\xff"]
)
def test_what_is_no_load_is_refused(body: bytes) -> None:
    with pytest.raises(LoadError):
        parse_loads(body)


class Nothing:
    def engine_died(self, engine: object) -> None: ...


def test_what_others_have_given_an_engine_is_what_it_reports_beyond_ours() -> None:
    registry = Registry()
    engine = registry.add(EngineSpec("http://a:1", "decode"), "flags")
    engine.take(Nothing(), 300)
    registry.heard(engine, Load(3, 1000, 5000), 1, 300)
    assert (engine.foreign_requests, engine.foreign_tokens) == (2, 700)
    assert (engine.requests, engine.tokens) == (3, 1000)
    engine.take(Nothing(), 500)
    assert (engine.requests, engine.tokens) == (4, 1500)
    registry.heard(engine, Load(1, 100, 5000), 2, 800)  # ours have not arrived yet
    assert (engine.requests, engine.tokens) == (2, 800)
    assert engine.as_decode().free_tokens == 4200
    assert engine.as_decode().capacity_tokens == 5000


def test_a_prefill_servers_speed_is_measured_from_what_it_computed() -> None:
    registry = Registry()
    engine = registry.add(EngineSpec("http://a:1", "prefill"), "flags")
    registry.heard(engine, Load(prefill_tokens=1000, prefill_busy_us=1_000_000), 0, 0)
    assert engine.compute_rate is None
    registry.heard(engine, Load(prefill_tokens=9000, prefill_busy_us=2_000_000), 0, 0)
    assert engine.compute_rate == pytest.approx(8000)
    registry.heard(engine, Load(prefill_tokens=9000, prefill_busy_us=2_000_000), 0, 0)
    assert engine.compute_rate == pytest.approx(8000)


def test_two_refused_polls_make_an_engine_dead_and_an_answer_makes_it_live() -> None:
    registry = Registry()
    engine = registry.add(EngineSpec("http://a:1", "prefill"), "flags")
    assert engine.state == "starting"
    registry.heard(engine, Load(), 0, 0)
    assert engine.state == "ready"
    registry.refused(engine, "nobody")
    assert engine.state == "ready"
    registry.refused(engine, "nobody")
    assert engine.state == "dead"
    registry.heard(engine, Load(), 0, 0)
    assert engine.state == "ready"
    registry.refused(engine, "nobody", at_once=True)
    assert engine.state == "dead"


# -- reports ----------------------------------------------------------------------------------


def agent(host: str, up_s: float, **fields: Any) -> dict[str, Any]:
    """What the agent of a machine reports, as far as it counts here."""
    told = {"role": "node", "host": host, "node_id": "1", "up_s": up_s, "address": "h:1"}
    return {**told, "read_queue_bytes": 10 * fields.get("read_queue_tokens", 0), **fields}


def test_read_queues_are_those_reported_and_what_was_placed_since() -> None:
    reads = ReadQueues()
    reads.learn([agent("a", 1.0, read_queue_tokens=100, read_queue_bytes=1000, read_rate=5000)])
    assert reads.queues() == {"a": 100}
    assert reads.rates() == {"a": 500.0}
    held = reads.promise([("a", 0.5), ("b", 0.5)], 80)
    assert reads.queues() == {"a": 140, "b": 40}
    reads.learn([agent("a", 1.0, read_queue_tokens=100)])  # the same report
    assert reads.queues()["a"] == 140
    reads.learn([agent("a", 1.5, read_queue_tokens=40)])  # it may have been sent before
    assert reads.queues()["a"] == 80
    reads.learn([agent("a", 2.0, read_queue_tokens=40)])
    assert reads.queues()["a"] == 40
    reads.kept(held)
    assert reads.queues() == {"a": 40}
    assert reads.promised == 0
    reads.learn([])
    assert reads.queues() == {}


def test_engines_are_found_in_reports_and_nonsense_is_not() -> None:
    reports: list[Any] = [
        {"pd_role": "prefill", "url": "http://a:1", "bootstrap_port": 7, "host": "node-a"},
        {"pd_role": "decode", "url": "http://b:1", "host": "node-b"},
        {"pd_role": "decode", "url": "http://b:1", "host": "node-b", "rank": 1},
        {"pd_role": "decode", "url": 5, "host": "node-b"},
        {"pd_role": "decode", "url": "http://c:1", "host": ["x"]},
        {"pd_role": "null", "url": "http://d:1"},
        {"role": "node", "host": "node-a"},
    ]
    assert engines_among(reports) == {
        "a:1": EngineSpec("http://a:1", "prefill", 7, "node-a"),
        "b:1": EngineSpec("http://b:1", "decode", node="node-b"),
    }


# -- streams ----------------------------------------------------------------------------------


def test_events_are_cut_wherever_chunks_end() -> None:
    whole = b"data: 1\n\ndata: 22\n\ndata: [DONE]\n\nrest"
    for cut in range(len(whole)):
        events = Events()
        found = events.feed(whole[:cut]) + events.feed(whole[cut:])
        assert found == [b"data: 1", b"data: 22", b"data: [DONE]"]
        assert events.rest == b"rest"


@pytest.mark.parametrize(
    ("kind", "event", "verdict"),
    [
        ("generate", {"text": "a", "meta_info": {"finish_reason": None}}, "go"),
        ("generate", {"error": {"message": "bad", "code": 400}}, "go"),
        ("generate", {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400}}}, "go"),
        ("chat", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, "hold"),
        ("chat", {"choices": [{"delta": {"content": "a"}}]}, "go"),
        ("chat", {"choices": [{"delta": {"tool_calls": [1]}}]}, "go"),
        ("chat", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, "go"),
        ("chat", {"choices": []}, "go"),
        ("completions", {"choices": [{"text": ""}]}, "go"),
        ("chat", "[DONE]", "done"),
        ("chat", ": a comment", "hold"),
        ("chat", "no json", "go"),
    ],
)
def test_the_first_events_of_a_stream_are_judged(kind: Any, event: Any, verdict: str) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    data = text if text.startswith(":") else f"data: {text}"
    assert judge(kind, data.encode()) == verdict


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "x", "code": 500}},
        {"error": {"message": "x"}},
        {"meta_info": {"finish_reason": {"type": "abort"}}},
        {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503}}},
        {"choices": [{"finish_reason": "abort", "delta": {}}]},
    ],
)
def test_failures_among_them_are_found(event: Any) -> None:
    with pytest.raises(UpstreamError):
        judge("chat", b"data: " + json.dumps(event).encode())
