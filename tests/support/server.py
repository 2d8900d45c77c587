"""A real SGLang server on the CPU as a context manager.

    with Server(model, hicache_flags("file", {"prefetch_threshold": 16})) as server:
        cold = server.generate(prompt)
        server.flush()
        assert server.generate(prompt).cached.storage > 0

Starts are warm (see launcher.py): about 2 s instead of 14, after the first of a test session.
`warm=False`, or the environment variable TEST_COLD_START=1, executes `python -m
sglang.launch_server` itself.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import BASE_ENVIRONMENT, Process, ServerError, launch
from tests.support.tiny_model import FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN

START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 60.0

DEFAULT_FLAGS: dict[str, str] = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--page-size": "16",
    "--max-total-tokens": "4096",
    "--max-running-requests": "4",
    "--mem-fraction-static": "0.3",
    "--random-seed": "0",
    "--host": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens found in each tier: GPU memory, host memory, storage."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gave. `tokens` is empty for chat, which returns text only."""

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    cached: Cached
    finish_reason: str
    elapsed_s: float
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def hicache_flags(
    backend: str | None = None,
    extra_config: Mapping[str, Any] | None = None,
    *,
    layout: str | None = "page_first_direct",
    io: str | None = "direct",
    ratio: float = 4.0,
) -> list[str]:
    """Flags for HiCache: write through at once, wait for storage, host pool `ratio` x device pool.

    `layout` or `io` None leave SGLang's (or the plugin's) default.
    """
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", str(ratio)]
    flags += ["--hicache-write-policy", "write_through"]
    flags += ["--hicache-mem-layout", layout] if layout else []
    flags += ["--hicache-io-backend", io] if io else []
    if backend is not None:
        flags += ["--hicache-storage-backend", backend]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        if extra_config is not None:
            flags += ["--hicache-storage-backend-extra-config", json.dumps(dict(extra_config))]
    return flags


def random_tokens(count: int, seed: int) -> list[int]:
    """A prompt of `count` token ids that all have text."""
    source = random.Random(seed)
    return [source.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN) for _ in range(count)]


