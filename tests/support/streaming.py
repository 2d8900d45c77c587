"""A server in streaming mode over a store of its own, with faults to switch on."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.server import Answer, Server
from tests.support.server_faults import Faults

PAGE_TOKENS = 16
SETTINGS: Mapping[str, Any] = {
    "capacity": "512MiB",
    "segment_size": "8MiB",
    # Every layer is read on its own, so that the order of things shows.
    "stream_first_io_size": 4096,
    "stream_io_size": 4096,
    "stream_probe_s": 0,
    "load_timeout_s": 20,
}


class StreamingServer(Server):
    """`--hicache-storage-backend dualpath` and nothing else that the mode needs."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        root: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.root = root or folder / "store"
        self.faults = Faults(folder / "faults")
        config = {**SETTINGS, "root": str(self.root), **(settings or {})}
        super().__init__(
            model,
            [
                "--hicache-storage-backend",
                "dualpath",
                "--hicache-storage-backend-extra-config",
                json.dumps(config),
                "--enable-metrics",
                *flags,
            ],
            env={**self.faults.env, **(env or {})},
            log=folder / "server.log",
        )

    def uncached(self, prompt: Sequence[int], max_new_tokens: int = 16, **fields: Any) -> Answer:
        """The answer of a run that shares pages with nobody; it leaves none that others find."""
        answer = self.generate(prompt, max_new_tokens, extra_key=uuid.uuid4().hex, **fields)
        assert answer.cached_tokens == 0
        return answer

    def store(self, *prompts: Sequence[int]) -> None:
        """Have the prompts' pages in the store and nowhere else."""
        for prompt in prompts:
            self.generate(prompt, 1)
        self.flush()

    def generate_together(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16, **fields: Any
    ) -> list[Answer]:
        """One HTTP request with several prompts, which SGLang prefills in one batch."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            **fields,
        }
        began = time.monotonic()
        return [answer_of(reply, began) for reply in self.post("/generate", body)]

    def streamed(self, prompt: Sequence[int], max_new_tokens: int = 16) -> list[dict[str, Any]]:
        """The events that a streaming client gets."""
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "stream": True}
        status, reply = self.request("POST", "/generate", body)
        assert status == 200, reply
        lines = [line[6:] for line in reply.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def answer_of(reply: Mapping[str, Any], began: float) -> Answer:
    from tests.support.server import _cached

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


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = call(*args, **kwargs)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is not back yet."""
        return self._thread.is_alive()

    def result(self, timeout_s: float = 120.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"not back after {timeout_s:.0f} s"
        if self._error is not None:
            raise self._error
        return self._result


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not so after {timeout_s:.0f} s"
        time.sleep(0.02)
