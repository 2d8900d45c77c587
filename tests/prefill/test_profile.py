"""What is measured, fitted, kept and refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_sglang.prefill import fit, sweep
from dualpath_sglang.prefill.engine import environment_for_measuring, flags_for_measuring
from dualpath_sglang.prefill.fit import FitError, Point
from dualpath_sglang.prefill.profile import (
    Profile,
    ProfileError,
    ProfileKey,
    default_path,
    load,
)
from dualpath_sglang.prefill.trace import Batch, Header, TraceWriter, read_batches, read_header
from dualpath_sglang.scheduling.quota import AttentionModel, Work

KEY = ProfileKey("Qwen3:abc", "H200", "fa3", 4, "bfloat16", "0.5.23")
MODEL = AttentionModel(1e-3, 1e-4, 1e-6, 1e-7, 1e-9, 0.0)
PROFILE = Profile(KEY, MODEL, points=40, held_out=12, error=0.04, error_p90=0.1, most_tokens=8192)
GRID = [
    (Work(cached, new),) * count
    for cached in (0, 512, 2048, 8192)
    for new in (16, 256, 1024)
    for count in (1, 3)
]


def points(model: AttentionModel, noise: float = 0.0, seed: int = 0) -> list[Point]:
    source = random.Random(seed)
    return [
        Point(batch, model.predict(batch) * (1 + source.uniform(-noise, noise))) for batch in GRID
    ]


# Fitting.


@given(st.tuples(*[st.sampled_from([0.0, 1.0]) for _ in range(6)]).filter(any))
def test_a_fit_finds_the_times_that_made_the_points(on: tuple[float, ...]) -> None:
    scale = (1e-3, 1e-4, 1e-6, 1e-7, 1e-9, 1e-9)
    made = points(AttentionModel(*(a * b for a, b in zip(on, scale, strict=True))))
    assert fit.errors(fit.fit(made), made).p90 < 1e-6


def test_a_fit_bears_noise_and_is_never_negative() -> None:
    made = points(MODEL, noise=0.1)
    rest, check = fit.held_out(made)
    assert not {p.batch for p in rest} & {p.batch for p in check}
    assert len(rest) + len(check) == len(made)
    found = fit.fit(rest)
    assert fit.errors(found, check).median < 0.1


def test_what_falls_with_more_work_is_fitted_without_negative_times() -> None:
    made = [Point((Work(0, n),), 1.0 / n) for n in range(1, 40)]
    model = fit.fit(made)
    assert model.request(Work(0, 1)) <= model.request(Work(0, 39))


def test_too_few_points_are_refused() -> None:
    with pytest.raises(FitError, match="3 batches were measured"):
        fit.fit(points(MODEL)[:3])


def test_a_slow_moment_does_not_count() -> None:
    batch = (Work(0, 16),)
    assert fit.medians([Point(batch, s) for s in (1.0, 1.1, 50.0)]) == [Point(batch, 1.1)]


# The file.


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = default_path(tmp_path, KEY)
    PROFILE.save(path)
    assert load(path) == PROFILE
    load(path).require(KEY, path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "Llama:abc"}, "another model"),
        ({"device": "H100"}, "another device"),
        ({"attention_backend": "triton"}, "another attention backend"),
        ({"tp": 8}, "another number of tensor-parallel ranks"),
        ({"dtype": "float16"}, "another dtype"),
        ({"sglang": "0.5.24"}, "another version of SGLang"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    other = replace(KEY, **change)
    with pytest.raises(ProfileError, match=f"is of {words}: .*run dualpath profile"):
        PROFILE.require(other, tmp_path / "p.json")
    assert default_path(tmp_path, other) != default_path(tmp_path, KEY)


def test_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"There is no profile .*run dualpath profile"):
        load(tmp_path / "missing.json")


def damaged() -> list[Any]:
    good = {"form": "dualpath-profile-1", **json.loads(json.dumps(_as_dict(PROFILE)))}
    return [
        [],
        "text",
        {},
        {**good, "form": "dualpath-profile-0"},
        {**good, "more": 1},
        {k: v for k, v in good.items() if k != "model"},
        {**good, "model": {**good["model"], "pair_s": -1.0}},
        {**good, "model": {**good["model"], "pair_s": "1"}},
        {**good, "model": dict.fromkeys(good["model"], 0.0)},
        {**good, "model": {**good["model"], "pair_s": float("nan")}},
        {**good, "error": "small"},
        {**good, "points": 1.5},
        {**good, "key": {}},
    ]


def _as_dict(profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(profile)


@pytest.mark.parametrize("content", damaged(), ids=range(len(damaged())))
def test_a_damaged_profile_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="cannot be used"):
        load(path)


def test_what_is_no_profile_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for content in (b"", b"\xff\xfe", b"{", b" " * (2 << 20)):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="cannot be used"):
            load(path)


# The trace.


def test_a_trace_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace"
    assert read_header(path) is None
    assert read_batches(path) == []
    header = Header(KEY, 16, 2048, 8000)
    writer = TraceWriter(path, header)
    batch = Batch((Work(0, 16), Work(16, 1)), 0.1, None, 0.3, cut=True)
    writer.write(batch)
    with path.open("a") as file:
        file.write('{"requests": [[0, ')  # a line that is being written
    assert read_header(path) == header
    assert read_batches(path) == [batch]


# The sweep and the engine.


@pytest.mark.parametrize("chunk", [None, 64, 2048])
@pytest.mark.parametrize("most", [256, 4000, 1 << 20])
def test_a_sweep_asks_for_what_the_server_takes(chunk: int | None, most: int) -> None:
    header = Header(KEY, 16, chunk, 16000)
    asks = sweep.plan(header, most, seed=1)
    assert len({ask.prompts for ask in asks}) == len(asks) > 20
    assert all(0 < len(p) < min(most, 16000) for ask in asks for p in ask.prompts)
    longest = max(len(p) for ask in asks for p in ask.prompts)
    assert longest > 0.9 * min(most, 16000) - 64


def test_the_measured_server_shares_nothing_and_waits_for_nobody() -> None:
    flags = [
        *("--model-path", "m", "--hicache-storage-backend", "dualpath"),
        *("--hicache-storage-backend-extra-config", '{"root": "/x"}', "--tp-size", "4"),
        *("--disaggregation-mode", "prefill", "--port=1", "--trust-remote-code", "--host", "h"),
    ]
    assert flags_for_measuring(flags) == [
        *("--model-path", "m", "--tp-size", "4", "--trust-remote-code", "--page-size", "64")
    ]
    assert flags_for_measuring(["--model-path", "m"]) == ["--model-path", "m"]
    given = {"DUALPATH_PREFILL_QUOTA_S": "1", "DUALPATH_CONFIG_FILE": "f", "HOME": "/h"}
    assert environment_for_measuring(given, Path("/t")) == {
        "HOME": "/h",
        "DUALPATH_PREFILL_TRACE": "/t",
        "DUALPATH_NODE": "off",
    }