def free_port() -> int:
    """A port that is free and stays so until the server binds it, seconds later.

    Below the ephemeral range, from which every connection of the machine takes its local port, and
    away from the range that SGLang takes its inner ports from (22000 to 29999).
    """
    while True:
        port = random.SystemRandom().randrange(10000, 21700)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Server:
    """One SGLang server; processes and port are gone when the context is left.

    model: directory of the model. flags: launch flags, which replace those of DEFAULT_FLAGS. env:
    added to this process's environment. log: file to append to (a temporary one by default).
    """

    def __init__(
        self,
        model: Path | str,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        warm: bool | None = None,
    ) -> None:
        self.model = Path(model)
        self.flags = [str(flag) for flag in flags]
        self.env = dict(env or {})
        self.warm = os.environ.get("TEST_COLD_START") != "1" if warm is None else warm
        self.port = free_port()
        if log is None:
            handle, name = tempfile.mkstemp(prefix="sglang-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self.start_s = 0.0
        self._process: Process | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill9()

    # ---- life

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Launch and wait until a request can be answered. Raises ServerError."""
        assert self._process is None, "already started"
        began = time.monotonic()
        self._process = launch(
            warm=self.warm, flags=self._all_flags(), env=self._environment(), log=self.log
        )
        try:
            while not self._healthy():
                if not self._process.alive():
                    raise ServerError(f"the server died while starting\n{self.log_tail()}")
                if time.monotonic() - began > timeout_s:
                    raise ServerError(f"not healthy within {timeout_s:.0f} s\n{self.log_tail()}")
                time.sleep(0.05)
        except BaseException:
            self.kill9()
            raise
        self.start_s = time.monotonic() - began

    def stop(self, timeout_s: float = 30.0) -> None:
        """SIGTERM as a service manager would, SIGKILL when that takes too long."""
        if self._process is not None:
            self._process.send(signal.SIGTERM)
            self._process.wait(timeout_s)
        self.kill9()

    def kill9(self) -> None:
        """SIGKILL to every process of the server at once; returns when they are gone."""
        if self._process is not None:
            self._process.kill_tree()
            self._process = None

    def restart(self) -> None:
        """Start again, on the same port, after `stop` or `kill9` (or kill and start)."""
        self.kill9()
        self.start()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    @property
    def pids(self) -> list[int]:
        """The processes of the server, the HTTP process first."""
        return [] if self._process is None else self._process.tree()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- requests

    def generate(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int = 16,
        *,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Answer:
        """POST /generate, greedy and without end of text. `fields` go into the body (rid, ...)."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {
            key: prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {**parameters, **(sampling or {})},
            **fields,
        }
        began = time.monotonic()
        reply = self.post("/generate", body)
        meta = reply["meta_info"]
        return Answer(
            tokens=tuple(reply["output_ids"]),
            text=reply["text"],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            cached=_cached(meta.get("cached_tokens_details")),
            finish_reason=meta["finish_reason"]["type"],
            elapsed_s=time.monotonic() - began,
            raw=reply,
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int = 16, **fields: Any
    ) -> Answer:
        """POST /v1/chat/completions, greedy. `fields` go into the body (tools, cache_salt, ...)."""
        body = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_cached_tokens_details": True,
            **fields,
        }
        began = time.monotonic()
        reply = self.post("/v1/chat/completions", body)
        choice, usage = reply["choices"][0], reply["usage"]
        details = (reply.get("sglext") or {}).get("cached_tokens_details")
        return Answer(
            tokens=(),
            text=choice["message"]["content"] or "",
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            cached=_cached(details),
            finish_reason=choice["finish_reason"],
            elapsed_s=time.monotonic() - began,
            raw=reply,
        )

    def flush(self, timeout_s: float = IDLE_TIMEOUT_S) -> None:
        """Empty the device and host tiers, once all writes to storage are through.

        SGLang refuses while anything is in flight, so this asks again until it is idle. The freed
        slots are overwritten with junk (SGLANG_CPU_JUNK_FREED in BASE_ENVIRONMENT).
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status, body = self.request("POST", "/flush_cache")
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise ServerError(f"not idle within {timeout_s:.0f} s: {body.decode()}")
            time.sleep(0.05)

    def overwrite_slots(self, seed: int = 987) -> None:
        """Fill every KV slot through requests with other prompts, then flush.

        For servers without the junk of `flush`. What it sends ends up in storage too.
        """
        self.flush()
        info = self.get("/server_info")
        slots, page = int(info["max_total_num_tokens"]), int(info["page_size"])
        length = min(1024, slots // 2) // page * page
        for i in range(-(-slots // length) + 1):
            self.generate(random_tokens(length, seed + i), max_new_tokens=1)
        self.flush()

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over their labels. Needs --enable-metrics."""
        status, body = self.request("GET", "/metrics")
        if status != 200:
            raise ServerError(f"/metrics: HTTP {status}")
        samples: dict[str, float] = {}
        for line in body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of one metric that carry these labels, settled."""
        status, body = self.request("GET", "/metrics")
        assert status == 200
        total = 0.0
        for line in body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(
                f'{label}="{wanted}"' in sample for label, wanted in labels.items()
            ):
                total += float(value)
        return total

    def post(self, path: str, body: Any = None) -> Any:
        """POST JSON, return the JSON reply. Raises ServerError unless 200."""
        return self._json("POST", path, body)

    def get(self, path: str) -> Any:
        """GET, return the JSON reply. Raises ServerError unless 200."""
        return self._json("GET", path, None)

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Status and body. Raises ServerError when there is no reply."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError as error:
            raise ServerError(f"{method} {path}: {error}\n{self.log_tail()}") from error

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log without the import warnings of SGLang's model registry."""
        if not self.log.exists():
            return f"(no log at {self.log})"
        text = self.log.read_text(errors="replace").splitlines()
        kept = [line for line in text if "Ignore import error" not in line]
        return "\n".join([f"--- end of {self.log}", *kept[-lines:]])

    # ---- inside

    def _json(self, method: str, path: str, body: Any) -> Any:
        status, reply = self.request(method, path, body)
        if status != 200:
            text = reply.decode(errors="replace")[:2000]
            raise ServerError(f"{method} {path}: HTTP {status}: {text}\n{self.log_tail()}")
        return json.loads(reply)

    def _healthy(self) -> bool:
        try:
            # /health answers 200 only after the scheduler has generated a token for it.
            return self.request("GET", "/health", timeout_s=20.0)[0] == 200
        except ServerError:
            return False

    def _all_flags(self) -> list[str]:
        flags = ["--model-path", str(self.model), "--port", str(self.port)]
        for name, value in DEFAULT_FLAGS.items():
            if name not in self.flags:
                flags += [name, value]
        return [*flags, "--skip-server-warmup", "--enable-cache-report", *self.flags]

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, **BASE_ENVIRONMENT, **self.env}
        if "SGLANG_CPU_OMP_THREADS_BIND" not in environment:
            ranks = _flag_value(self.flags, ("--tp-size", "--tp", "--tensor-parallel-size"))
            if int(ranks or 1) > 1:
                cores = sorted(os.sched_getaffinity(0))
                bind = (str(cores[rank % len(cores)]) for rank in range(int(ranks or 1)))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bind)
        return environment


def _flag_value(flags: Sequence[str], names: Sequence[str]) -> str | None:
    for flag, value in itertools.pairwise(flags):
        if flag in names:
            return value
    return None


def _cached(details: Mapping[str, Any] | None) -> Cached:
    details = details or {}
    return Cached(*(int(details.get(tier) or 0) for tier in ("device", "host", "storage")))
