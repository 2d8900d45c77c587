from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.index.source import EmbeddedSource, RedisSource
from dualpath_sglang.node.options import NodeError, NodeOptions
from tests.support.certificates import authority, certificate


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
        ("node", "on"),
        ("node", 1),
        ("node_dir", ""),
        ("node_name", ""),
        ("node_listen", ""),
        ("node_listen", "host:port"),
        ("node_listen", "host:99999"),
        ("node_listen", "10.82.0.0/33"),
        ("node_listen", "[10.82.0.1"),
        ("node_listen", "a host"),
        ("node_memory", "1KiB"),
        ("node_dscp", 64),
        ("node_dscp", -1),
        ("node_tls_ca", ""),
        ("read_paths", "both"),
        ("hedge_after", 0),
        ("hedge_after", 1.01),
        ("prefill_quota_s", 0),
        ("prefill_quota_share", 0.95),
        ("prefill_quota_share", -0.1),
        ("prefill_profile", ""),
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


REDIS = {"index": "redis://user:s3cret@host:7000/2"}


def node_options(**extra: Any) -> NodeOptions:
    options = load(**REDIS, **extra).node_options()
    assert options is not None
    return options


def test_an_agent_needs_an_index_on_the_network() -> None:
    assert load().node_options() is None
    options = node_options()
    assert options.automatic
    assert (options.memory_bytes, options.dscp, options.secret) == (4 << 30, 8, b"")
    assert options.index_address == ("host", 7000)
    assert not node_options(node="off").automatic
    assert not node_options(node=False).automatic


def test_a_store_is_known_by_its_root_and_its_index_alone(tmp_path: Path) -> None:
    one = node_options(root=str(tmp_path))
    assert "s3cret" not in one.store
    assert "user" not in one.store
    other_user = load(root=f"{tmp_path}/x/..", index="redis://host:7000/2").node_options()
    assert other_user is not None and other_user.store == one.store
    assert node_options(root=str(tmp_path / "x")).store != one.store
    other_index = load(root=str(tmp_path), index="redis://host:7000/3").node_options()
    assert other_index is not None and other_index.store != one.store


SECRET = "s3cret-and-long-enough"


def test_the_secret_of_the_nodes_is_never_repeated(tmp_path: Path) -> None:
    assert "s3cret" not in refusal(node_secret="s3cret")
    assert "16 characters" in refusal(node_secret="s3cret")
    config = load(node_secret=SECRET, **REDIS)
    assert SECRET not in repr(config)
    options = node_options(node_secret=SECRET)
    assert SECRET not in repr(options)
    assert options.secret == SECRET.encode()
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        node_options(node_secret_file=str(file))
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="16 characters") as caught:
        node_options(node_secret_file=str(file))
    assert "short" not in str(caught.value)
    file.write_text(f"{SECRET}\nmore\n")
    assert node_options(node_secret_file=str(file)).secret == SECRET.encode()


def test_the_files_of_tls_go_together(tmp_path: Path) -> None:
    sentence = refusal(node_tls_cert="/a", node_tls_ca="/b")
    assert "go together, and node_tls_key is not set" in sentence
    options = node_options(node_tls_cert="/a", node_tls_key="/b", node_tls_ca="/c")
    with pytest.raises(NodeError, match="cannot be used"):
        options.server_tls()
    ca = authority(tmp_path)
    cert, key = certificate(ca, "node", "127.0.0.1")
    files = {"node_tls_cert": str(cert), "node_tls_key": str(key), "node_tls_ca": str(ca)}
    options = node_options(**files)
    assert options.server_tls() is not None and options.client_tls() is not None
    assert node_options().server_tls() is None


def test_a_configuration_can_be_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dualpath.toml"
    file.write_text('capacity = "12.5%"\nmin_free = "1%"\nnode_dir = "relative"\n')
    monkeypatch.setenv("DUALPATH_NODE_SECRET", SECRET)
    config = load(config_file=str(file), index_password="p", io_threads=3, **REDIS)
    handed = json.loads(json.dumps(config.handed_over()))
    monkeypatch.delenv("DUALPATH_NODE_SECRET")
    file.unlink()
    monkeypatch.chdir("/")
    again = load(**handed)
    assert again.capacity == 0.125
    assert again.min_free == 0.01
    assert again.io_threads == 3
    assert again.node_dir is not None and again.node_dir.is_absolute()
    assert password_of(again) == "p"
    assert again.node_options() == replace(options_of(config), directory=again.node_dir)


def options_of(config: DualPathConfig) -> NodeOptions:
    options = config.node_options()
    assert options is not None
    return options
