"""What the flag means among SGLang's launch arguments, resolved by SGLang itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.config import ConfigError

Resolve = Callable[..., Any]
BASE = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]


@pytest.fixture
def resolve(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """`resolve(*flags)`: the arguments as the launcher has them before it starts anything."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # pytest's handlers stay

    def run(*flags: str, backend: str | None = "dualpath", kind: str = "qwen3") -> Any:
        chosen = ["--hicache-storage-backend", backend] if backend else []
        args = prepare_server_args(["--model-path", str(model(kind)), *BASE, *chosen, *flags])
        args.resolve_once()
        return resolving_view(args)

    return run


def test_with_the_hierarchical_cache_it_is_a_storage_backend(resolve: Resolve) -> None:
    view = resolve("--enable-hierarchical-cache")
    assert not view.enable_unified_cache_external_linker
    assert view.page_size == 64
    assert (view.hicache_mem_layout, view.hicache_io_backend) == ("page_first_direct", "direct")
    assert view.hicache_storage_backend == "dualpath"


def test_servers_that_do_not_ask_for_it_are_left_alone(resolve: Resolve) -> None:
    view = resolve(backend=None)
    assert not view.enable_hierarchical_cache
    assert (view.page_size, view.hicache_mem_layout) == (1, "page_first")
    view = resolve("--enable-hierarchical-cache", backend="file")
    assert (view.page_size, view.hicache_mem_layout) == (1, "page_first")


@pytest.mark.parametrize(
    ("flags", "layout", "io"),
    [
        (["--hicache-mem-layout", "page_first"], "page_first", "kernel"),
        (["--hicache-mem-layout=page_first"], "page_first", "kernel"),
        (["--hicache-mem", "page_first"], "page_first", "kernel"),
        (["--hicache-mem-layout", "layer_first"], "layer_first", "kernel"),
        (["--hicache-io-backend", "kernel"], "page_first", "kernel"),
        (["--hicache-io-backend", "direct"], "page_first_direct", "direct"),
        (
            ["--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct"],
            "layer_first",
            "direct",
        ),
    ],
)
def test_a_layout_or_copy_that_the_user_chose_stays(
    flags: list[str], layout: str, io: str, resolve: Resolve
) -> None:
    view = resolve("--enable-hierarchical-cache", *flags)
    assert (view.hicache_mem_layout, view.hicache_io_backend) == (layout, io)


def test_a_page_size_that_the_user_chose_stays(resolve: Resolve) -> None:
    assert resolve("--page-size", "16").page_size == 16


def test_a_page_size_that_would_not_fit_is_not_forced(resolve: Resolve) -> None:
    assert resolve("--chunked-prefill-size", "1000").page_size == 1


