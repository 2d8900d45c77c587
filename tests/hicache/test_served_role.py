"""What a server in a role of prefill/decode disaggregation says about itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_sglang.config import DualPathConfig

PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake_tcp")
Told = Callable[..., dict[str, str | int]]


@pytest.fixture
def told(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    """`told(*flags)`: with an index in Redis on this machine, which nobody needs to run."""
    from sglang.srt.server_args import prepare_server_args

    from dualpath_sglang import served_role

    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # pytest's handlers stay
    for name in ("SGLANG_HOST_IP", "HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    config = DualPathConfig.load({"root": str(tmp_path), "index": "redis://127.0.0.1:6379"})

    def run(*flags: str) -> dict[str, str | int]:
        base = ["--model-path", str(model("qwen3")), "--device", "cpu", "--port", "30001"]
        args = prepare_server_args([*base, "--attention-backend", "torch_native", *flags])
        args.resolve_once()
        monkeypatch.setattr(served_role, "get_server_args", lambda: args)
        return served_role.served_role(config)

    return run


def test_a_prefill_server_says_where_decode_finds_it(told: Told) -> None:
    said = told(*PREFILL, "--host", "10.1.2.3", "--disaggregation-bootstrap-port", "9001")
    assert said == {"pd_role": "prefill", "url": "http://10.1.2.3:30001", "bootstrap_port": 9001}


def test_a_decode_server_has_no_bootstrap_port(told: Told) -> None:
    decode = (PREFILL[0], "decode", *PREFILL[2:])
    assert told(*decode, "--host", "::1") == {"pd_role": "decode", "url": "http://[::1]:30001"}


def test_a_server_without_a_role_says_nothing(told: Told) -> None:
    assert told() == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_one_that_listens_everywhere_has_the_address_towards_the_index(
    host: str, told: Told
) -> None:
    assert told(*PREFILL, "--host", host)["url"] == "http://127.0.0.1:30001"


def test_the_address_that_sglang_was_told_comes_first(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HOST_IP", "10.9.8.7")
    assert told(*PREFILL, "--host", "0.0.0.0")["url"] == "http://10.9.8.7:30001"
