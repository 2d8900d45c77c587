"""What a router is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Role: TypeAlias = Literal["prefill", "decode"]
Path: TypeAlias = Literal["free", "shorter_queue", "split", "pe", "de"]
Policy: TypeAlias = Literal["dualpath", "round_robin"]

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's ``--disaggregation-bootstrap-port``."""
_LONGEST = 256


class OptionsError(ValueError):
    """Something that a router was told makes no sense; the message is one plain sentence."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One SGLang server.

    Args:
        url: ``http://host:port``, without a slash at its end.
        role: what it is for.
        bootstrap_port: where decode servers meet it; of prefill servers.
        node: the DualPath name of its machine; empty when it was not told, and then nothing is
            said to it about who reads.
        group: of decode servers that share a queue (the paper's second level); empty for one of
            its machine's own.
    """

    url: str
    role: Role
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    node: str = ""
    group: str = ""

    @property
    def name(self) -> str:
        """``host:port``, unique among engines."""
        return urlsplit(self.url).netloc

    @property
    def host(self) -> str:
        """Where the bootstrap server listens too."""
        return urlsplit(self.url).hostname or ""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> EngineSpec:
        """From JSON: url, role, and perhaps bootstrap_port, node and group.

        Raises:
            OptionsError: one is missing, unknown, or not what it should be.
        """
        unknown = set(fields) - {"url", "role", "bootstrap_port", "node", "group"}
        if unknown:
            raise OptionsError(f"An engine has no {sorted(unknown)[0]!r}")
        url, role = fields.get("url"), fields.get("role")
        if role not in ("prefill", "decode"):
            raise OptionsError('The role of an engine is "prefill" or "decode"')
        port = fields.get("bootstrap_port")
        if port is None:
            port = DEFAULT_BOOTSTRAP_PORT
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise OptionsError("The bootstrap_port of an engine is a number from 1 to 65535")
        names = []
        for what in ("node", "group"):
            name = fields.get(what) or ""
            if not isinstance(name, str) or len(name) > _LONGEST or not name.isprintable():
                raise OptionsError(f"The {what} of an engine is a short text")
            names.append(name)
        known: Role = "prefill" if role == "prefill" else "decode"
        return cls(_url(url), known, port, *names)

    @classmethod
    def parse(cls, text: str, role: Role) -> EngineSpec:
        """From a command line: ``URL[,bootstrap_port=N][,node=NAME][,group=NAME]``.

        Raises:
            OptionsError: it is not such a text.
        """
        url, *rest = text.split(",")
        fields: dict[str, object] = {"url": url, "role": role}
        for part in rest:
            name, equals, value = part.partition("=")
            if not equals or name not in ("bootstrap_port", "node", "group"):
                raise OptionsError(
                    f"An engine is URL[,bootstrap_port=N][,node=NAME][,group=NAME], not {text!r}"
                )
            number = name == "bootstrap_port" and value.isdigit()
            fields[name] = int(value) if number else value
        return cls.of(fields)

    def as_json(self) -> dict[str, str | int]:
        """What :meth:`of` takes."""
        return {
            "url": self.url,
            "role": self.role,
            "bootstrap_port": self.bootstrap_port,
            "node": self.node,
            "group": self.group,
        }


def _url(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise OptionsError("The url of an engine is a text such as http://10.0.0.1:30000")
    text = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(text)
        usable = bool(parts.hostname) and parts.port is not None and "@" not in parts.netloc
    except ValueError:
        usable = False
    if not usable or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
        raise OptionsError(f"The url of an engine is like http://10.0.0.1:30000, not {value!r}")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything but where the index is. Times in seconds.

    Args:
        host, port: where it listens; port 0 takes any.
        engines: known from the start.
        group: routers of one group on one Redis share engines and sessions.
        model: name of the model that engines must serve; empty for that of the first.
        policy: the paper's scheduling, or its ablation, in which sides read in turn too unless
            ``path`` names others.
        path: who is told to read a hit; ``free`` tells nobody.
        affinity: whether sessions return to where their prefix is warm.
        warm_s: how long engines are believed to keep a prefix in memory.
        alpha_s, beta_s: the paper's 3 and 5 seconds.
        read_rate, prefill_rate: tokens a second of a node and of a PE, counted until they have
            been measured; None: no bound until then.
        poll_interval_s: between two questions to an engine for its load.
        dead_after_s: an engine that has not answered for so long is dead.
        stuck_after_s: so is one that has our requests and whose scheduler has not told anything
            new for so long.
        queue_limit: requests that may wait.
        queue_timeout_s: how long one may wait.
        engine_wait_s: how long one may wait while no engine of a role is ready.
        attempts: how often a request is placed.
        connect_timeout_s: of a connection to an engine.
        prefill_timeout_s: how long a prefill server may take for its answer, all that it waits for
            included; with all attempts less than the 300 s that SGLang waits for KV.
        drain_timeout_s: how long requests may take to end after SIGTERM.
        max_body: bytes of a request.
        output_tokens: reserved for an answer whose length is not bounded by the request.
        sessions: how many are remembered.
        admin_key: needed to change engines; empty for none.
        engine_key: for the router's own questions to engines.
        lend_engine_key: also sent with requests of clients that have no Authorization of their own.
        record: file to which rounds of placement are written.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    engines: tuple[EngineSpec, ...] = ()
    group: str = "default"
    model: str = ""
    policy: Policy = "dualpath"
    path: Path = "shorter_queue"
    affinity: bool = True
    warm_s: float = 600.0
    alpha_s: float = 3.0
    beta_s: float = 5.0
    read_rate: float | None = None
    prefill_rate: float | None = None
    poll_interval_s: float = 0.25
    dead_after_s: float = 6.0
    stuck_after_s: float = 30.0
    queue_limit: int = 10_000
    queue_timeout_s: float = 60.0
    engine_wait_s: float = 8.0
    attempts: int = 3
    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 90.0
    drain_timeout_s: float = 30.0
    max_body: int = 64 << 20
    output_tokens: int = 512
    sessions: int = 100_000
    admin_key: str = field(default="", repr=False)
    engine_key: str = field(default="", repr=False)
    lend_engine_key: bool = False
    record: str = ""

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engines]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise OptionsError(f"The engine {sorted(twice)[0]} is named twice")
        if not self.group or not self.group.isascii() or not self.group.isprintable():
            raise OptionsError("The group of routers is a short text")
