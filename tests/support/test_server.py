"""The harness itself: a server leaves nothing behind, and its failures tell why."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.support.server import Server, ServerError

pytestmark = pytest.mark.e2e


def running(pid: int) -> bool:
    try:
        # The kernel tells of an end a moment before it takes the process off its list.
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("leave", ["kill9", "stop", "context"])
def test_no_process_and_no_port_is_left_of_a_server(leave, model):
    with Server(model("qwen3")) as server:
        pids = server.pids
        assert len(pids) >= 3  # HTTP, scheduler, detokenizer
        if leave != "context":
            getattr(server, leave)()
    assert not server.alive
    assert not any(running(pid) for pid in pids)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_server_that_cannot_start_says_why(model):
    server = Server(model("qwen3"), ["--no-such-flag"])
    with pytest.raises(ServerError, match="unrecognized arguments: --no-such-flag"):
        server.start()
    assert not server.alive


def test_a_refused_request_says_why(model, start_server):
    server = start_server(model("qwen3"), ["--max-total-tokens", "1024"])
    with pytest.raises(ServerError, match="HTTP 400"):
        server.generate([10] * 20000)
    with pytest.raises(ServerError, match="/metrics"):
        server.metrics()
    server.kill9()
    with pytest.raises(ServerError, match="refused"):
        server.generate([10] * 20)
