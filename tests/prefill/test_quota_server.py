"""A real server that packs its prefill batches by quota."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dualpath_sglang.prefill.profile import load
from dualpath_sglang.scheduling.quota import AttentionModel
from tests.prefill.servers import (
    FLAGS,
    LONG,
    MODEL,
    PAGE_TOKENS,
    QUOTA_S,
    SHORT,
    answers,
    batches,
    header,
    made_up_profile,
    over_quota,
    recorded,
)
from tests.support.pd import PdCluster
from tests.support.server import Answer, Server, ServerError, random_tokens
from tests.support.streaming import Background

pytestmark = [pytest.mark.e2e]
slow = pytest.mark.slow

PROMPTS = [*LONG, *SHORT]
Models = Callable[..., Path]


@dataclass(frozen=True, slots=True)
class Plain:
    """What a server without quota did."""

    folder: Path
    answers: list[Answer]
    profile: Path


@pytest.fixture(scope="module")
def plain(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain")
    with recorded(model("qwen3"), folder) as server:
        found = answers(server, PROMPTS)
    yield Plain(folder, found, made_up_profile(folder, folder / "profile.json"))


def same(found: list[Answer], wanted: list[Answer]) -> None:
    assert [a.tokens for a in found] == [a.tokens for a in wanted]


def test_batches_keep_to_the_quota_and_answers_stay_the_same(
    plain: Plain, model: Models, tmp_path: Path
) -> None:
    with recorded(model("qwen3"), tmp_path, "--enable-metrics", quota=plain.profile) as server:
        same(answers(server, PROMPTS), plain.answers)
        assert server.metric("dualpath_prefill_batches_total", outcome="cut") > 0
        assert server.metric("dualpath_prefill_failures_total") == 0
    found = batches(tmp_path)
    assert not over_quota(found)
    assert all(b.predicted_s == pytest.approx(MODEL.predict(b.requests)) for b in found)
    assert max(b.predicted_s or 0 for b in found) > 0.8 * QUOTA_S  # and use it
    assert all(b.attention_s and b.forward_s for b in found)
    # Short prompts go along with a long one that is in parts.
    assert any(b.cut and len(b.requests) > 2 and b.requests[0].cached for b in found)
    # Without a quota, batches are far larger: the first of the two long prompts fills them.
    assert over_quota(batches(plain.folder))


@slow
def test_the_papers_rule_lets_nobody_pass_a_long_prompt(
    plain: Plain, model: Models, tmp_path: Path
) -> None:
    with recorded(model("qwen3"), tmp_path, quota=plain.profile, share="0") as server:
        same(answers(server, PROMPTS), plain.answers)
    found = batches(tmp_path)
    assert not over_quota(found)
    for batch in found:
        if batch.cut:  # the one in parts is the last of its batch
            assert batch.requests[-1].new % PAGE_TOKENS == 0


@slow
def test_a_request_larger_than_any_quota_is_answered(
    plain: Plain, model: Models, tmp_path: Path
) -> None:
    profile = made_up_profile(
        plain.folder, tmp_path / "p.json", AttentionModel(request_s=1.0, token_s=1e-4)
    )
    prompts = [LONG[0][:100], LONG[1][:90], *SHORT[:3]]
    with recorded(model("qwen3"), tmp_path / "plain") as server:
        wanted = answers(server, prompts)
    with recorded(model("qwen3"), tmp_path, quota=profile) as server:
        same(answers(server, prompts), wanted)
    assert {len(b.requests) for b in batches(tmp_path)} == {1}
    assert all(b.requests[0].new <= PAGE_TOKENS for b in batches(tmp_path))


@slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--disable-radix-cache"],
        ["--enable-mixed-chunk"],
        ["--schedule-policy", "lpm"],
        ["--schedule-policy", "shortest-prefill-first"],
        ["--disable-overlap-schedule"],
        ["--prefill-max-requests", "2"],
    ],
    ids=lambda flags: "-".join(flags).strip("-"),
)
def test_the_quota_goes_together_with(
    plain: Plain, model: Models, tmp_path: Path, flags: list[str]
) -> None:
    with recorded(model("qwen3"), tmp_path, *flags, quota=plain.profile) as server:
        same(answers(server, PROMPTS), plain.answers)
        # Decodes beside it, and prompts of which a part is cached.
        decode = Background(server.generate, SHORT[0], 100)
        again = [[*p, *random_tokens(30, seed=50 + i)] for i, p in enumerate(PROMPTS)]
        assert all(len(a.tokens) == 8 for a in answers(server, again))
        assert len(decode.result().tokens) == 100
    found = batches(tmp_path)
    if "--enable-mixed-chunk" in flags:  # decodes that are mixed in are not part of the quota
        found = [b for b in found if all(w.new > 1 for w in b.requests)]
    assert not over_quota(found)


@slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2", "mellum"])
def test_other_models(kind: str, model: Models, tmp_path: Path) -> None:
    with recorded(model(kind), tmp_path / "plain") as server:
        wanted = answers(server, PROMPTS)
    profile = made_up_profile(tmp_path / "plain", tmp_path / "p.json")
    with recorded(model(kind), tmp_path, quota=profile) as server:
        same(answers(server, PROMPTS), wanted)
    assert not over_quota(batches(tmp_path))
    assert over_quota(batches(tmp_path / "plain"))


@slow
def test_two_ranks_cut_alike(model: Models, tmp_path: Path) -> None:
    flags = ("--tp-size", "2")
    with recorded(model("qwen3"), tmp_path / "plain", *flags) as server:
        wanted = answers(server, PROMPTS)
    profile = made_up_profile(tmp_path / "plain", tmp_path / "p.json")
    with recorded(model("qwen3"), tmp_path, *flags, quota=profile) as server:
        same(answers(server, PROMPTS), wanted)
    assert header(tmp_path).key.tp == 2
    assert not over_quota(batches(tmp_path))


@slow
@pytest.mark.parametrize("hicache", [False, True], ids=["streaming", "hicache"])
def test_hits_of_storage_are_packed_as_what_they_are(
    plain: Plain, model: Models, tmp_path: Path, hicache: bool
) -> None:
    """The settings are those of the backend's JSON here."""
    settings = {
        "root": str(tmp_path / "store"),
        "capacity": "256MiB",
        "prefill_quota_s": QUOTA_S,
        "prefill_profile": str(plain.profile),
        "prefetch_threshold": PAGE_TOKENS,
    }
    flags = [
        *("--hicache-storage-backend", "dualpath"),
        *("--hicache-storage-backend-extra-config", json.dumps(settings)),
    ]
    if hicache:
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        flags += ["--hicache-write-policy", "write_through"]
    with recorded(model("qwen3"), tmp_path, *flags) as server:
        same(answers(server, PROMPTS), plain.answers)
        server.flush()
        again = answers(server, PROMPTS)
        same(again, plain.answers)
        assert sum(answer.cached.storage for answer in again) > 2000
    found = batches(tmp_path)
    assert not over_quota(found)
    assert all(b.predicted_s for b in found)


