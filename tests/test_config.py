from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.index.source import EmbeddedSource, RedisSource


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("DUALPATH_")]:
        monkeypatch.delenv(name)


def load(**extra: Any) -> DualPathConfig:
    return DualPathConfig.load(extra)


def refusal(**extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**extra)
    return str(caught.value)


def test_every_setting_has_a_default_and_a_description_of_what_it_takes() -> None:
    from dualpath_sglang.config import _EXPECTED

    assert set(_EXPECTED) == set(DualPathConfig.model_fields)
    options = load().store_options()
    assert options.root.is_absolute()
    assert options.capacity_bytes is None and options.capacity_fraction == 0.8


def test_a_setting_reaches_the_store(tmp_path: Path) -> None:
    options = load(
        root=str(tmp_path),
        capacity="100GiB",
        min_free="10%",
        segment_size="64MiB",
        io_threads=3,
        direct_io=False,
        durability="fdatasync",
        read_timeout_s=1,
        write_timeout_s=2.5,
        lookup_timeout_s=0.5,
        max_io_size="1MiB",
        read_only=True,
    ).store_options()
    assert options.root == tmp_path
    assert (options.capacity_bytes, options.min_free_fraction) == (100 << 30, 0.1)
    assert (options.segment_bytes, options.io_threads, options.direct_io) == (64 << 20, 3, "off")
    assert (options.durability, options.max_io_bytes) == ("fdatasync", 1 << 20)
    assert (options.read_timeout_s, options.write_timeout_s, options.lookup_timeout_s) == (
        1,
        2.5,
        0.5,
    )
    assert options.read_only


@pytest.mark.parametrize(
    ("capacity", "in_bytes", "share"),
    [("100GiB", 100 << 30, 0.8), (4096, 4096, 0.8), ("2 GB", 2 * 10**9, 0.8), ("80%", None, 0.8),
     ("12.5 %", None, 0.125), (0.5, None, 0.5)],
)  # fmt: skip
def test_capacity_is_a_size_or_a_share(capacity: Any, in_bytes: int | None, share: float) -> None:
    options = load(capacity=capacity).store_options()
    assert (options.capacity_bytes, options.capacity_fraction) == (in_bytes, share)


def test_what_sglang_reads_itself_is_passed_over() -> None:
    load(
        prefetch_threshold=16,
        prefetch_timeout_base=1,
        prefetch_timeout_per_ki_token=0.1,
        hicache_storage_pass_prefix_keys=True,
        tp_lcm_size=8,
        backend_name="dualpath",
        module_path="m",
        class_name="c",
        interface_v1=1,
    )


def test_sources_have_their_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dualpath.toml"
    file.write_text('namespace = "file"\nmodel_id = "file"\nio_threads = 4\n')
    monkeypatch.setenv("DUALPATH_CONFIG_FILE", str(file))
    monkeypatch.setenv("DUALPATH_NAMESPACE", "environment")
    monkeypatch.setenv("DUALPATH_MODEL_ID", "environment")
    config = load(namespace="json")
    assert (config.namespace, config.model_id, config.io_threads) == ("json", "environment", 4)
    assert load(config_file=str(file)).io_threads == 4


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    assert refusal(capcity="1GiB") == (
        'DualPath has no setting "capcity", which stands in the storage backend\'s extra '
        'configuration; did you mean "capacity", a size such as "100GiB", a number of bytes, or '
        'a share such as "80%"?'
    )
    assert "there are root, capacity," in refusal(zzz=1)


def test_an_unknown_setting_is_refused_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dualpath.toml"
    file.write_text("io_thread = 4\n")
    assert f'"io_thread", which stands in the file {file}; did you mean "io_threads"' in refusal(
        config_file=str(file)
    )
    monkeypatch.setenv("DUALPATH_RAED_ONLY", "1")
    assert '"raed_only", which stands in the environment' in refusal()
    assert 'did you mean "read_only"' in refusal()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", "plenty"),
        ("capacity", "180%"),
        ("capacity", "0%"),
        ("capacity", 0),
        ("capacity", True),
        ("capacity", 1.5),
        ("capacity", None),
        ("min_free", "lots"),
        ("min_free", "100%"),
        ("segment_size", "1KiB"),
        ("io_threads", "many"),
        ("io_threads", 0),
        ("io_threads", 257),
        ("direct_io", "maybe"),
        ("durability", "fsync"),
        ("read_timeout_s", 0),
        ("write_timeout_s", "soon"),
        ("lookup_timeout_s", -1),
        ("max_io_size", "1KiB"),
        ("read_only", "perhaps"),
        ("namespace", ""),
        ("model_id", ""),
        ("weights_revision", ""),
        ("root", ""),
        ("root", 7),
    ],
)
def test_a_malformed_value_is_refused_with_what_was_expected(name: str, value: Any) -> None:
    sentence = refusal(**{name: value})
    assert sentence.startswith(f'DualPath\'s setting "{name}" must be ')
    assert sentence.endswith(f", not {value!r}.")
    assert "\n" not in sentence


def test_a_configuration_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    assert "is not a file" in refusal(config_file=str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("capacity ==")
    assert "is no valid TOML" in refusal(config_file=str(broken))
    broken.write_text('capacity = "plenty"')
    assert '"capacity" must be a size' in refusal(config_file=str(broken))


def test_the_index_is_a_file_or_a_redis() -> None:
    assert isinstance(DualPathConfig.load({}).index_source(), EmbeddedSource)
    config = DualPathConfig.load({"index": "redis://cache.example:7000/2"})
    assert isinstance(config.index_source(), RedisSource)


@pytest.mark.parametrize(
    "address", ["memcached://host", "redis://", "redis://a,b", "redis+sentinel://host", "sqlite"]
)
def test_an_address_that_is_no_index_is_refused_with_a_sentence(address: str) -> None:
    assert refusal(index=address).startswith("DualPath's index ")


def password_of(config: DualPathConfig) -> str:
    source = config.index_source()
    assert isinstance(source, RedisSource)
    return source.settings.password


def test_a_password_is_never_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = "redis://user:s3cret@host:port"
    assert "s3cret" not in refusal(index=address)
    monkeypatch.setenv("DUALPATH_INDEX_PASSWORD", "s3cret")
    config = DualPathConfig.load({"index": "redis://host"})
    assert "s3cret" not in repr(config)
    assert password_of(config) == "s3cret"
    monkeypatch.delenv("DUALPATH_INDEX_PASSWORD")
    with pytest.raises(ConfigError, match="cannot be read"):
        DualPathConfig.load(
            {"index": "redis://host", "index_password_file": str(tmp_path / "none")}
        ).index_source()
    file = tmp_path / "password"
    file.write_text("other\n")
    config = DualPathConfig.load({"index": "redis://host", "index_password_file": str(file)})
    assert password_of(config) == "other"
