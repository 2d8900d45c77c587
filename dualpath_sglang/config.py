"""The one configuration of DualPath: typed, validated, from three sources.

| priority | source |
|---|---|
| 1 | the JSON of ``--hicache-storage-backend-extra-config`` |
| 2 | environment variables ``DUALPATH_<NAME>`` |
| 3 | a TOML file, named by ``config_file`` (in 1) or ``DUALPATH_CONFIG_FILE`` (in 2) |

Anything unknown or malformed is refused with one sentence: a typo in ``capacity`` must not
become an unbounded cache. Keys of SGLang's own, which travel in the same JSON, are passed over.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from dualpath_sglang.index.redis.settings import IndexAddressError, RedisSettings
from dualpath_sglang.index.source import EmbeddedSource, IndexSource, RedisSource
from dualpath_sglang.node.listen import ListenSpec
from dualpath_sglang.node.options import NodeOptions
from dualpath_sglang.sizes import parse_size
from dualpath_sglang.streaming.options import StreamOptions
from dualpath_storage.options import StoreOptions

ENV_PREFIX = "DUALPATH_"
DEFAULT_CAPACITY = 0.8
"""Share of the file system when the operator names no capacity."""

FRAMEWORK_KEYS = frozenset(
    {
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""What SGLang itself reads, or puts, in a storage backend's extra configuration."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one plain sentence for the operator."""


def _share(value: Any) -> float:
    """A fraction from ``5%`` or from a number in 0..1."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no share")
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip()[:-1]) / 100
    return float(value)


def _capacity(value: Any) -> int | float:
    """Bytes as ``int``, or a share of the file system as ``float`` in 0..1."""
    if isinstance(value, float) or (isinstance(value, str) and value.strip().endswith("%")):
        share = _share(value)
        if not 0 < share <= 1:
            raise ValueError("a share lies above 0 and is at most the whole")
        return share
    size = parse_size(value)
    if size < 1:
        raise ValueError("nothing can be kept in no bytes")
    return size


def _path(value: Any) -> Any:
    """An empty text would silently be the working directory."""
    if value == "":
        raise ValueError("a path has at least one character")
    return value


def _switch(value: Any) -> Any:
    """JSON's true and false beside the words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, Field(gt=0)]

_LEAST_SECRET = 16
"""Who listens to a connection may try short ones out."""

_EXPECTED = {
    "root": "the path of a directory",
    "capacity": 'a size such as "100GiB", a number of bytes, or a share such as "80%"',
    "min_free": 'a share of the file system such as "5%"',
    "segment_size": 'a size of at least 8 KiB such as "256MiB"',
    "io_threads": "a whole number from 1 to 256",
    "direct_io": '"auto", "on" or "off"',
    "durability": '"none" or "fdatasync"',
    "read_timeout_s": "a number of seconds above 0",
    "write_timeout_s": "a number of seconds above 0",
    "lookup_timeout_s": "a number of seconds above 0",
    "max_io_size": 'a size of at least 4 KiB such as "2MiB"',
    "read_only": "true or false",
    "namespace": "a text that is not empty",
    "model_id": "a text that is not empty",
    "weights_revision": "a text that is not empty",
    "index": '"embedded", or the address of a Redis such as "redis://host:6379"',
    "index_password": "a text",
    "index_password_file": "the path of a file",
    "index_timeout_s": "a number of seconds above 0",
    "config_file": "the path of a TOML file",
    "stream_staging": 'a size of at least 64 KiB such as "256MiB"',
    "stream_queue_depth": "a whole number from 1 to 256",
    "stream_io_size": 'a size such as "1MiB"',
    "stream_first_io_size": 'a size such as "64KiB"',
    "stream_piece_size": 'a size such as "4MiB"',
    "stream_probe_s": "a number of seconds, 0 to measure nothing",
    "load_timeout_s": "a number of seconds above 0",
    "stall_budget_s": "a number of seconds above 0",
    "lookup_wait_s": "a number of seconds above 0",
    "node": '"auto" or "off"',
    "node_dir": "the path of a directory",
    "node_name": "a text that is not empty",
    "node_listen": '"auto", a host or address, "host:port", or a network such as "10.82.0.0/24"',
    "node_secret": f"a text of at least {_LEAST_SECRET} characters",
    "node_secret_file": "the path of a file",
    "node_memory": 'a size of at least 1 MiB such as "4GiB"',
    "node_dscp": "a whole number from 0 to 63",
    "node_tls_cert": "the path of a file",
    "node_tls_key": "the path of a file",
    "node_tls_ca": "the path of a file",
    "read_paths": '"split", "shorter_queue", "local" or "peer"',
    "split_floor": 'a size such as "1MiB"',
    "hedge_after": "a share above 0 and at most 1, such as 0.25",
    "prefill_quota_s": "a number of seconds above 0",
    "prefill_quota_share": 'a share from 0 to 0.9 such as "50%"',
    "prefill_profile": "the path of a file",
    "prefill_trace": "the path of a file",
}