# Launches that end with a sentence.


def refused(server: Server) -> str:
    with pytest.raises(ServerError), server:
        pass
    return server.log.read_text(errors="replace")


@slow
def test_a_prefill_server_of_a_pair_keeps_to_it(
    plain: Plain, model: Models, tmp_path: Path
) -> None:
    env = {
        "DUALPATH_PREFILL_TRACE": str(tmp_path / "trace"),
        "DUALPATH_PREFILL_QUOTA_S": str(QUOTA_S),
        "DUALPATH_PREFILL_PROFILE": str(plain.profile),
    }
    roles = ("prefill", "decode")
    with (
        PdCluster(
            model("qwen3"),
            tmp_path,
            flags=dict.fromkeys(roles, FLAGS),
            role_env={"prefill": env},
        ) as cluster,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        found = list(pool.map(lambda prompt: cluster.generate(prompt, 8), PROMPTS))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain.answers]
    assert not over_quota(batches(tmp_path))
    assert any(batch.cut for batch in batches(tmp_path))


@slow
def test_a_profile_of_another_model_is_refused(plain: Plain, model: Models, tmp_path: Path) -> None:
    log = refused(recorded(model("llama"), tmp_path, quota=plain.profile))
    assert "is of another model: Qwen3ForCausalLM" in log
    assert "run dualpath profile with this server's flags" in log


@slow
def test_a_server_without_its_profile_is_refused(model: Models, tmp_path: Path) -> None:
    env = {"DUALPATH_PREFILL_QUOTA_S": "1", "DUALPATH_ROOT": str(tmp_path / "root")}
    log = refused(recorded(model("qwen3"), tmp_path, env=env))
    assert f"There is no profile {tmp_path / 'root' / 'profiles'}" in log


@slow
def test_a_server_that_cuts_nothing_is_refused(plain: Plain, model: Models, tmp_path: Path) -> None:
    flags = ("--chunked-prefill-size", "-1")
    log = refused(recorded(model("qwen3"), tmp_path, *flags, quota=plain.profile))
    assert "cuts prompts by chunked prefill, which is off on this server" in log


def test_a_profile_that_does_not_fit_says_so_before_anything_is_cut(plain: Plain) -> None:
    profile = load(plain.profile)
    assert profile.key == header(plain.folder).key
    profile.require(header(plain.folder).key, plain.profile)
    other = replace(profile.key, model="other")
    with pytest.raises(ValueError, match="another model"):
        profile.require(other, plain.profile)
