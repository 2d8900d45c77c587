"""The agent session client against stand-ins for SGLang and for other servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples import agent_session
from examples.agent_session import Endpoint, Session, Workload

SMALL = ["--system-chars", "300", "--tool-chars", "80", "--answer-tokens", "8"]


class Api(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers with the number of messages it was sent."""

    def __init__(self, owner: str, refuses_extra: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.owner = owner
        self.refuses_extra = refuses_extra
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [self._model()]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuses_extra and "return_cached_tokens_details" in body:
            return self._reply(400, {"error": {"message": "unknown field"}})
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self._events(body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        count = len(body["messages"])
        common = {"id": "x", "created": 0, "model": "m", "object": "chat.completion.chunk"}
        for text in ("", f"answer to {count} ", "messages"):
            delta = {"role": "assistant", "content": text}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield {**common, "choices": [choice]}
        cached = 64 * (count // 2 - 1)
        if self.server.owner == "sglang" and cached:
            tiers = {"device": cached - 64, "host": 0, "storage": 64, "storage_backend": "dualpath"}
            yield {**common, "choices": [], "sglext": {"cached_tokens_details": tiers}}
        usage: dict[str, Any] = {"prompt_tokens": 100 * count, "completion_tokens": 2}
        usage["total_tokens"] = usage["prompt_tokens"] + 2
        if self.server.owner != "sglang":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        yield {**common, "choices": [], "usage": usage}

    def _model(self) -> dict[str, Any]:
        return {"id": "m", "object": "model", "created": 0, "owned_by": self.server.owner}

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture(params=["sglang", "strict", "lenient"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    owner = "sglang" if request.param == "sglang" else "somebody"
    with Api(owner, refuses_extra=request.param == "strict") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_turn_appends_to_what_was_sent_before(api: Api) -> None:
    session, endpoint = Session(Workload(system_chars=300, tool_chars=80)), Endpoint(api.url)
    for _ in range(3):
        session.step(endpoint)
    first, second, third = (body["messages"] for body in api.bodies[-3:])
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[2] == {"role": "assistant", "content": "answer to 2 messages"}
    assert second[3]["content"].startswith("Output of ")
    assert all(body["temperature"] == 0 and body["stream"] for body in api.bodies)


def test_cached_tokens_are_told_by_tier_where_the_server_tells(api: Api) -> None:
    session, endpoint = Session(Workload(system_chars=300, tool_chars=80)), Endpoint(api.url)
    turns = [session.step(endpoint) for _ in range(3)]
    assert [turn.prompt_tokens for turn in turns] == [200, 400, 600]
    assert [turn.cached_tokens for turn in turns] == [0, 64, 128]
    tiers = [(t.device_tokens, t.host_tokens, t.storage_tokens) for t in turns]
    if api.owner == "sglang":
        assert tiers == [(0, 0, 0), (0, 0, 64), (64, 0, 64)]
    else:
        assert tiers == [(None, None, None)] * 3
        assert agent_session.row(turns[2]).split()[:6] == ["3", "600", "-", "-", "-", "472"]
    assert all(turn.ttft_s > 0 and turn.answer.endswith(" messages") for turn in turns)


def test_a_saved_session_goes_on(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "session.json"
    arguments = ["--url", api.url, *SMALL]
    assert agent_session.main([*arguments, "--turns", "2", "--save", str(file)]) == 0
    sent = api.bodies[-1]["messages"]
    assert agent_session.main(["--url", api.url, "--turns", "3", "--resume", str(file)]) == 0
    assert api.bodies[-1]["messages"][: len(sent)] == sent
    assert "3 turns: 1200 prompt tokens, 192 cached" in capsys.readouterr().out
    assert len(Session.load(file).turns) == 3
    assert agent_session.main(["--url", api.url, "--resume", str(file), "--turns", "3"]) == 0

    # Not interrupted, it would have sent the same.
    resumed = api.bodies[-1]
    capsys.readouterr()
    assert agent_session.main([*arguments, "--turns", "3", "--json"]) == 0
    assert api.bodies[-1] == resumed
    told = json.loads(capsys.readouterr().out)
    assert [turn["prompt_tokens"] for turn in told["turns"]] == [200, 400, 600]
    assert told["totals"]["cached_tokens"] == 192


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    first, again, other = Workload(seed=1), Workload(seed=1), Workload(seed=2)
    assert first.system_prompt() == again.system_prompt() != other.system_prompt()
    assert first.user_message(3) == again.user_message(3) != first.user_message(4)
    assert len(first.system_prompt()) == first.system_chars


def test_trouble_is_a_sentence_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent_session.main(["--url", "http://127.0.0.1:9/v1"]) == 1
    file = tmp_path / "no-session.json"
    file.write_text("{}")
    assert agent_session.main(["--resume", str(file)]) == 2
    assert "holds no session" in capsys.readouterr().err