_SECRET = ("index", "index_password", "node_secret")
"""Settings that may hold a password: never repeated."""
_TLS = ("node_tls_cert", "node_tls_key", "node_tls_ca")


def _index(value: str) -> str:
    """Refuse an address now rather than when it is used; never with a word of its own."""
    if value != "embedded":
        RedisSettings.parse(value)  # its error is a ValueError
    return value


def _listen(value: str) -> str:
    ListenSpec.parse(value)  # its error is a ValueError
    return value


def _off(value: Any) -> Any:
    """JSON's false beside the word."""
    return {True: "auto", False: "off"}[value] if isinstance(value, bool) else value


class DualPathConfig(BaseSettings):
    """Every setting of DualPath; use :meth:`load`, which refuses with a sentence.

    Args:
        root: directory of the store.
        capacity: most bytes that the store may take: a size, or a share of the file system.
        min_free: share of the file system that stays free whatever the capacity says.
        segment_size: bytes of a new segment file; unset chooses by capacity.
        io_threads: reads in flight, and as many writes.
        direct_io: ``auto`` probes the mount; ``on`` refuses a mount without O_DIRECT.
        durability: ``fdatasync`` makes each batch durable before it can be found.
        read_timeout_s, write_timeout_s, lookup_timeout_s: deadlines of one call.
        max_io_size: neighbouring blocks merge into one I/O up to this size.
        read_only: never write.
        namespace: the operator's name for a tenant; nothing is shared across namespaces.
        model_id: stands for the model's configuration in the identity of blocks.
        weights_revision: stands for the fingerprint of the weights in the identity of blocks.
        index: where the metadata lives: ``embedded`` is a file beside the store, for one machine;
            the address of a Redis, for all that have the store mounted.
        index_password: of Redis; better from the environment than from a command line.
        index_password_file: the first line of this file is the password.
        index_timeout_s: how long Redis may take to answer a lookup, for each 1024 pages.
        config_file: TOML file with any of these settings.

    Streaming mode alone:

    Args:
        stream_staging: host memory that reads may hold at a time, allocated at start.
        stream_queue_depth: reads in flight.
        stream_io_size: bytes an I/O that give the device's full bandwidth; unset measures it.
        stream_first_io_size: smallest I/O, for the first layers.
        stream_piece_size: most bytes of one copy to the device.
        stream_probe_s: longest measurement of the device, once, in the background.
        load_timeout_s: longest load; what has not come by then is computed anew.
        stall_budget_s: longest wait for a load while other requests decode; a hit that would take
            longer is shortened, or computed anew.
        lookup_wait_s: longest time that a lookup keeps the scheduler.

    With the index on the network, the second path:

    Args:
        node: ``auto`` has a server start an agent on its machine when none runs there.
        node_dir: where the processes of one machine meet; unset chooses a directory of the user's.
        node_name: how this machine is called in reports; unset takes its host name.
        node_listen: where the agent listens: ``auto`` takes the address from which this machine
            reaches Redis; a network stands for the machine's own address in it.
        node_secret: what all nodes know; unset has them share a random one over the index.
        node_secret_file: the first line of this file is the secret.
        node_memory: most memory of the agent for blocks; taken as it is needed.
        node_dscp: traffic class of KV between nodes, 8 is CS1.
        node_tls_cert, node_tls_key, node_tls_ca: all, for encryption between nodes; or none.
        read_paths: which nodes read a hit: ``split`` it over all, the one with the
            ``shorter_queue``, only this one (``local``), only others (``peer``).
        split_floor: a smaller hit is read by one node.
        hedge_after: share of a load's deadline after which what a node has not brought is asked
            of another.

    Compute quota, for any server with the plugin:

    Args:
        prefill_quota_s: most seconds of attention, as predicted, in one prefill batch; unset
            leaves batches to SGLang.
        prefill_quota_share: part of each batch that a long prompt in parts leaves to short ones.
        prefill_profile: the file that ``dualpath profile`` has made; unset looks under the root.
        prefill_trace: file to which every prefill batch is written, with its attention time.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    root: Annotated[Path, BeforeValidator(_path)] = Path("~/.cache/dualpath")
    capacity: Annotated[int | float, BeforeValidator(_capacity)] = DEFAULT_CAPACITY
    min_free: Annotated[float, BeforeValidator(_share), Field(ge=0, lt=1)] = 0.05
    segment_size: Annotated[Size, Field(ge=8192)] | None = None
    io_threads: Annotated[int, Field(ge=1, le=256)] = 8
    direct_io: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    durability: Literal["none", "fdatasync"] = "none"
    read_timeout_s: Seconds = 10.0
    write_timeout_s: Seconds = 30.0
    lookup_timeout_s: Seconds = 1.0
    max_io_size: Annotated[Size, Field(ge=4096)] = 2 << 20
    read_only: bool = False
    namespace: Annotated[str, Field(min_length=1)] = "default"
    model_id: Annotated[str, Field(min_length=1)] | None = None
    weights_revision: Annotated[str, Field(min_length=1)] | None = None
    index: Annotated[str, AfterValidator(_index)] = "embedded"
    index_password: SecretStr | None = None
    index_password_file: Path | None = None
    index_timeout_s: Seconds = 0.005
    config_file: Path | None = None
    stream_staging: Annotated[Size, Field(ge=64 << 10)] = 256 << 20
    stream_queue_depth: Annotated[int, Field(ge=1, le=256)] = 8
    stream_io_size: Annotated[Size, Field(ge=1)] | None = None
    stream_first_io_size: Annotated[Size, Field(ge=1)] = 64 << 10
    stream_piece_size: Annotated[Size, Field(ge=1)] = 4 << 20
    stream_probe_s: Annotated[float, Field(ge=0)] = 0.3
    load_timeout_s: Seconds = 10.0
    stall_budget_s: Seconds = 1.0
    lookup_wait_s: Seconds = 0.005
    node: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = "auto"
    node_dir: Annotated[Path, BeforeValidator(_path)] | None = None
    node_name: Annotated[str, Field(min_length=1)] | None = None
    node_listen: Annotated[str, AfterValidator(_listen)] = "auto"
    node_secret: Annotated[SecretStr, Field(min_length=_LEAST_SECRET)] | None = None
    node_secret_file: Path | None = None
    node_memory: Annotated[Size, Field(ge=1 << 20)] = 4 << 30
    node_dscp: Annotated[int, Field(ge=0, le=63)] = 8
    node_tls_cert: Annotated[Path, BeforeValidator(_path)] | None = None
    node_tls_key: Annotated[Path, BeforeValidator(_path)] | None = None
    node_tls_ca: Annotated[Path, BeforeValidator(_path)] | None = None
    read_paths: Literal["split", "shorter_queue", "local", "peer"] = "split"
    split_floor: Annotated[Size, Field(ge=0)] = 1 << 20
    hedge_after: Annotated[float, Field(gt=0, le=1)] = 0.25
    prefill_quota_s: Seconds | None = None
    prefill_quota_share: Annotated[float, BeforeValidator(_share), Field(ge=0, le=0.9)] = 0.5
    prefill_profile: Annotated[Path, BeforeValidator(_path)] | None = None
    prefill_trace: Annotated[Path, BeforeValidator(_path)] | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Priority of the sources, and the TOML file that the first two may name."""
        del dotenv_settings, file_secret_settings
        file = init_settings().get("config_file") or env_settings().get("config_file")
        if file is None:
            return init_settings, env_settings
        toml = TomlConfigSettingsSource(settings_cls, toml_file=Path(file).expanduser())
        return init_settings, env_settings, toml

    @classmethod
    def load(cls, extra: Mapping[str, Any] | None = None) -> DualPathConfig:
        """The configuration of this process.

        Args:
            extra: what SGLang hands over as the backend's extra configuration.

        Raises:
            ConfigError: a key is unknown, or a value is not what the key needs.
        """
        own = {k: v for k, v in (extra or {}).items() if k not in FRAMEWORK_KEYS}
        _refuse_unknown(own, "the storage backend's extra configuration")
        names = (n[len(ENV_PREFIX) :].lower() for n in os.environ if n.startswith(ENV_PREFIX))
        _refuse_unknown(names, f"the environment as {ENV_PREFIX}<NAME>")
        file = own.get("config_file") or os.environ.get(f"{ENV_PREFIX}CONFIG_FILE")
        if file is not None:
            _check_file(file)
        try:
            config = cls(**own)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from error
        except SettingsError as error:
            raise ConfigError(f"DualPath cannot read its settings: {error}.") from error
        missing = [name for name in _TLS if getattr(config, name) is None]
        if 0 < len(missing) < len(_TLS):
            raise ConfigError(
                f"DualPath's settings {', '.join(_TLS)} go together, and {missing[0]} is not set."
            )
        return config

    def store_options(self) -> StoreOptions:
        """The same, as the store takes it."""
        in_bytes = isinstance(self.capacity, int)
        return StoreOptions(
            root=self.root.expanduser().absolute(),
            capacity_bytes=int(self.capacity) if in_bytes else None,
            capacity_fraction=DEFAULT_CAPACITY if in_bytes else self.capacity,
            min_free_fraction=self.min_free,
            segment_bytes=self.segment_size,
            io_threads=self.io_threads,
            direct_io=self.direct_io,
            durability=self.durability,
            read_timeout_s=self.read_timeout_s,
            write_timeout_s=self.write_timeout_s,
            lookup_timeout_s=self.lookup_timeout_s,
            max_io_bytes=self.max_io_size,
            read_only=self.read_only,
        )

    def index_source(self) -> IndexSource:
        """The same, as the cache takes it.

        Raises:
            ConfigError: the address of the index, or what it names, cannot be used.
        """
        if self.index == "embedded":
            return EmbeddedSource()
        secret = self.index_password
        password = "" if secret is None else secret.get_secret_value()
        try:
            settings = RedisSettings.parse(self.index, self.index_password_file, password)
        except IndexAddressError as error:
            raise ConfigError(str(error)) from None
        return RedisSource(settings, self.index_timeout_s)

    @property
    def machine_name(self) -> str:
        """How this machine is called in reports."""
        return self.node_name or socket.gethostname()

    def node_options(self) -> NodeOptions | None:
        """The same, as the agent of a machine takes it; None with an index of one machine alone.

        Raises:
            ConfigError: the file of the secret cannot be used.
        """
        source = self.index_source()
        if not isinstance(source, RedisSource):
            return None
        redis = source.settings
        where = f"{redis.mode} {redis} {redis.service} {redis.db}"
        return NodeOptions(
            store=f"{os.path.normpath(self.store_options().root)} {where}",
            index_address=redis.hosts[0],
            automatic=self.node == "auto",
            directory=self.node_dir,
            name=self.machine_name,
            listen=ListenSpec.parse(self.node_listen),
            secret=self._node_secret(),
            memory_bytes=self.node_memory,
            dscp=self.node_dscp,
            tls_cert=self.node_tls_cert,
            tls_key=self.node_tls_key,
            tls_ca=self.node_tls_ca,
        )

    def _node_secret(self) -> bytes:
        """Empty when none is set."""
        if self.node_secret_file is None:
            return b"" if self.node_secret is None else self.node_secret.get_secret_value().encode()
        file = self.node_secret_file.expanduser()
        try:
            lines = file.read_text().splitlines()
        except (OSError, ValueError):
            raise ConfigError(f"DualPath's node_secret_file {file} cannot be read.") from None
        if not lines or len(lines[0]) < _LEAST_SECRET:
            raise ConfigError(
                f"DualPath's node_secret_file {file} must hold {_EXPECTED['node_secret']}."
            )
        return lines[0].encode()

    def handed_over(self) -> dict[str, Any]:
        """What makes the same configuration in another process, secrets included: for a pipe."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        for name in values:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                values[name] = value.get_secret_value()
            elif isinstance(value, Path):
                values[name] = str(value.expanduser().absolute())
        values.pop("config_file", None)  # what it says is among the values
        return values

    def stream_options(self) -> StreamOptions:
        """The same, as the streamer takes it."""
        return StreamOptions(
            staging_bytes=self.stream_staging,
            queue_depth=self.stream_queue_depth,
            io_bytes=self.stream_io_size,
            first_io_bytes=self.stream_first_io_size,
            piece_bytes=self.stream_piece_size,
            probe_s=self.stream_probe_s,
            hedge_after=self.hedge_after,
        )


def _refuse_unknown(names: Iterable[str], where: str) -> None:
    known = list(DualPathConfig.model_fields)
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f'did you mean "{near[0]}", {_EXPECTED[near[0]]}?' if near else ""
        raise ConfigError(
            f'DualPath has no setting "{name}", which stands in {where}; '
            + (hint or f"there are {', '.join(known)}.")
        )


def _check_file(file: Any) -> None:
    """Refuse a file that is missing, unreadable or no TOML, and unknown keys in it."""
    path = Path(str(file)).expanduser()
    if not path.is_file():
        raise ConfigError(f"DualPath's config_file {path} is not a file.")
    try:
        keys = TomlConfigSettingsSource(DualPathConfig, toml_file=path)()
    except OSError as error:
        raise ConfigError(f"DualPath cannot read its config_file {path}: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"DualPath's config_file {path} is no valid TOML: {error}.") from error
    _refuse_unknown(keys, f"the file {path}")


def _expected(name: str, value: object) -> str:
    if name in _SECRET:
        return f'DualPath\'s setting "{name}" must be {_EXPECTED[name]}.'
    return f'DualPath\'s setting "{name}" must be {_EXPECTED[name]}, not {value!r}.'


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name == "index" and "ctx" in first:
        return str(first["ctx"]["error"])
    if name not in _EXPECTED:
        return f"DualPath cannot use its settings: {first['msg']}."
    return _expected(name, first["input"])