def test_an_engine_gets_the_same_defaults(model: Callable[..., Path]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    def engine(**fields: Any) -> Any:
        args = ServerArgs(
            model_path=str(model("qwen3")), device="cpu", attention_backend="torch_native",
            hicache_storage_backend="dualpath", **fields,
        )  # fmt: skip
        args._launch_command = f"Engine({', '.join(f'{k}={v!r}' for k, v in fields.items())})"
        args.resolve_once()
        return resolving_view(args)

    view = engine(enable_hierarchical_cache=True)
    assert (view.hicache_storage_backend, view.page_size) == ("dualpath", 64)
    assert view.hicache_mem_layout == "page_first_direct"
    chosen = engine(enable_hierarchical_cache=True, hicache_mem_layout="page_first")
    assert chosen.hicache_mem_layout == "page_first"
    view = engine()
    assert (view.enable_unified_cache_external_linker, view.page_size) == (True, 64)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ('{"capcity": "1GiB"}', 'no setting "capcity".* did you mean "capacity"'),
        ('{"capacity": "plenty"}', '"capacity" must be a size such as "100GiB"'),
        ('{"capacity": ', "cannot read --hicache-storage-backend-extra-config"),
        ("[1]", "cannot read --hicache-storage-backend-extra-config"),
        ("@/nowhere/settings.toml", "cannot read --hicache-storage-backend-extra-config"),
        ('{"index": "redis://a,b"}', "index names several Redis servers"),
        ('{"stall_budget_s": 0}', '"stall_budget_s" must be a number of seconds above 0'),
    ],
)
def test_settings_are_refused_before_a_model_is_loaded(
    settings: str, sentence: str, resolve: Resolve
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve("--hicache-storage-backend-extra-config", settings)


def test_settings_may_stand_in_a_file(resolve: Resolve, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.toml"
    good.write_text(json.dumps({"capacity": "1GiB", "prefetch_threshold": 16}))
    bad.write_text("io_thread = 3\n")
    resolve("--hicache-storage-backend-extra-config", f"@{good}")
    with pytest.raises(ConfigError, match='did you mean "io_threads"'):
        resolve("--hicache-storage-backend-extra-config", f"@{bad}")


def test_without_a_radix_cache_there_is_nothing_to_keep(resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match="leave out --disable-radix-cache"):
        resolve("--disable-radix-cache")


def test_without_the_hierarchical_cache_it_streams(resolve: Resolve) -> None:
    settings = {"capacity": "1GiB", "load_timeout_s": 3}
    view = resolve("--hicache-storage-backend-extra-config", json.dumps(settings))
    assert view.enable_unified_cache_external_linker
    assert not view.enable_hierarchical_cache
    assert view.hicache_storage_backend is None
    assert view.page_size == 64
    assert view.unified_cache_external_linker_config == {
        "linker": "DualPathLinker",
        "linker_module_path": "dualpath_sglang.linker",
        "linker_extra_config": settings,
    }


@pytest.mark.parametrize("flags", [["--pp-size", "2"]])
def test_where_it_cannot_stream_it_turns_the_hierarchical_cache_on(
    flags: list[str], resolve: Resolve
) -> None:
    view = resolve(*flags)
    assert view.enable_hierarchical_cache
    assert not view.enable_unified_cache_external_linker
    assert view.hicache_storage_backend == "dualpath"


DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp")
POLICY = "--hicache-storage-prefetch-policy"


def test_a_decode_server_restores_prefixes(resolve: Resolve) -> None:
    view = resolve(*DECODE)
    assert view.enable_hierarchical_cache
    assert view.disaggregation_decode_enable_radix_cache
    assert not view.disable_radix_cache
    assert not view.enable_unified_cache_external_linker
    assert view.hicache_storage_backend == "dualpath"
    assert view.hicache_mem_layout == "page_first_direct"
    assert view.page_size == 64


def test_a_decode_server_waits_for_what_prefill_does_not_send(resolve: Resolve) -> None:
    restores = [
        *DECODE,
        "--disaggregation-decode-enable-radix-cache",
        "--enable-hierarchical-cache",
    ]
    assert resolve(*restores).hicache_storage_prefetch_policy == "wait_complete"
    assert resolve(*restores, POLICY, "timeout").hicache_storage_prefetch_policy == "timeout"
    assert (
        resolve(*restores, POLICY, "best_effort").hicache_storage_prefetch_policy == "best_effort"
    )
    assert resolve("--enable-hierarchical-cache").hicache_storage_prefetch_policy == "timeout"


def test_a_decode_server_that_is_to_store_only_does_that(resolve: Resolve) -> None:
    view = resolve(*DECODE, "--disaggregation-decode-enable-offload-kvcache")
    assert not view.enable_hierarchical_cache
    assert not view.disaggregation_decode_enable_radix_cache


@pytest.mark.parametrize(
    "flags",
    [
        ["--disaggregation-decode-retraction-backup", "host_pool"],
        ["--disaggregation-decode-allocation-policy", "prefill_complete"],
    ],
)
def test_a_decode_server_that_cannot_restore_is_left_alone(
    flags: list[str], resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    view = resolve(*DECODE, *flags)
    assert not view.enable_hierarchical_cache
    assert "DualPath is idle on this decode server" in caplog.text


def test_a_decode_server_of_a_model_with_sliding_windows_is_left_alone(
    resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    assert not resolve(*DECODE, kind="mellum").enable_hierarchical_cache
    assert "sliding-window layers" in caplog.text


def test_a_prefill_server_streams(resolve: Resolve) -> None:
    view = resolve("--disaggregation-mode", "prefill", *DECODE[2:])
    assert view.enable_unified_cache_external_linker
    assert not view.enable_hierarchical_cache
