"""A process of a prefill host: the real SGLang server on the CPU, asked by the driver.

``python -m bench.cluster.sglang_engine SPEC``. What the systems are here:

| system | |
|---|---|
| ``basic`` | HiCache mode, this host's storage NIC alone: the whole hit is read, then computed on |
| ``layerwise`` | streaming mode, this host's storage NIC alone |
| ``dualpath``, ``split`` | streaming mode, the shorter queue or all NICs |
| ``oracle`` | the hit is where the model reads it |
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.cluster.lines import Answer, Driver, Message
from bench.cluster.sglang_store import BLOCKS
from bench.cluster.spec import DSCP, SECRET, HostSpec
from bench.measure import BenchError
from examples.demo import make_model
from examples.serving import CPU_ENVIRONMENT, CPU_FLAGS, Server

PAGE_TOKENS = 64
VOCABULARY = 256
_REQUEST_S = 120.0
_SETTLE_S = 60.0
_POLICIES = {"dualpath": "shorter_queue", "split": "split"}


class Engine:
    """Answers the driver."""

    def __init__(self, spec: HostSpec, folder: Path) -> None:
        self._spec = spec
        model = make_model(folder / "model")
        settings: dict[str, Any] = {
            "root": spec.root,
            "capacity": "2GiB",
            "min_free": "0%",
            "segment_size": "32MiB",
            "index": spec.redis,
            "index_timeout_s": 2.0,
            "direct_io": "off",
            "stream_probe_s": 0,
            "stream_io_size": "256KiB",
            "stream_first_io_size": "16KiB",
            "load_timeout_s": 60,
            "lookup_wait_s": 1.0,
            "node": "off",
            "node_dir": str(folder / "machine"),
            "node_dscp": DSCP,
            "node_secret": SECRET.decode(),
            "read_paths": _POLICIES.get(spec.system, "local"),
            "split_floor": "64KiB",
        }
        flags = [
            *CPU_FLAGS,
            *("--max-total-tokens", "16384", "--page-size", str(PAGE_TOKENS)),
            *("--random-seed", "0", "--skip-server-warmup", "--enable-metrics"),
            *("--hicache-storage-backend", "dualpath"),
            *("--hicache-storage-backend-extra-config", json.dumps(settings)),
        ]
        if spec.system == "basic":
            flags += ["--enable-hierarchical-cache", "--hicache-ratio", "1.5"]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        assert spec.blocks is not None
        environment = {
            **CPU_ENVIRONMENT,
            "SGLANG_CPU_TEST_HOOKS": "bench.cluster.sglang_store:install",
            BLOCKS: f"{spec.blocks[0]}:{spec.blocks[1]}",
        }
        self._server = Server(model, flags, folder / "server.log", environment)
        self._server.start()
        self._http = httpx.Client(base_url=self._server.url, timeout=_REQUEST_S)

    def fill(self, request: Message, answer: Answer) -> None:
        """Have the first tokens of a trajectory in the store and nowhere else."""
        tokens = request["tokens"]
        self._generate(request["trajectory"], tokens)
        wanted = tokens // PAGE_TOKENS
        end = time.monotonic() + _SETTLE_S
        while self._stored_pages() < request["pages_before"] + wanted:
            if time.monotonic() > end:
                raise BenchError(f"{wanted} pages are not stored within {_SETTLE_S:.0f} s")
            time.sleep(0.1)
        self._server.flush()
        answer({"pages": wanted})

    def prefill(self, request: Message, answer: Answer) -> None:
        """A turn: ``trajectory``, ``context`` and ``append`` in tokens."""
        context, append = request["context"], request["append"]
        if self._spec.system == "oracle":
            self._generate(request["trajectory"], context)
        began = time.monotonic()
        told = self._generate(request["trajectory"], context + append)
        took = time.monotonic() - began
        details = told["meta_info"].get("cached_tokens_details") or {}
        oracle = self._spec.system == "oracle"
        hit = int(told["meta_info"]["cached_tokens"] if oracle else details.get("storage", 0))
        pages = hit // PAGE_TOKENS
        self._server.flush()
        answer(
            {
                "ttft_s": took,
                "hit_pages": pages,
                "short_pages": context // PAGE_TOKENS - pages,
                "ok": True,
                "text": told["text"],
            }
        )

    def stats(self, request: Message, answer: Answer) -> None:
        """Bytes of hits, by path."""
        del request
        path = {p: self._server.metric("dualpath_path_bytes_total", path=p) for p in ("pe", "de")}
        answer({"landed_bytes": int(sum(path.values())), "wrong": 0, **path})

    def nodes(self, request: Message, answer: Answer) -> None:
        """How many other nodes the server can ask."""
        del request
        answer({"nodes": int(self._server.metric("dualpath_nodes"))})

    def _generate(self, trajectory: str, count: int) -> dict[str, Any]:
        rng = random.Random(trajectory)
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(count)]
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        reply = self._http.post(
            "/generate", json={"input_ids": tokens, "sampling_params": sampling}
        )
        if reply.status_code != 200:
            raise BenchError(f"The server answers {reply.status_code}: {reply.text[:200]}")
        told: dict[str, Any] = reply.json()
        return told

    def _stored_pages(self) -> float:
        return self._server.metric("dualpath_blocks_total", outcome="written")

    def close(self) -> None:
        """End the server."""
        self._http.close()
        self._server.kill()


def main() -> None:
    """Run until the driver is gone."""
    logging.basicConfig(level=logging.WARNING)
    driver = Driver()
    with tempfile.TemporaryDirectory(prefix="dualpath-bench-") as folder:
        engine = Engine(HostSpec.from_json(sys.argv[1]), Path(folder))
        try:
            driver.ready()
            driver.serve(
                {
                    "fill": engine.fill,
                    "prefill": engine.prefill,
                    "stats": engine.stats,
                    "nodes": engine.nodes,
                }
            )
        finally:
            engine.close()


if __name__ == "__main__":
    main()
